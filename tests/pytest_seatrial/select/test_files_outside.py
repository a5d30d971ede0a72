"""Sources above pytest's root, beside the repository, and files that other people's code keeps."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Session, Small

pytestmark = pytest.mark.slow

TESTS = "import sys\nsys.path.insert(0, '../src')\nimport m\n\ndef test_it(): assert m.f() == 1\n\ndef test_far(): pass\n"


def _above(tmp_path: Path, *, git: bool) -> Small:
    """A project whose pytest.ini stands in tests/, below the sources."""
    top = tmp_path / "p"
    small = Small(top / "tests", {"test_a.py": TESTS, "../src/m.py": "def f():\n    return 1\n"})
    if git:
        subprocess.run(["git", "init", "-q"], cwd=top, check=True, timeout=60)
    return small


def test_sources_above_the_root_of_pytest_are_selected_by_function(tmp_path: Path) -> None:
    small = _above(tmp_path, git=True)
    small.settled()
    assert (small.root / ".seatrial-select.sqlite").exists()
    small.edit("../src/m.py", "return 1", "return 2")
    after = small.run()
    assert (after.ran, after.code) == ({"test_it"}, 1), after.out
    assert "FAILED test_a.py::test_it" in after.out


@pytest.mark.parametrize("ini", ["seatrial_select_inputs = data/*.txt", "seatrial_select_inputs = tests/data/*.txt"])
def test_globs_may_be_relative_to_either_root(tmp_path: Path, ini: str) -> None:
    small = _above(tmp_path, git=True)
    small.write("pytest.ini", f"[pytest]\npythonpath = .\n{ini}\n")
    small.write("data/one.txt", "1")
    small.settled()
    small.write("data/one.txt", "2")
    assert small.run().ran == {"test_it", "test_far"}


def test_a_directory_that_git_ignores_is_no_part_of_the_repository_around(tmp_path: Path) -> None:
    small = _above(tmp_path, git=True)
    (small.root.parent / ".gitignore").write_text("tests\n")
    small.settled()
    (small.root.parent / "other.py").write_text("import nothing\n")
    assert small.run().ran == set()


def test_modules_outside_of_the_root_count_whole(tmp_path: Path) -> None:
    small = _above(tmp_path, git=False)
    small.settled()
    small.edit("../src/m.py", "return 1", "return 2")
    after = small.run()
    assert after.code == 1, after.out
    assert "test_it" in after.ran


def test_modules_outside_of_the_root_count_in_children_too(tmp_path: Path) -> None:
    test = (
        "import os, subprocess, sys\n\ndef test_it():\n"
        "    assert subprocess.check_output([sys.executable, 'go.py'], text=True).strip() == '1'\n"
    )
    files = {"test_a.py": test, "go.py": "import sys\nsys.path.insert(0, '../lib')\nimport m\nprint(m.V)\n", "../lib/m.py": "V = 1\n"}
    small = Small(tmp_path / "p", files)
    small.settled()
    small.edit("../lib/m.py", "V = 1", "V = 2")
    after = small.run()
    assert (after.ran, after.code) == ({"test_it"}, 1), after.out


def test_modules_that_a_test_makes_for_itself_do_not_count(tmp_path: Path) -> None:
    test = (
        "import sys\n\ndef test_it(tmp_path, monkeypatch):\n"
        "    (tmp_path / 'made_s.py').write_text('V = 1')\n    monkeypatch.syspath_prepend(tmp_path)\n    import made_s\n"
    )
    small = Small(tmp_path / "p", {"test_a.py": test})
    small.run("--basetemp", str(tmp_path / "one"))
    assert small.run("--basetemp", str(tmp_path / "one")).ran == set()


def _rendered(tmp_path: Path) -> Session:
    pytest.importorskip("jinja2")
    files = {
        "templates/a.txt": "1",
        "templates/b.txt": "1",
        "m.py": (
            "import jinja2\nENV = jinja2.Environment(loader=jinja2.FileSystemLoader('templates'), auto_reload=False)\n\n"
            "def render(name):\n    return ENV.get_template(name).render()\n"
        ),
        "test_a.py": "import m\n\n" + "\n\n".join(f"def test_{n}(): assert m.render('a.txt') == '1'" for n in ("first", "second")),
        "test_b.py": "def test_far(): assert open('templates/b.txt').read() == '1'\n",
    }
    small = Small(tmp_path / "p", files)
    small.settled()
    small.write("templates/a.txt", "2")
    return small.run()


def test_a_file_that_other_peoples_code_keeps_counts_for_all_who_come_by_the_same_way(tmp_path: Path) -> None:
    after = _rendered(tmp_path)
    assert after.ran == {"test_first", "test_second"}, after.out


def test_a_missing_name_that_path_stat_asks_for(tmp_path: Path) -> None:
    test = "import pathlib, pytest\n\ndef test_it():\n    with pytest.raises(FileNotFoundError): pathlib.Path('nope.txt').stat()\n"
    small = Small(tmp_path / "p", {"test_a.py": test})
    small.settled()
    small.write("nope.txt", "")
    after = small.run()
    assert (after.ran, after.code) == ({"test_it"}, 1), after.out
