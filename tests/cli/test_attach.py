"""`run --on`, `attach` and `resume --on`, with stand-ins for Slurm's commands and the fake loop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from seatrial.core.files import read_model
from seatrial.core.jobs import Ending
from seatrial.core.records import Trial
from seatrial.core.verdict import Verdict
from seatrial.runtime.jobdir import job_dir
from seatrial.trial import run_dir
from tests.cli.command import environ, inside
from tests.trial.conftest import asked_once
from tests.trial.fake import FakeLoop
from tests.trial.fake_slurm import FakeSlurm, leave_result, make_slurm

pytestmark = pytest.mark.slow

CLI = Path(__file__).parents[1] / "trial" / "fake_cli.py"
TOML = '[slurm.test]\ntime = "0:05:00"\npartition = "batch"\n'
SECONDS = 30


@dataclass
class Desk:
    """A directory with a seatrial.toml, a fake Slurm, and one trial."""

    root: Path
    slurm: FakeSlurm
    words: dict[int, str] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.root / "my run"

    @property
    def trial(self) -> Trial:
        return read_model(self.run / "trial.json", Trial)

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        """The command line in a process of its own, for signals and for what it does meanwhile."""
        environment = environ(**self.slurm.variables(), PYTHONUNBUFFERED="1")
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, CLI, *words], env=environment, cwd=self.root, stdout=pipe, stderr=pipe, text=True)

    def call(self, *words: str | Path, **variables: str) -> tuple[int, str, str]:
        """The same in this process, to its end."""
        with mock.patch("seatrial.loops.get_loop", return_value=FakeLoop(self.words)):
            answer = inside(*words, cwd=self.root, **self.slurm.variables(), **variables)
        return answer.code, answer.out, answer.err

    def submit(self, *words: str | Path) -> tuple[int, str, str]:
        return self.call("run", "fake", "--out", self.run, "--python", sys.executable, "--on", "slurm:test", *words)

    def job(self) -> int:
        """What the job does: resume, as the script calls it, its log, and its result."""
        folder = job_dir(self.run / "jobs" / "1", "trial")
        code, out, _ = self.call("resume", self.run, SEATRIAL_JOB=str(folder.path), SLURM_JOB_ID="41")
        folder.log("client", 0, None).write_text(out)
        leave_result(self.run, Ending.DONE if code == 0 else Ending.CLIENT_FAILED, code)
        self.slurm.says("COMPLETED" if code == 0 else "FAILED")
        return code


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SEATRIAL_JOB"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("seatrial.trial.runner.environment_record", asked_once)
    (tmp_path / "seatrial.toml").write_text(TOML)
    return Desk(tmp_path, make_slurm(tmp_path / "slurm"))


def test_a_trial_is_submitted_run_and_attached_to(desk: Desk) -> None:
    code, out, err = desk.submit("--level", "0", "--detach")
    assert (code, "Slurm job 41 submitted with the profile test" in out) == (0, True), err
    assert f"seatrial attach '{desk.run}'" in err
    assert desk.trial.status == "planned"
    assert desk.job() == 0
    code, out, err = desk.call("attach", desk.run)
    assert code == 0, err
    lines = out.splitlines()
    assert any(line.startswith("Pass level 0") for line in lines), "the log of the client"
    assert lines.index("seatrial: Slurm job 41 ended: done") > 3, "after the log"
    assert sum(line.startswith("Result: Pass") for line in lines) == 1, "the summary, once"


def test_a_failed_trial_is_a_fail_whatever_slurm_calls_it(desk: Desk) -> None:
    desk.words[0] = "crash"
    desk.submit("--level", "0", "--detach")
    assert desk.job() == 1
    code, out, _ = desk.call("attach", desk.run, "--json")
    assert code == 1
    rows = [json.loads(line) for line in out.splitlines()]
    assert {row["event"] for row in rows} == {"job", "log", "ended"}
    assert rows[-1]["trial"]["verdict"] == "Fail"


def test_following_starts_with_the_submission_and_ctrl_c_only_detaches(desk: Desk) -> None:
    process = desk.start("run", "fake", "--out", desk.run, "--python", sys.executable, "--on", "slurm:test", "--level", "0")
    assert process.stdout is not None
    while "waiting: Resources" not in (line := process.stdout.readline()):
        assert line, process.communicate()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "detached; the job goes on" in err
    assert f"seatrial attach '{desk.run}'" in err
    assert desk.slurm.calls("scancel") == []
    assert desk.trial.status == "planned"


def test_a_job_that_ended_without_a_verdict_is_blocked_and_can_be_resumed(desk: Desk) -> None:
    desk.submit("--level", "0", "--detach")
    desk.slurm.says("CANCELLED")
    code, out, err = desk.call("attach", desk.run)
    assert code == 99
    assert "Result: Blocked - " in out
    assert f"not finished: Slurm job 41: CANCELLED, cancelled; finish it with: seatrial resume '{desk.run}'" in err
    code, out, err = desk.call("resume", desk.run, "--on", "slurm", "--detach")
    assert (code, "Slurm job 42" in out) == (0, True), err
    code, _, err = desk.call("resume", desk.run)
    assert (code, "Slurm job 42 of this trial is waiting" in err) == (2, True)
    desk.slurm.says("CANCELLED", slurm="42")
    code, out, err = desk.call("resume", desk.run)
    assert (code, desk.trial.verdict) == (0, Verdict.PASS), err


def test_a_dry_run_shows_the_script_and_leaves_nothing(desk: Desk) -> None:
    before = sorted(desk.root.iterdir())
    code, out, err = desk.submit("--dry-run")
    assert (code, "sbatch --test-only: ok" in err) == (0, True), err
    assert out.startswith("#!/bin/bash\n")
    assert "#SBATCH --partition=batch" in out
    assert f"'{desk.run}'" in out
    assert sorted(desk.root.iterdir()) == before
    code, _, _ = desk.call("run", "fake", "--on", "slurm", "--dry-run")
    assert sorted(desk.root.iterdir()) == before, "not even trials/"
    desk.slurm.flag("refuses")
    code, _, err = desk.submit("--dry-run")
    assert (code, "node configuration is not available" in err) == (99, True)
    assert not any("--parsable" in call for call in desk.slurm.calls("sbatch"))


def test_a_controller_that_is_down_when_one_submits_is_said(desk: Desk) -> None:
    desk.slurm.flag("down")
    code, _, err = desk.submit("--level", "0")
    assert (code, "Blocked (cluster)" in err) == (99, True)
    code, _, err = desk.call("resume", desk.run)
    assert (code, "is not known" in err) == (99, True), "it may be in the queue"
    desk.slurm.flag("down", on=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--on", "slurm:tset"), "no profile is called 'tset'; known: test"),
        (("--on", "slurm:test", "--set", "slurm.test.nodes=2"), "without Ray a trial runs on one node"),
        (("--on", "slurm:test", "--set", "slurm.test.gpus=9"), "9"),
        (("--on", "slurm:test", "--set", "slurm.test.container=c"), "known: none"),
        (("--on", "slurm:test", "--", "--hub_token", "hf_abcdefghijklmnopqrstuvwxyz0123456789"), "is a secret, which is not stored"),
        (("--detach",), "add --on"),
        (("--dry-run",), "add --on"),
    ],
)
def test_a_mistake_is_named_before_anything_is_made(desk: Desk, words: tuple[str, ...], message: str) -> None:
    before = sorted(desk.root.iterdir())
    code, _, err = desk.call("run", "fake", "--level", "0", "--python", sys.executable, *words)
    assert (code, message in err) == (2, True), err
    assert sorted(desk.root.iterdir()) == before
    assert desk.slurm.calls("sbatch") == []


def test_attaching_to_what_was_never_submitted_is_a_mistake(desk: Desk) -> None:
    code, _, err = desk.call("attach", desk.root)
    assert (code, "not a run directory" in err) == (2, True)
    code, _, err = desk.call("run", "fake", "--out", desk.run, "--python", sys.executable, "--level", "0")
    assert code == 0, err
    code, _, err = desk.call("attach", desk.run)
    assert (code, "never submitted to Slurm" in err, "--on slurm:PROFILE" in err) == (2, True, True)
    code, _, err = desk.call("resume", desk.run, "--detach")
    assert (code, "add --on" in err) == (2, True)


def test_a_run_directory_in_use_is_said(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm says that the job has ended, and somebody still works in the directory: nobody judges it meanwhile."""
    desk.submit("--level", "0", "--detach")
    desk.slurm.says("NODE_FAIL")
    looks: list[str] = []
    held = contextlib.ExitStack()
    held.enter_context(run_dir.locked(desk.run))

    def sleep(_: float) -> None:
        looks.append(desk.trial.status)
        if len(looks) == 3:
            held.close()

    monkeypatch.setattr("seatrial.trial.slurm_job.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    code, _, _ = desk.call("attach", desk.run)
    assert (code, looks) == (99, ["planned"] * 3)
    assert desk.trial.verdict is Verdict.BLOCKED, "judged when nobody worked there any more"


def test_what_was_altered_is_no_pass_for_whoever_asks(desk: Desk) -> None:
    desk.submit("--level", "0", "--detach")
    assert desk.job() == 0
    (desk.run / "levels/0-smoke/run/facts.jsonl").write_text("")
    for words in (("attach", desk.run), ("resume", desk.run, "--on", "slurm:test"), ("resume", desk.run), ("report", desk.run)):
        code, out, _ = desk.call(*words)
        assert code == 99, out
        assert "run/facts.jsonl changed" in out
        assert "Result: Pass" not in out


def test_attaching_seals_no_record_that_was_edited(desk: Desk) -> None:
    """A job was lost behind a failed level, and somebody made a Pass of it in both records."""
    desk.words[0] = "stuck"
    desk.submit("--level", "0", "--detach")
    assert desk.job() == 1
    record = desk.run / "trial.json"
    record.write_text(record.read_text().replace('"status": "done"', '"status": "running"'))
    for file in (record, desk.run / "levels/0-smoke/result.json"):
        file.write_text(file.read_text().replace('"Fail"', '"Pass"'))
    assert desk.call("attach", desk.run)[0] == 99
    assert desk.trial.levels[0].verdict == "Blocked"
    assert desk.call("report", desk.run)[0] == 99
