"""Verdicts, boundaries and exit codes: the contract of every command.

- A verdict is one of four words; there is no fifth and no synonym.
- `worst` orders them so that a trial can never look better than its worst requested level.
- Exit codes are a documented contract (docs/verdicts.md); scripts may rely on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, StrEnum


class Verdict(StrEnum):
    """The outcome of a level, a deliverable or a trial."""

    PASS = "Pass"
    FAIL = "Fail"
    SKIPPED = "Skipped"
    BLOCKED = "Blocked"


class Boundary(StrEnum):
    """Where a failure sits. Every failure is attributed to exactly one."""

    ENVIRONMENT = "environment"
    CONFIG = "config"
    DATA = "data"
    REWARD = "reward"
    CLUSTER = "cluster"
    ROLLOUT = "rollout"
    PROVIDER = "provider"
    PEFT = "peft"
    DDP = "ddp"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"
    REFIT = "refit"
    METRICS = "metrics"


class ExitCode(IntEnum):
    """Process exit codes: GNU's 77 and 99 carry Skipped and Blocked."""

    PASS = 0
    FAIL = 1
    USAGE = 2
    INTERNAL = 3
    SKIPPED = 77
    BLOCKED = 99
    INTERRUPTED = 130


_EXIT = {
    Verdict.PASS: ExitCode.PASS,
    Verdict.FAIL: ExitCode.FAIL,
    Verdict.SKIPPED: ExitCode.SKIPPED,
    Verdict.BLOCKED: ExitCode.BLOCKED,
}


def exit_code(verdict: Verdict) -> ExitCode:
    """The exit code that carries this verdict."""
    return _EXIT[verdict]


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Combine the verdicts of everything that was requested.

    Fail beats Blocked beats Skipped beats Pass. A trial where something requested was skipped is therefore
    not a Pass: only what ran can pass. Nothing at all is Skipped, never Pass.
    """
    seen = set(verdicts)
    for verdict in (Verdict.FAIL, Verdict.BLOCKED, Verdict.SKIPPED):
        if verdict in seen:
            return verdict
    return Verdict.PASS if seen else Verdict.SKIPPED
