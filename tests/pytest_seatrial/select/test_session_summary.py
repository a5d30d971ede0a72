"""What a session says about its choice, and what wins when options contradict each other; older versions of pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pytest_seatrial.select.projects import Small

pytestmark = pytest.mark.slow

OPTION = """
    def pytest_addoption(parser):
        parser.addoption("--device", default="cpu")
    """
TWO = "def test_one():\n    pass\n\ndef test_two():\n    pass\n"
STALE = "the map is not trusted: recorded with another set of pytest options"


@pytest.fixture
def small(tmp_path: Path) -> Small:
    return Small(tmp_path / "p", {"conftest.py": OPTION, "test_t.py": TWO})


@pytest.mark.parametrize("select", ["--seatrial-select", "--seatrial-select-why"])
def test_recording_wins_over_selecting(small: Small, select: str) -> None:
    small.settled()
    session = small.pytest("--seatrial-record", select)
    assert session.ran == {"test_one", "test_two"}, session.out
    assert "no test is affected" not in session.out


def test_other_options_of_the_project_are_the_reason_that_is_told(small: Small) -> None:
    small.settled()
    session = small.run("--device=gpu")
    assert "seatrial: test_t.py::test_one: affected: other options of the project" in session.out
    assert "seatrial: 2 of 2 tests selected: 2 by other options of the project\n" in session.out


def test_options_and_files_are_told_apart(small: Small) -> None:
    small.write("test_file.py", "def test_file():\n    open('a.txt').close()\n")
    small.write("a.txt", "1")
    small.settled()
    small.run("--device=gpu", "test_file.py")
    small.write("a.txt", "2")
    session = small.run("--device=gpu")
    assert "3 of 3 tests selected: 1 affected (1 changed file), 2 by other options of the project\n" in session.out


def test_names_in_the_root_are_one_changed_place(tmp_path: Path) -> None:
    small = Small(tmp_path / "p", {"test_l.py": "import os\n\ndef test_lists():\n    assert os.listdir('.')\n"})
    small.run("-p", "no:cacheprovider", env={"PYTHONDONTWRITEBYTECODE": "1"})
    small.write("new.txt", "")
    session = small.run("-p", "no:cacheprovider", env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert session.ran == {"test_lists"}
    assert "(0 changed files)" not in session.out


@pytest.mark.parametrize("more", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_stale_map_is_told_before_the_first_test_and_at_the_end(small: Small, more: list[str]) -> None:
    small.settled()
    small.write("pytest.ini", "[pytest]\npythonpath = .\naddopts = --tb=short\n")
    out = small.run("-v", *more).out
    assert out.count(STALE) == 2, out
    assert out.index(STALE) < out.index("test_t.py::test_one") < out.rindex(STALE)


def test_a_map_that_is_trusted_or_not_asked_is_not_in_the_header(small: Small) -> None:
    assert "not trusted" not in small.pytest("-v", "--seatrial-record").out
    assert "not trusted" not in small.run("-v").out
    small.write("pytest.ini", "[pytest]\npythonpath = .\naddopts = --tb=short\n")
    assert "not trusted" not in small.run("-v", "-k", "one").out


def test_the_plugin_loads_where_pytest_has_no_stash_and_pluggy_no_new_wrappers(tmp_path: Path) -> None:
    code = (
        "import pytest; del pytest.StashKey\n"
        "kind = type(pytest.hookimpl); new = kind.__call__\n"
        "def older(self, function=None, hookwrapper=False, optionalhook=False, tryfirst=False, trylast=False, specname=None):\n"
        "    return new(self, function, hookwrapper, optionalhook, tryfirst, trylast, specname)\n"
        "kind.__call__ = older\n"
        "from pytest_seatrial.select import select_plugin, recording\n"
        "import pluggy\n"
        "marks = recording.Contexts.pytest_runtest_protocol.pytest_impl\n"
        "assert marks['hookwrapper'] and marks['tryfirst'] and not marks['wrapper'], marks\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
