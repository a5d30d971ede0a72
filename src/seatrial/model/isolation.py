"""The isolation matrix of a failed level, as it is stored in isolate.json: the original beside each rerun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from seatrial.model.record import Record
from seatrial.model.verdict import Verdict

ISOLATION_VERSION = 1
OPTION = "isolation"
"""Option of a rerun: the loop arguments that it sets, so that the loop does not claim what they change on purpose."""
Failure = Literal["gone", "still there", "another failure", "no evidence", "not run"]


def settings(arguments: Sequence[str], options: Mapping[str, str]) -> str:
    """What a rerun changes, in one line: options as `--set` takes them, then loop arguments."""
    return " ".join([*(f"options.{name}={value}" for name, value in options.items()), *arguments])


class Measured(Record):
    """A check that the original missed, as one run measured it."""

    name: str
    value: float | str | None
    threshold: str = ""


class Rerun(Record):
    """One rerun of the failed level."""

    name: str
    arguments: tuple[str, ...]
    """Loop arguments on top of the trial's own."""
    options: dict[str, str] = Field(default_factory=dict)
    """Options of the loop on top of the trial's own."""
    suspect: str
    """What the rerun points to when the failure is gone."""
    reduced: bool = False
    verdict: Verdict | None = None
    """Of the rerun itself; None when it was not run. It is never the verdict of the trial."""
    reason: str = ""
    failure: Failure = "not run"
    """What became of the original failure."""
    note: str = ""
    measured: Measured | None = None
    log: str = ""
    directory: str


class Matrix(Record):
    """isolate.json."""

    schema_version: int = Field(default=ISOLATION_VERSION)
    trial: str
    level: int
    title: str
    verdict: Verdict
    """Of the level in the trial: the matrix does not change it."""
    reason: str
    measured: Measured | None = None
    log: str
    reruns: tuple[Rerun, ...]
    complete: bool
    """Every rerun that was asked for was judged Pass or Fail."""
    interrupted: bool = False
    suspects: tuple[str, ...] = ()
    conclusion: tuple[str, ...]
