"""Ctrl-C, SIGTERM and SIGKILL while a level runs: a judged directory, the right exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from seatrial.files import read_model
from seatrial.model.record import Report, Trial
from seatrial.model.verdict import Verdict

CLI = Path(__file__).with_name("fake_cli.py")
SECONDS = 30


def call(*arguments: str, words: dict[int, str] | None = None) -> subprocess.Popen[str]:
    """The command line with the fake loop."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GITHUB_")}
    environment["FAKE_WORDS"] = json.dumps(words or {})
    return subprocess.Popen(
        [sys.executable, CLI, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/"
    )


def start(out: Path, words: dict[int, str], level: str = "0-2") -> subprocess.Popen[str]:
    return call("run", "fake", "--level", level, "--out", str(out), "--python", sys.executable, words=words)


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
    output, _ = finished.communicate(timeout=SECONDS)
    assert finished.returncode == 0, output
    trial = read_model(out / "trial.json", Trial)
    assert (trial.verdict, trial.status) == (Verdict.PASS, "done")


def test_a_trial_whose_seatrial_was_killed_is_finished_and_keeps_what_passed(hanging: Hanging) -> None:
    process, out = hanging
    before = (out / "levels" / "0-smoke" / "run.log").stat().st_mtime_ns
    process.kill()
    process.communicate()
    assert read_model(out / "trial.json", Trial).status == "running"
    finished = call("resume", str(out))
    output, _ = finished.communicate(timeout=SECONDS)
    assert finished.returncode == 0, output
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
    output, _ = other.communicate(timeout=SECONDS)
    assert other.returncode == 2
    assert f"another seatrial (process {process.pid}) works in this directory" in output
    assert process.poll() is None


@pytest.mark.parametrize(("word", "code"), [("fine", 0), ("crash", 1), ("flat", 99)])
def test_the_exit_code_is_the_verdict(tmp_path: Path, word: str, code: int) -> None:
    process = start(tmp_path / "run", {0: word}, level="0")
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == code, output
    assert (tmp_path / "run" / "summary.md").read_text() in output


def test_only_skipped_exits_with_77_and_json_is_one_object_per_line(tmp_path: Path) -> None:
    process = call("run", "fake", "--level", "3", "--out", str(tmp_path / "r"), "--python", sys.executable, "--json")
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 77
    events = [json.loads(line)["event"] for line in output.splitlines()]
    assert (events[0], events[-1]) == ("planned", "ended")


def test_what_stands_behind_two_dashes_is_the_loops(tmp_path: Path) -> None:
    words = ("--", "--level", "9", "--json", "--", "--help")
    process = call("run", "fake", "--level", "0", "--out", str(tmp_path / "r"), "--python", sys.executable, *words)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert read_model(tmp_path / "r" / "trial.json", Trial).plan.arguments == words[1:]
    assert str(list(words[1:])) in (tmp_path / "r" / "levels" / "0-smoke" / "run.log").read_text()


def test_a_directory_that_holds_a_trial_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trial.json").write_text("{}")
    process = start(tmp_path, {})
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert "holds a trial already" in output


def test_faults_are_listed_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    listed, _ = call("run", "fake", "--fault", "list").communicate(timeout=SECONDS)
    assert listed.split() == ["crash", "levels", "0,1", "raises"]
    process = call("run", "fake", "--fault", "nope", "--out", str(tmp_path / "r"))
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert "unknown fault 'nope'; known: crash" in output
    process = call("run", "fake", "--level", "2", "--fault", "crash", "--out", str(tmp_path / "r"))
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert "the fault crash acts at level 0, 1 only" in output
    assert not (tmp_path / "r").exists()
