"""What runs in other processes: multiprocessing, scripts, shells, and children that cannot be traced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

CODE = """
    def work(x):
        return x + helper(x)

    def helper(x):
        return 1

    def unused():
        return 2
    """


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_is_seen_through(tmp_path: Path, method: str) -> None:
    tests = f"""
        import multiprocessing
        import code_m

        def test_pool():
            with multiprocessing.get_context("{method}").Pool(1) as pool:
                assert pool.map(code_m.work, [1]) == [2]

        def test_far():
            pass
        """
    small = Small(tmp_path / "p", {"code_m.py": CODE, "test_m.py": tests})
    small.settled()
    small.edit("code_m.py", "return 1", "return int(1)")
    assert small.run().ran == {"test_pool"}
    small.edit("code_m.py", "return 2", "return 3")
    assert small.run().ran == set()


def test_scripts_and_shells_are_seen_through(tmp_path: Path) -> None:
    files = {
        "code_m.py": CODE,
        "script.py": "import code_m\nassert code_m.work(1) == 2\n",
        "run.sh": 'set -e\ncat "$HERE/words.txt"\necho "$(cat $(echo inner.txt) outer.txt)"\n"$PYTHON" script.py\n',
        "words.txt": "a",
        "inner.txt": "a",
        "outer.txt": "a",
        "test_m.py": """
            import os
            import subprocess
            import sys

            def test_script():
                subprocess.run([sys.executable, "script.py"], check=True)

            def test_shell():
                subprocess.run(["bash", "run.sh"], check=True, env={**os.environ, "PYTHON": sys.executable, "HERE": "."})

            def test_far():
                pass
            """,
    }
    small = Small(tmp_path / "p", files)
    small.settled()
    small.edit("code_m.py", "return 1", "return int(1)")
    assert small.run().ran == {"test_script", "test_shell"}
    for name in ("words.txt", "inner.txt", "outer.txt"):
        small.write(name, "b")
        assert small.run().ran == {"test_shell"}
    small.edit("run.sh", "set -e", "set -eu")
    assert small.run().ran == {"test_shell"}


def test_a_child_that_cannot_be_traced_depends_on_whole_files(tmp_path: Path) -> None:
    files = {
        "code_m.py": CODE,
        "isolated.py": "import sys\nsys.path.insert(0, '.')\nimport code_m\nassert code_m.work(1) == 2\n",
        "test_m.py": """
            import subprocess
            import sys

            def test_isolated():
                subprocess.run([sys.executable, "-I", "-S", "isolated.py"], check=True)

            def test_far():
                pass
            """,
    }
    small = Small(tmp_path / "p", files)
    small.settled()
    small.edit("code_m.py", "return 1", "return int(1)")
    assert small.run().ran == {"test_isolated"}


def test_a_server_of_a_fixture_brings_its_whole_life(tmp_path: Path) -> None:
    files = {
        "code_m.py": CODE,
        "server.py": """
            import sys
            import code_m

            STATE = code_m.work(1)

            def answer():
                return STATE

            for line in sys.stdin:
                print(answer(), flush=True)
            """,
        "test_m.py": """
            import subprocess
            import sys
            import pytest

            @pytest.fixture(scope="module")
            def server():
                process = subprocess.Popen([sys.executable, "server.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                yield process
                process.stdin.close()
                process.wait(20)

            def ask(server):
                server.stdin.write("x\\n")
                server.stdin.flush()
                return server.stdout.readline().strip()

            def test_one(server):
                assert ask(server) == "2"

            def test_two(server):
                assert ask(server) == "2"

            def test_far():
                pass
            """,
    }
    small = Small(tmp_path / "p", files)
    small.settled()
    small.edit("code_m.py", "return 1", "return int(1)")
    assert small.run().ran == {"test_one", "test_two"}
