"""A trial that is interrupted or killed leaves a judged directory and no process, and can be finished from disk."""

from __future__ import annotations

import shlex
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from seatrial.core.files import read_json, read_text, write_json
from seatrial.core.verdict import Boundary, ExitCode, Verdict
from tests.real.drive import PLAIN, Ran, call, processes_of, says, start, wait_for

pytestmark = pytest.mark.real

STEPS = 30
"""Enough that a signal at the second step comes long before the last."""


def resume(run_dir: Path) -> Ran:
    """`seatrial resume` on a run directory."""
    done = call(run_dir.parent, "resume", run_dir)
    return Ran(done.returncode, done.stdout, run_dir)


@dataclass(frozen=True, slots=True)
class Stopped:
    """A trial that was stopped in the middle of a level."""

    directory: Path
    code: int
    output: str
    processes: tuple[psutil.Process, ...]
    """What Seatrial had under it at that moment."""

    @property
    def ran(self) -> Ran:
        """As a call that ended."""
        return Ran(self.code, self.output, self.directory)


def stop(where: Path, number: signal.Signals, log: str, line: str, *words: str) -> Stopped:
    """Start a trial, wait until a log says a line, send the signal to Seatrial alone, and wait for its end."""
    process, out = start(where, "trl", *words, name="stopped trial")
    wait_for(f"{log} says {line!r}", lambda: says(out / log, line), 300)
    below = tuple(psutil.Process(process.pid).children(recursive=True))
    process.send_signal(number)
    code = process.wait(180)
    return Stopped(out, code, read_text(where / "stopped trial.out"), below)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """SIGINT while level 0 trains."""
    where = tmp_path_factory.mktemp("interrupted")
    log, words = "levels/0-smoke/run.log", ("--level", "0", "--", "--max_steps", str(STEPS))
    return stop(where, signal.SIGINT, log, f"seatrial: step 2 of {STEPS}", *words)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """SIGKILL while level 1 trains, after level 0 has passed."""
    log = "levels/1-lora-resume/full/run.log"
    return stop(tmp_path_factory.mktemp("killed"), signal.SIGKILL, log, "seatrial: step 1 of 8", "--level", "0,1", *PLAIN)


class TestInterrupted:
    """In order: what the interruption left, then what `resume` makes of it."""

    def test_exit_code_and_advice(self, interrupted: Stopped) -> None:
        assert interrupted.code == ExitCode.INTERRUPTED, interrupted.output
        assert f"seatrial resume {shlex.quote(str(interrupted.directory))}" in interrupted.output

    def test_no_descendant_is_alive(self, interrupted: Stopped) -> None:
        assert interrupted.processes, "the loop was running"
        assert processes_of(interrupted.directory) == []
        wait_for("the kernel let go of the ended processes", lambda: not any(p.is_running() for p in interrupted.processes), 60)
        assert not list(interrupted.directory.rglob("*.pids"))

    def test_directory_is_judged(self, interrupted: Stopped) -> None:
        result = interrupted.ran.level(0)
        assert (result.verdict, result.boundary) == (Verdict.BLOCKED, Boundary.ENVIRONMENT)
        assert "interrupted by a signal" in result.reason
        assert [phase.ended for phase in result.phases] == ["interrupted"]
        assert "[seatrial] Seatrial was interrupted" in interrupted.ran.log(0)
        assert interrupted.ran.trial.status == "running"
        assert read_text(interrupted.directory / "summary.md").startswith("Result: Blocked - ")

    def test_resume_finishes_with_pass(self, interrupted: Stopped) -> None:
        done = resume(interrupted.directory)
        assert done.code == ExitCode.PASS, done.output
        assert (done.trial.status, done.trial.verdict) == ("done", Verdict.PASS)
        assert done.level(0).steps_reached == STEPS, "the loop arguments are part of the trial"
        assert says(done.place(0) / "attempts/1/run.log", "Seatrial was interrupted"), "the first attempt is kept beside"

    def test_resume_of_a_finished_trial_runs_nothing(self, interrupted: Stopped) -> None:
        place = interrupted.directory / "levels/0-smoke/result.json"
        before = place.stat().st_mtime_ns
        done = resume(interrupted.directory)
        assert (done.code, done.trial.verdict) == (ExitCode.PASS, Verdict.PASS)
        assert place.stat().st_mtime_ns == before


class TestKilled:
    """In order: what the kill left, what is refused, then what `resume` makes of it."""

    def test_processes_end_with_seatrial(self, killed: Stopped) -> None:
        assert killed.code == -signal.SIGKILL
        assert killed.processes, "the loop was running"
        wait_for("the loop's processes ended", lambda: not processes_of(killed.directory), 120)

    def test_directory_is_no_pass(self, killed: Stopped) -> None:
        """The record is whole; level 0 has passed, level 1 has no result, and no report may say more."""
        trial = killed.ran.trial
        assert (trial.status, trial.verdict) == ("running", None)
        assert [(level.number, level.verdict) for level in trial.levels] == [(0, Verdict.PASS)]
        done = call(killed.directory, "report", killed.directory)
        assert done.returncode not in (ExitCode.PASS, ExitCode.INTERNAL)
        assert not done.stdout.startswith("Result: Pass")

    def test_resume_in_another_environment_is_refused(self, killed: Stopped) -> None:
        path = killed.directory / "trial.json"
        kept = read_json(path)
        other = {**kept["environment"], "fingerprint": "0" * 64, "packages": {**kept["environment"]["packages"], "trl": "0.1"}}
        write_json(path, {**kept, "environment": other})
        done = resume(killed.directory)
        assert done.code == ExitCode.USAGE, done.output
        assert "the loop's environment is not the one this trial began in" in done.output
        assert "trl" in done.output
        assert not (killed.directory / "levels/1-lora-resume/attempts").exists(), "nothing was run or moved"
        write_json(path, kept)

    def test_resume_keeps_what_passed_and_finishes(self, killed: Stopped) -> None:
        place = killed.directory / "levels/0-smoke"
        before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file() and path.name != "command.sh"}
        done = resume(killed.directory)
        assert done.code == ExitCode.PASS, done.output
        assert {path: path.stat().st_mtime_ns for path in before} == before
        assert not (place / "attempts").exists()
        assert [(level.number, level.verdict) for level in done.trial.levels] == [(0, Verdict.PASS), (1, Verdict.PASS)]
        assert done.level(1).steps_reached == 8
        assert says(done.place(1) / "attempts/1/full/run.log", "seatrial: step 1 of 8"), "the killed attempt is kept beside"
        assert done.trial.status == "done"
