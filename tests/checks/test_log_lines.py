"""What the lines of a log say about the exit of a run, and about values that are no numbers."""

from __future__ import annotations

import pytest

from seatrial.checks.log_lines import LogFacts, Said, exited, not_finite
from seatrial.core.log_text import exit_value

FAILED = (
    *("rc=1", "exit code 139", "returncode: -9", "ExitCode 1:0", "ExitCode 0:9", "  exitcode  : 1 (pid: 4711)", "Exited with exit code 9"),
    *("[1]+  Exit 1   python train.py", "[1]-  Done(1)", "code=exited, status=1/FAILURE", "container exited (137)", "OOMKilled"),
    *("killed by SIGKILL", "SIGSEGV received", "Command terminated by signal 9", "run.sh: line 3: 77 Killed   python x", "FAILED"),
    *("ERROR: torchrun returned 1", "Process returned -11", "error code 1", "CANCELLED by user", "ray job failed", "exit code 0xC0000005"),
)
FINE = (
    *("rc=0", "exit status: 0", "ExitCode 0:0", "rc=124", "exited with code 0", "Process finished with exit code 0"),
    *("saved to /work/exit 1/model", "finished with 20 steps", "done with 3 warnings", "Training completed with 20 steps in 33.9 s"),
    *("Killed 3 actors", "Terminated worker processes", "terminated 4 vllm workers", "0 failed, 12 passed", "Signals delivered: 0"),
    *("Failed requests: 0", "[1]+  Done   python train.py", "returned 20 rows", "Destroying process group before exit"),
)


def verdict(text: str) -> bool:
    """Whether a log that ends with this line says that the run failed."""
    value = exit_value(text)
    checks = exited(LogFacts(exits=[Said(1, text, value)])) if value is not None else []
    return any(not check.passed for check in checks)


@pytest.mark.parametrize("text", FAILED)
def test_a_failure_is_read_in_every_spelling(text: str) -> None:
    assert verdict(text)


@pytest.mark.parametrize("text", FINE)
def test_a_healthy_end_is_no_failure(text: str) -> None:
    assert not verdict(text)


@pytest.mark.parametrize(
    "text", ["loss: nan", "grad_norm=inf", "Loss: NaN", "reward = -Infinity", "nan loss encountered", "loss became nan"]
)
def test_a_value_that_is_no_number_is_seen(text: str) -> None:
    assert not_finite(text)


@pytest.mark.parametrize(
    "text", ["max_grad_norm: inf", "nan_to_num(loss)", "best loss improved from inf to 2", "no nan loss found", "info: lr 1"]
)
def test_words_that_only_look_like_one_are_not(text: str) -> None:
    assert not_finite(text) is None
