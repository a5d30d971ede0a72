"""The files: where, which name, what a kill leaves, and what happens when they cannot be written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_seatrial import unit_results
from pytest_seatrial.results_collector import coverage
from pytest_seatrial.unit_results import Partial, Tracked, document, restore, write
from tests.pytest_seatrial.tracker.tracked import command, dated, latest, session, strict, variables

pytestmark = pytest.mark.slow

ONE = 'def test_one(tracker): tracker.track("x", 1)\n'
HANGS = """
import pathlib, time
def test_one(tracker): tracker.track("x", 1)
def test_two(tracker): tracker.track("y", [2])
def test_hangs(tracker):
    tracker.track("z", 3)
    pathlib.Path("here").touch()
    time.sleep(600)
"""
HEAD = {"git_commit": "c0ffee", "start_time": "2026-01-02 03:04:05", "project": "p"}


def test_the_directory_is_rootdir_or_as_the_ini_or_the_option_says(tmp_path: Path) -> None:
    session(tmp_path, ONE)
    session(tmp_path, ONE, "-o", "seatrial_results=a/b")
    session(tmp_path, ONE, "-o", "seatrial_results=a/b", "--seatrial-results", "c")
    for directory in (tmp_path, tmp_path / "a" / "b", tmp_path / "c"):
        assert latest(directory)["metrics"]["test_it::test_one"]["x"] == 1
        assert len(dated(directory)) == 1


def earlier(directory: Path) -> bytes:
    """The results of a session that passed."""
    write(directory, "earlier", document(HEAD, [Tracked("a.py::t", "a::t", "passed", '{"x": 1}')], 0, {}), latest=True)
    return (directory / "unit_results.json").read_bytes()


NONE = "def test_none(): pass"
BROKEN = "import nosuch\n"


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("code", "options", "status", "tests"),
    [
        (NONE, (), 0, {"passed": 1}),
        (BROKEN, (), 2, {"error": 1}),
        (ONE, ("-k", "nothing"), 5, {}),
        (ONE, ("--deselect", "test_it.py::test_one"), 5, {}),
    ],
    ids=["no tracker", "collection error", "-k", "deselected"],
)
def test_a_session_that_tracked_nothing_replaces_the_old_file(
    tmp_path: Path, code: str, options: tuple[str, ...], status: int, tests: dict[str, int], workers: str
) -> None:
    earlier(tmp_path)
    store = tmp_path / "history.sqlite"
    done = session(tmp_path, code, *options, "-n", workers, SEATRIAL_HISTORY=str(store))
    read = latest(tmp_path)
    assert done.returncode == (1 if code == BROKEN and workers == "2" else status), done.stdout  # pytest-xdist has a status of its own
    assert (read["exit_status"], read["metrics"], read["outcomes"], read["tests"]) == (done.returncode, {}, {}, tests)
    assert f"unit_results.json has no metrics now, and exit status {done.returncode}" in done.stdout
    assert len(dated(tmp_path)) == 1, "an empty session has no dated copy"
    assert not store.exists(), "and is not in the history"


CONFTESTS = {
    "breaks": "import nosuch\n",
    "refuses": "import pytest\ndef pytest_configure(): raise pytest.UsageError('no GPU')\n",
    "refuses late": "import pytest\ndef pytest_sessionstart(): raise pytest.UsageError('no GPU')\n",
    "fails": "def pytest_configure(): raise RuntimeError('no GPU')\n",
    "exits": "import pytest\ndef pytest_configure(): pytest.exit('enough')\n",
    "is fine": "",
}


@pytest.mark.parametrize(
    ("conftest", "options", "status"),
    [
        ("is fine", ("--no-such-option",), 4),
        ("is fine", ("--no-such-option", "-n", "2"), 4),
        ("is fine", ("nosuch.py",), 4),
        ("is fine", ("-o", "seatrial_history=maybe"), 4),
        ("breaks", (), 4),
        ("refuses", ("-n", "2"), 4),
        ("refuses late", (), 4),
        ("fails", (), 3),
        ("exits", (), 2),
    ],
)
def test_a_session_that_ends_before_it_begins_replaces_the_old_file(
    tmp_path: Path, conftest: str, options: tuple[str, ...], status: int
) -> None:
    earlier(tmp_path)
    (tmp_path / "conftest.py").write_text(CONFTESTS[conftest])
    done = session(tmp_path, ONE, *options)
    read = latest(tmp_path)
    assert (done.returncode, read["exit_status"], read["metrics"]) == (status, status, {}), done.stdout + done.stderr
    assert len(dated(tmp_path)) == 1


def test_a_file_that_such_a_session_left_is_replaced_by_the_next(tmp_path: Path) -> None:
    earlier(tmp_path)
    assert session(tmp_path, ONE, "--no-such-option").returncode == 4
    assert session(tmp_path, ONE, "-n", "2").returncode == 0
    assert (latest(tmp_path)["exit_status"], list(latest(tmp_path)["metrics"])) == (0, ["test_it::test_one"])


def test_one_that_was_to_run_nothing_and_cannot_begin_leaves_the_old_file_alone(tmp_path: Path) -> None:
    before = earlier(tmp_path)
    (tmp_path / "conftest.py").write_text(CONFTESTS["breaks"])
    assert session(tmp_path, ONE, "--collect-only").returncode == 4
    assert (tmp_path / "unit_results.json").read_bytes() == before


@pytest.mark.parametrize("text", [None, "[]"])
def test_a_session_that_cannot_begin_makes_no_file_and_takes_none_that_is_not_ours(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "unit_results.json"
    if text is not None:
        file.write_text(text)
    assert session(tmp_path, ONE, "--no-such-option").returncode == 4
    assert (file.read_text() if file.exists() else None) == text


def test_it_is_replaced_also_where_the_dated_copies_are_gone(tmp_path: Path) -> None:
    earlier(tmp_path)
    shutil.rmtree(tmp_path / "unit_results")
    assert session(tmp_path, BROKEN).returncode == 2
    assert latest(tmp_path)["exit_status"] == 2
    assert not (tmp_path / "unit_results").exists()


@pytest.mark.parametrize(
    "option", ["--collect-only", "--fixtures", "--fixtures-per-test", "--setup-plan", "--markers", "--help", "--version"]
)
def test_a_session_that_was_to_run_nothing_leaves_the_old_file_alone(tmp_path: Path, option: str) -> None:
    before = earlier(tmp_path)
    assert session(tmp_path, ONE, option).returncode == 0
    assert (tmp_path / "unit_results.json").read_bytes() == before


@pytest.mark.parametrize("code", [NONE, BROKEN])
def test_a_suite_that_never_used_the_tracker_gets_no_file(tmp_path: Path, code: str) -> None:
    session(tmp_path, code)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pytest.ini", "test_it.py"]


@pytest.mark.parametrize("text", ['{"exit_status": 0, "metrics": {"a": {"x": 1}}}', "[]", "no json"])
def test_a_file_of_that_name_that_is_not_ours_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "unit_results.json").write_text(text)
    session(tmp_path, NONE)
    assert (tmp_path / "unit_results.json").read_text() == text


def test_an_old_file_that_cannot_be_replaced_fails_the_session(tmp_path: Path) -> None:
    earlier(tmp_path)
    broken = (
        "from pytest_seatrial import unit_results as results\ndef no(*_): raise PermissionError('read-only')\nresults.write_latest = no\n"
    )
    (tmp_path / "conftest.py").write_text(broken)
    done = session(tmp_path, NONE)
    assert done.returncode == 4
    assert "is that of an earlier session, and cannot be replaced: read-only" in done.stdout


def test_a_killed_session_is_restored_by_the_next(tmp_path: Path) -> None:
    session(tmp_path, ONE)
    (tmp_path / "test_it.py").write_text(HANGS)
    started = subprocess.Popen(command(), cwd=tmp_path, env=variables(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "here").exists():
            assert time.monotonic() < deadline, "the session never came to the test that hangs"
            time.sleep(0.02)
        running = latest(tmp_path)
        assert (running["exit_status"], running["metrics"]) == ("not ended", {}), "what a kill leaves is not the earlier session's"
        beside = session(tmp_path, "def test_none(): pass")
        assert "restored" not in beside.stdout, "a session that lives is none that was killed"
        old = (tmp_path / "unit_results.json").read_bytes()
    finally:
        started.send_signal(signal.SIGKILL)
        started.wait(timeout=30)
    assert (tmp_path / "unit_results.json").read_bytes() == old
    done = session(tmp_path, "def test_none(): pass")
    assert done.returncode == 0
    assert "seatrial: restored 2 tests of a killed session: " in done.stdout
    killed = [strict(path) for path in dated(tmp_path) if strict(path)["exit_status"] == "killed"]
    assert [list(read["metrics"]) for read in killed] == [["test_it::test_one", "test_it::test_two"]]
    assert killed[0]["metrics"]["test_it::test_two"]["y"] == [2]
    assert not list((tmp_path / "unit_results").glob(".*"))
    assert "restored" not in session(tmp_path, None).stdout


def test_a_torn_line_is_told_and_the_others_are_kept(tmp_path: Path) -> None:
    partial = Partial(tmp_path, 0, HEAD)
    partial.add(Tracked("a.py::t", "a::t", "passed", '{"x": 1}'))
    with partial.path.open("ab") as stream:
        stream.write(b'{"test": ["a.py::u", "a::u", "pas')
    partial.close(remove=False)
    (said,) = restore(tmp_path)
    assert "restored 1 test of" in said
    assert "line 3 of the partial file cannot be read" in said
    (path,) = dated(tmp_path)
    read = strict(path)
    assert (read["metrics"], read["git_commit"]) == ({"a::t": {"x": 1}}, "c0ffee")
    assert "a.py::u" in read["notes"][0]


def test_a_fork_does_not_hold_a_dead_sessions_file(tmp_path: Path) -> None:
    partial = Partial(tmp_path, 0, HEAD)
    reading, writing = os.pipe()
    begun, ready = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.write(ready, b"1")
        os.read(reading, 1)  # until the parent lets it go
        os._exit(0)
    try:
        os.read(begun, 1)
        assert restore(tmp_path) == []
        partial.close(remove=False)
        assert len(restore(tmp_path)) == 1
    finally:
        for handle in (writing, reading, begun, ready):
            os.close(handle)
        os.waitpid(child, 0)


def test_two_tests_of_one_key_go_by_their_node_ids() -> None:
    tests = [Tracked("a/t.py::f", "t::f", "passed", '{"x": 1}'), Tracked("b/t.py::f", "t::f", "failed", '{"x": 2}')]
    made = document(HEAD, tests, 1, {})
    assert made["metrics"] == {"a/t.py::f": '{"x": 1}', "b/t.py::f": '{"x": 2}'}
    assert made["outcomes"] == {"a/t.py::f": "passed", "b/t.py::f": "failed"}


def test_a_test_that_ran_again_counts_with_its_last_run_and_says_so() -> None:
    tests = [Tracked("t.py::f", "t::f", "failed", '{"x": 1}'), Tracked("t.py::f", "t::f", "passed", '{"x": 2}')]
    made = document(HEAD, tests, 0, {})
    assert (made["metrics"], made["outcomes"], made["reruns"]) == ({"t::f": '{"x": 2}'}, {"t::f": "passed"}, {"t::f": 1})


def test_a_dated_file_never_replaces_another(tmp_path: Path) -> None:
    made = document(HEAD, [Tracked("t.py::f", "t::f", "passed", '{"x": 1}')], 0, {})
    names = [write(tmp_path, "20260102_030405", made, latest=True).name for _ in range(3)]
    assert names == ["20260102_030405.json", "20260102_030405-2.json", "20260102_030405-3.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [unit_results.DATED, unit_results.LATEST]


def test_results_that_cannot_be_written_fail_the_session(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = session(tmp_path, ONE, "--seatrial-results", "file")
    assert done.returncode == 4
    assert "what 1 test tracked is not written" in done.stdout
    assert "--seatrial-results DIR" in done.stdout


def config(plugin: object) -> Any:
    return SimpleNamespace(pluginmanager=SimpleNamespace(getplugin=lambda name: plugin if name == "_cov" else None))


def test_coverage_is_the_total_of_pytest_cov(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "coverage", raising=False)
    assert coverage(config(SimpleNamespace(cov_total=24.5, cov_controller=object()))) == 24.5
    assert coverage(config(None)) == "[n/a] run with --cov=PACKAGE"
    assert coverage(config(SimpleNamespace(cov_total=None, cov_controller=None))) == "[n/a] run with --cov=PACKAGE"
    failed = coverage(config(SimpleNamespace(cov_total=0, cov_controller=object())))
    assert failed == "[n/a] pytest-cov made no report"


def test_coverage_around_pytest_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(report: Any) -> float | str:
        current = SimpleNamespace(report=report)
        monkeypatch.setitem(sys.modules, "coverage", SimpleNamespace(Coverage=SimpleNamespace(current=lambda: current)))
        return coverage(config(None))

    def none(file: object) -> float:
        raise RuntimeError("No data to report.")

    assert run(lambda file: 61.25) == 61.25
    assert "No data to report" in str(run(none))


def test_the_file_is_json_whatever_the_names_are(tmp_path: Path) -> None:
    session(tmp_path, 'def test_one(tracker): tracker.track("a\\"b\\n\\u2028ä", "\\"")\n')
    assert json.loads((tmp_path / "unit_results.json").read_text())["metrics"]["test_it::test_one"]['a"b\n\u2028ä'] == '"'
