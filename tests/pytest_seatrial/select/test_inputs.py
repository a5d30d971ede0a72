"""Files that are not imported: read, absent, listed, named by scripts, or loaded by a name that only runs know."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("suffix", ["yaml", "json", "toml", "sh", "txt"])
def test_a_file_that_a_test_reads_selects_it(tmp_path: Path, suffix: str) -> None:
    tests = f"""
        from pathlib import Path

        def test_reads():
            assert Path(__file__).with_name("input.{suffix}").read_text()

        def test_does_not():
            pass
        """
    small = Small(tmp_path / "p", {f"input.{suffix}": "a = 1\n", "test_r.py": tests})
    small.settled()
    small.write(f"input.{suffix}", "a = 2\n")
    assert small.run().ran == {"test_reads"}
    assert small.run().ran == set()


def test_a_file_that_was_absent_counts_when_it_appears_and_goes(tmp_path: Path) -> None:
    tests = """
        import os
        import tempfile

        def test_looks():
            try:
                open("maybe.txt").close()
            except FileNotFoundError:
                pass

        def test_asks():
            os.path.exists("perhaps.txt")

        def test_lists():
            os.listdir("folder")

        def test_tries():
            try:
                import local_settings
            except ImportError:
                pass
        """
    small = Small(tmp_path / "p", {"test_l.py": tests, "folder/one": "1"})
    small.settled()
    small.write("maybe.txt", "x")
    assert small.run().ran == {"test_looks"}
    small.write("perhaps.txt", "x")
    assert small.run().ran == {"test_asks"}
    small.write("perhaps.txt", "y")
    assert small.run().ran == set()
    small.write("folder/two", "x")
    assert small.run().ran == {"test_lists"}
    (small.root / "maybe.txt").unlink()
    assert small.run().ran == {"test_looks"}
    small.write("local_settings.py", "A = 1\n")
    assert "test_tries" in small.run().ran


def test_what_a_test_writes_itself_is_no_input(tmp_path: Path) -> None:
    tests = """
        import random
        from pathlib import Path

        def test_writes():
            Path("out.txt").write_text(str(random.random()))
            assert Path("out.txt").read_text()
        """
    small = Small(tmp_path / "p", {"test_w.py": tests})
    small.settled()
    small.write("out.txt", "other")
    assert small.run().ran == set()


def test_a_module_loaded_by_a_name_in_a_registry_is_seen(tmp_path: Path) -> None:
    files = {
        "plugins/__init__.py": "",
        "plugins/red.py": "SHADE = 1\n\ndef make():\n    return 'red'\n",
        "registry.py": """
            import importlib

            KINDS = {"red": "red"}

            def build(name):
                return importlib.import_module("plugins." + KINDS[name])
            """,
        "test_d.py": """
            import registry

            def test_build():
                assert registry.build("red").make() == "red"

            def test_constant():
                assert registry.build("red").SHADE

            def test_far():
                pass
            """,
    }
    small = Small(tmp_path / "p", files)
    small.settled()
    small.edit("plugins/red.py", "SHADE = 1", "SHADE = 2")
    assert small.run().ran >= {"test_build", "test_constant"}
    small.edit("plugins/red.py", "return 'red'", "return 'r' + 'ed'")
    assert small.run().ran == {"test_build"}


def test_files_named_as_inputs_belong_to_every_test(tmp_path: Path) -> None:
    small = Small(tmp_path / "p", {"data/native.c": "int x;", "test_i.py": "def test_i():\n    pass\n"})
    small.write("pytest.ini", "[pytest]\nseatrial_select_inputs = data/*.c\n")
    small.settled()
    small.write("data/native.c", "int y;")
    assert small.run().ran == {"test_i"}


def test_looking_for_distributions_is_no_listing_of_the_root(tmp_path: Path) -> None:
    code = """
        import os
        from importlib import metadata

        VERSION = metadata.version("pytest")

        def names():
            return os.listdir()
        """
    tests = "import code_m\n\ndef test_m():\n    assert code_m.VERSION\n\ndef test_lists():\n    assert code_m.names()\n"
    small = Small(tmp_path / "p", {"code_m.py": code, "test_m.py": tests})
    small.settled()
    small.write("new.txt", "")
    assert small.run().ran == {"test_lists"}


def test_a_project_in_a_folder_named_like_a_tool_is_no_tool(tmp_path: Path) -> None:
    tests = "import os\n\ndef test_lists():\n    os.listdir('data')\n\ndef test_asks():\n    os.path.exists('data/new.txt')\n"
    small = Small(tmp_path / "pluggy" / "_pytest", {"data/a.txt": "", "test_l.py": tests})
    small.settled()
    small.write("data/new.txt", "")
    assert small.run().ran == {"test_lists", "test_asks"}


def test_sources_that_a_tool_reads_for_itself_are_not_the_tests(tmp_path: Path) -> None:
    """Coverage reads every source to report on it; a test that reads one by its own hand depends on all of it."""
    tool = "def look(path):\n    with open(path) as file:\n        return file.read()\n"
    tests = """
        import sys
        sys.path.insert(0, "lib/site-packages")
        import code_r
        from coverage.reading import look

        def test_tool():
            look("code_r.py")

        def test_own():
            open("code_r.py").close()
        """
    files = {"code_r.py": "def f():\n    return 1\n", "test_r.py": tests}
    small = Small(tmp_path / "p", {**files, "lib/site-packages/coverage/__init__.py": "", "lib/site-packages/coverage/reading.py": tool})
    small.settled()
    small.edit("code_r.py", "return 1", "return 2")
    assert small.run().ran == {"test_own"}


def test_a_directory_that_is_a_link_can_be_pointed_elsewhere(tmp_path: Path) -> None:
    tests = "def test_reads():\n    assert open('ld/x').read()\n"
    small = Small(tmp_path / "p", {"rd/x": "1", "rd2/x": "2", "test_l.py": tests})
    link = small.root / "ld"
    link.symlink_to("rd")
    small.settled()
    link.unlink()
    link.symlink_to("rd2")
    assert small.run().ran == {"test_reads"}


def test_names_that_no_file_or_no_text_can_have_do_no_harm(tmp_path: Path) -> None:
    tests = """
        import os

        def test_asks():
            assert not os.path.exists("a\\0b")
            assert not os.path.isfile(os.fsdecode(b"\\xff.txt"))
            assert not os.path.isdir("x" * 1000)

        def test_makes():
            os.makedirs("made", exist_ok=True)

        def test_sees():
            os.path.isdir("made")
        """
    small = Small(tmp_path / "p", {"test_n.py": tests})
    assert small.pytest("--seatrial-record").code == 0
    (small.root / "made").rmdir()
    assert small.run().ran == set()
    (small.root / os.fsdecode(b"\xff.txt")).write_text("")
    assert small.run().ran == {"test_asks"}
