"""Less usual ways to depend on a file: all of them in one project, changed all at once."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

FILES = {
    "broken.py": "def used():\n    return 1\n\ndef unused(x):\n    return x\n",
    "test_broken.py": "def test_what_cannot_be_compiled():\n    import broken\n    assert broken.used() == 1\n",
    "lazy.py": "def numbers():\n    yield 1\n",
    "test_lazy.py": "import lazy, types\n\ndef test_generator():\n    assert isinstance(lazy.numbers(), types.GeneratorType)\n",
    "s/run_x.py": "import run_y\nV = run_y.V\n",
    "s/run_y.py": "V = 1\n",
    "test_run.py": """
        import runpy

        def test_run_path(monkeypatch):
            monkeypatch.syspath_prepend("s")
            assert runpy.run_path("s/run_x.py")["V"] == 1
        """,
    "pk/__init__.py": "",
    "pk/opt.py": "",
    "test_spec.py": "import importlib.util\n\ndef test_find_spec():\n    assert importlib.util.find_spec('pk.opt') is not None\n",
    "pickled.py": "class P:\n    LIMIT = 5\n",
    "d.pkl": "cpickled\nP\n.",
    "test_p1.py": "import pickle\n\ndef test_pickle_first():\n    assert pickle.load(open('d.pkl', 'rb')).LIMIT == 5\n",
    "test_p2.py": "import pickle\n\ndef test_pickle_second():\n    assert pickle.load(open('d.pkl', 'rb')).LIMIT == 5\n",
    "out/a.txt": "",
    "test_made.py": """
        import os

        def test_makedirs():
            os.makedirs("out", exist_ok=True)
            assert os.listdir("out") == ["a.txt"] and os.path.isdir(s="out")
        """,
    "test_base.py": """
        import sqlite3

        def test_base():
            with sqlite3.connect("file:d.db?mode=ro", uri=True) as base:
                assert base.execute("select v from t").fetchone() == (1,)
        """,
    "conftest.py": """
        import os, pytest

        @pytest.fixture(scope="session")
        def flagged():
            if os.path.exists("flag"):
                pytest.fail("the flag is there")
            pytest.xfail("no flag")
        """,
    "test_flag.py": "def test_flag_first(flagged):\n    pass\n\ndef test_flag_second(flagged):\n    pass\n",
    "shelled": "cat shelled.txt\n",
    "shelled.txt": "1",
    "test_shelled.py": """
        import subprocess

        def test_script_without_a_name():
            assert subprocess.check_output(["sh", "shelled"]) == b"1"
        """,
    "lib/silent.py": "def f():\n    return 1\n",
    "test_silent.py": """
        import os, subprocess, sys

        def test_script_of_its_own(tmp_path):
            (tmp_path / "x.py").write_text("import silent; print(silent.f())")
            variables = {**os.environ, "PYTHONPATH": os.path.abspath("lib")}
            assert subprocess.check_output([sys.executable, str(tmp_path / "x.py")], env=variables) == b"1\\n"
        """,
    "test_far.py": "def test_far():\n    pass\n",
}


def test_each_of_them_selects_its_test(tmp_path: Path) -> None:
    project = Small(tmp_path, FILES)
    with sqlite3.connect(tmp_path / "d.db") as base:
        base.executescript("create table t (v); insert into t values (1);")
    base.close()
    project.settled()
    project.edit("broken.py", "return x", "await x")
    project.edit("lazy.py", "yield 1", "return [1]")
    project.edit("s/run_y.py", "1", "2")
    (tmp_path / "pk/opt.py").unlink()
    project.edit("pickled.py", "5", "6")
    project.write("out/b.txt", "")
    with sqlite3.connect(tmp_path / "d.db") as base:
        base.execute("update t set v = 2")
    base.close()
    project.write("flag", "")
    project.write("shelled.txt", "2")
    project.edit("lib/silent.py", "1", "2")
    after = project.run()
    wanted = {
        "test_what_cannot_be_compiled",
        "test_generator",
        "test_run_path",
        "test_find_spec",
        "test_pickle_first",
        "test_pickle_second",
        "test_makedirs",
        "test_base",
        "test_flag_first",
        "test_flag_second",
        "test_script_without_a_name",
        "test_script_of_its_own",
    }
    assert after.ran == wanted, after.out
    assert all(f"{test} " in after.out for test in wanted)
