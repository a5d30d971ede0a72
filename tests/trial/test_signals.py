"""Ctrl-C, SIGTERM and SIGKILL while a level runs: a judged directory, the right exit code, and nothing left behind."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest

from seatrial.core.files import read_model
from seatrial.core.records import Report, Trial
from seatrial.core.verdict import Verdict
from tests.cli.command import Answer, environ, inside
from tests.trial.fake import FakeLoop

pytestmark = pytest.mark.slow

CLI = Path(__file__).with_name("fake_cli.py")
SECONDS = 30


def start(out: Path, words: dict[int, str]) -> subprocess.Popen[str]:
    """The command line with the fake loop, in a process of its own."""
    command = [sys.executable, str(CLI), *run_words(out, "0-2")]
    return subprocess.Popen(
        command, env=environ(FAKE_WORDS=json.dumps(words)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/"
    )


def run_words(out: Path, level: str) -> tuple[str, ...]:
    return ("run", "fake", "--level", level, "--out", str(out), "--python", sys.executable)


def call(*arguments: str, words: dict[int, str] | None = None) -> Answer:
    """The same in this process, to its end."""
    with mock.patch("seatrial.loops.get_loop", return_value=FakeLoop(words)):
        return inside(*arguments, cwd=Path("/"))


def wait_for(path: Path) -> None:
    ends = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < ends, f"{path} never came"
        time.sleep(0.02)


def children_of(out: Path) -> list[psutil.Process]:
    """Live processes that work for this run directory."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(out) in " ".join(words) and str(CLI) not in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A trial whose level 0 passed and whose level 1 hangs."""
    out = tmp_path / "run dir"
    process = start(out, {1: "hang"})
    try:
        wait_for(out / "levels" / "1-second" / "run" / "waiting")
        yield process, out
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        for child in children_of(out):
            child.kill()


Hanging = tuple[subprocess.Popen[str], Path]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_trial_is_judged_and_can_be_finished(hanging: Hanging, number: signal.Signals) -> None:
    process, out = hanging
    assert children_of(out)
    process.send_signal(number)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, output
    assert f"seatrial resume {shlex.quote(str(out))}" in output
    assert children_of(out) == []
    trial = read_model(out / "trial.json", Trial)
    assert [level.verdict for level in trial.levels] == [Verdict.PASS, Verdict.BLOCKED, Verdict.BLOCKED]
    assert "interrupted by a signal" in trial.levels[1].reason
    assert trial.levels[2].reason == "interrupted before this level ran"
    assert read_model(out / "report.json", Report).result is Verdict.BLOCKED
    assert not list(out.rglob("*.pids"))
    finished = call("resume", str(out))
    assert finished.code == 0, finished.err
    trial = read_model(out / "trial.json", Trial)
    assert (trial.verdict, trial.status) == (Verdict.PASS, "done")


def test_a_trial_whose_seatrial_was_killed_is_finished_and_keeps_what_passed(hanging: Hanging) -> None:
    process, out = hanging
    before = (out / "levels" / "0-smoke" / "run.log").stat().st_mtime_ns
    process.kill()
    process.communicate()
    assert read_model(out / "trial.json", Trial).status == "running"
    finished = call("resume", str(out))
    assert finished.code == 0, finished.err
    assert children_of(out) == []
    assert (out / "levels" / "0-smoke" / "run.log").stat().st_mtime_ns == before
    assert (out / "levels" / "1-second" / "attempts" / "1" / "run.log").exists()
    assert read_model(out / "trial.json", Trial).verdict is Verdict.PASS


def test_a_second_signal_ends_at_once(hanging: Hanging) -> None:
    process, out = hanging
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert children_of(out) == []


def test_two_trials_in_one_directory_are_refused(hanging: Hanging) -> None:
    process, out = hanging
    other = call("resume", str(out))
    assert other.code == 2
    assert f"another seatrial (process {process.pid}) works in this directory" in other.err
    assert process.poll() is None


@pytest.mark.parametrize(("word", "code"), [("fine", 0), ("crash", 1), ("flat", 99)])
def test_the_exit_code_is_the_verdict(tmp_path: Path, word: str, code: int) -> None:
    answer = call(*run_words(tmp_path / "run", "0"), words={0: word})
    assert answer.code == code, answer.err
    assert (tmp_path / "run" / "summary.md").read_text() in answer.out


def test_only_skipped_exits_with_77_and_json_is_one_object_per_line(tmp_path: Path) -> None:
    answer = call(*run_words(tmp_path / "r", "3"), "--json")
    assert (answer.code, answer.err) == (77, "")
    events = [json.loads(line)["event"] for line in answer.out.splitlines()]
    assert (events[0], events[-1]) == ("planned", "ended")


def test_what_stands_behind_two_dashes_is_the_loops(tmp_path: Path) -> None:
    words = ("--", "--level", "9", "--json", "--", "--help")
    answer = call(*run_words(tmp_path / "r", "0"), *words)
    assert answer.code == 0, answer.err
    assert read_model(tmp_path / "r" / "trial.json", Trial).plan.arguments == words[1:]
    assert str(list(words[1:])) in (tmp_path / "r" / "levels" / "0-smoke" / "run.log").read_text()


def test_a_directory_that_holds_a_trial_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trial.json").write_text("{}")
    answer = call(*run_words(tmp_path, "0-2"))
    assert answer.code == 2
    assert "holds a trial already" in answer.err


def test_faults_are_listed_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    assert call("run", "fake", "--fault", "list").out.split() == ["crash", "levels", "0,1", "stage", "-", "raises"]
    answer = call("run", "fake", "--fault", "nope", "--out", str(tmp_path / "r"))
    assert answer.code == 2
    assert "unknown fault 'nope'; known: crash" in answer.err
    answer = call("run", "fake", "--level", "2", "--fault", "crash", "--out", str(tmp_path / "r"))
    assert answer.code == 2
    assert "the fault crash acts at level 0, 1 only" in answer.err
    assert not (tmp_path / "r").exists()
