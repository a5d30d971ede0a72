"""What a log says between two steps, in whatever words: troubles of a part count, what only sounds like one does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.log_lines import exited, read_facts
from seatrial.core.log_text import exit_value
from seatrial.core.records import Diagnosis
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops import get_loop
from seatrial.triage.diagnose import STEPS, diagnose
from seatrial.triage.log import Line
from seatrial.trial.level import read_diagnosis
from tests.triage.runs import LOGS, trl_log
from tests.triage.said import CALM, FAILED, WRONG

ORDER = ("trl", "verl", "trl", "verl", "nemo-rl")


def diagnosed(number: int, line: str, tmp_path: Path, *, step: int = 3) -> Diagnosis:
    """Each line in the log of another loop."""
    loop = ORDER[number % 5]
    path = tmp_path / "run.log"
    path.write_text(trl_log(6, at={step: [line]}) if loop == "trl" else LOGS[loop](at={step: [line]}))
    return read_diagnosis(get_loop(loop), path)


@pytest.mark.parametrize(("number", "line", "boundaries"), [(n, line, where) for n, (line, where) in enumerate(WRONG)])
def test_a_part_that_went_wrong_counts(number: int, line: str, boundaries: str, tmp_path: Path) -> None:
    found = diagnosed(number, line, tmp_path)
    assert found.verdict is not None
    assert found.boundary is not None
    assert "any" in boundaries or found.boundary.value in boundaries.split()


@pytest.mark.parametrize(("number", "line"), list(enumerate(CALM)))
def test_what_only_sounds_like_it_does_not(number: int, line: str, tmp_path: Path) -> None:
    found = diagnosed(number, line, tmp_path)
    assert found.verdict is None, found


@pytest.mark.parametrize("line", FAILED)
def test_a_failure_after_the_end_is_an_exit(line: str) -> None:
    value = exit_value(line)
    facts = read_facts([Line(1, "", line, line)])
    (check,) = exited(facts)
    assert (value is not None, check.passed) == (True, False)


@pytest.mark.parametrize(
    "line",
    [
        "Exit code: 0",
        "JobState=COMPLETED ExitCode=0:0",
        "1234.batch  batch  COMPLETED  0:0",
        "job 12 COMPLETED",
        "(raylet) INFO: terminated gracefully",
        "vllm server stopped (signal 15 sent to 3 workers)",
        "status: succeeded",
        "pod phase: Succeeded",
        "Finished: SUCCESS",
        "exited with non-fatal warnings: 3",
    ],
)
def test_a_good_end_is_no_failure(line: str) -> None:
    assert all(check.passed for check in exited(read_facts([Line(1, "", line, line)])))


def test_a_tools_error_behind_the_end_of_the_work_is_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    for line, verdict in (
        ("ERROR: prometheus exporter could not bind port 9090", None),
        ("ERROR: script returned exit code 1", Verdict.FAIL),
        ("ERROR: saving the last checkpoint failed", Verdict.FAIL),
    ):
        path.write_text(trl_log(6, after=[line]))
        assert read_diagnosis(get_loop("trl"), path).verdict in (verdict, Verdict.BLOCKED if verdict else None), line


def test_a_kill_by_the_scheduler_in_the_middle_counts(tmp_path: Path) -> None:
    line = "slurmstepd: error: *** STEP 1.0 ON n7 CANCELLED AT 2026-11-15T01:02:03 DUE TO NODE FAILURE ***"
    assert [diagnosed(n, line, tmp_path).boundary for n in (0, 1, 4)] == [Boundary.CLUSTER] * 3


SCRIPT = [f"step {step}: loss={1 / step:.3f} reward={step / 10}" for step in range(1, 9)]


@pytest.mark.parametrize(
    ("lines", "boundary"),
    [
        (["generator is using stale weights (version 3, policy 7)"], Boundary.REFIT),
        (["AssertionError: refit mismatch"], Boundary.REFIT),
        (["Traceback (most recent call last):", '  File "/x/rewards.py", line 3, in score', "KeyError: 'answer'"], Boundary.REWARD),
        (["optimizer.step failed with CUDA error, continuing"], Boundary.OPTIMIZER),
        (["all went well"], None),
        (["Traceback (most recent call last):", '  File "/x/wandb/sdk.py", line 3, in send', "ConnectionError: gone"], None),
    ],
)
def test_a_script_that_no_loop_knows(lines: list[str], boundary: Boundary | None, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("\n".join([*SCRIPT[:4], *lines, *SCRIPT[4:]]) + "\n")
    assert diagnose(path, STEPS, (), ended=True).boundary is boundary
    path.write_text("\n".join([*SCRIPT, *lines]) + "\n")
    after = diagnose(path, STEPS, (), ended=True)
    assert after.verdict is None or after.boundary is boundary
