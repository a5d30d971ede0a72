"""Odd tests, odd groups, and file systems that lack something."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from pytest_seatrial import suite_groups, unit_results
from pytest_seatrial.unit_results import Partial, Tracked, document, restore, write
from tests.pytest_seatrial.tracker.guarded import project, pytest_in
from tests.pytest_seatrial.tracker.tracked import dated, latest, session

pytestmark = pytest.mark.slow

ONE = [Tracked("t.py::f", "t::f", "passed", '{"x": 1}')]


def test_a_name_that_no_file_can_hold_is_an_error_in_that_test(tmp_path: Path) -> None:
    code = 'def test_odd(tracker): tracker.track("\\ud800", 1)\ndef test_fine(tracker): tracker.track("größe 🚀", 1)\n'
    done = session(tmp_path, code)
    assert "is no text that UTF-8 can hold" in done.stdout
    assert latest(tmp_path)["outcomes"] == {"test_it::test_odd": "failed", "test_it::test_fine": "passed"}


def test_a_test_that_deletes_its_directory_loses_nothing(tmp_path: Path) -> None:
    code = """
    import os, shutil, threading
    def test_it(tracker, tmp_path):
        os.chdir(tmp_path)
        shutil.rmtree(tmp_path)
        threads = [threading.Thread(target=tracker.track, args=(f"t{n}", n)) for n in range(20)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    """
    session(tmp_path, code, f"--basetemp={tmp_path / 'base'}")
    assert len(latest(tmp_path)["metrics"]["test_it::test_it"]) == 21


def test_listing_tests_writes_nothing_and_stopping_early_keeps_what_ran(tmp_path: Path) -> None:
    code = "def test_a(tracker): tracker.track('x', 1)\ndef test_b(tracker): assert 0\ndef test_c(tracker): tracker.track('x', 3)\n"
    session(tmp_path, code, "--co")
    assert not (tmp_path / "unit_results.json").exists()
    session(tmp_path, None, "-x")
    assert (latest(tmp_path)["exit_status"], list(latest(tmp_path)["outcomes"].values())) == (1, ["passed", "failed"])


def test_an_interrupted_session_keeps_what_ran_and_its_status(tmp_path: Path) -> None:
    code = "def test_a(tracker): tracker.track('x', 1)\ndef test_b(tracker): raise KeyboardInterrupt\n"
    session(tmp_path, code)
    assert latest(tmp_path)["exit_status"] == 2
    assert latest(tmp_path)["metrics"]["test_it::test_a"]["x"] == 1
    assert len(dated(tmp_path)) == 1


def test_a_file_system_without_links_still_gets_dated_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    names = [write(tmp_path, "20260102_030405", document({}, ONE, 0, {}), latest=True).name for _ in range(2)]
    assert names == ["20260102_030405.json", "20260102_030405-2.json"]
    assert sorted(path.name for path in (tmp_path / unit_results.DATED).iterdir()) == sorted(names)


def test_a_file_system_without_locks_leaves_no_file_of_a_killed_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="no locks"):
        Partial(tmp_path, 0.0, {})
    assert list((tmp_path / unit_results.DATED).iterdir()) == []


def test_a_session_that_begins_just_now_is_not_taken_for_a_killed_one(tmp_path: Path) -> None:
    begun = tmp_path / unit_results.DATED / f".20260102_030405{unit_results.SUFFIX}"
    begun.parent.mkdir()
    begun.touch()
    assert (restore(tmp_path), begun.exists()) == ([], True)
    os.utime(begun, (1, 1))
    assert len(restore(tmp_path)) == 1


@pytest.mark.parametrize("name", ["needs", "parametrize", "skipif", "gpu_hours"])
def test_a_group_may_not_take_a_marker_that_means_something_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "seatrial.toml").write_text(f"[groups.{name}]\n")
    with pytest.raises(pytest.UsageError, match=f"{name} has a meaning of its own; write marker"):
        suite_groups.read_groups(tmp_path)


def test_a_list_of_tests_is_given_also_above_the_budget(tmp_path: Path) -> None:
    tests = "import pytest\n@pytest.mark.gpu_hours(9)\ndef test_large(): pass\n"
    folder = project(tmp_path, "[tests]\ngpu_hours = 1\n", tests)
    assert pytest_in(folder).code == 4
    listed = pytest_in(folder, "--collect-only")
    assert (listed.code, "test_large" in listed.text) == (0, True)


def test_marks_of_cases_and_classes_count_and_an_empty_variable_is_absent(tmp_path: Path) -> None:
    tests = """
import pytest
@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.hf_gated)])
def test_case(x): pass
@pytest.mark.hf_gated
class TestClass:
    def test_in_class(self): pass
@pytest.mark.needs(env=["EMPTY"])
def test_empty(): pass
"""
    ran = pytest_in(project(tmp_path, tests=tests), env={"EMPTY": ""})
    assert ran.tests("PASSED") == {"test_case"}
    assert ran.tests("SKIPPED") == {"test_case", "test_in_class", "test_empty"}
    assert "3 skipped by seatrial: 2 hf_gated (give --hf-gated), 1 needs variable EMPTY" in ran.text
