"""A gate that failed, once more without the change: what fails there in the same way is not the change's doing, and ends no trial.

- The same command runs on worktrees of the commits before the change. Where these are not known or cannot be had, what was
  measured and missed stays a Fail; where nothing was measured, because something could not be imported or called, nobody knows
  whether that is the change's: it is Blocked. So is any failure where nothing differs from the base.
- The same way: the same check of the same rung and model says the same, numbers and paths aside, and measured nothing much worse.
  What cannot be compared is not the same.
- Excused means Blocked, never Pass: nothing was proven. One failure that the base does not have is a Fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.model.errors import BlockedError, UserError
from seatrial.model.loop import SideTests
from seatrial.model.verdict import Verdict
from seatrial.report.text import generic
from seatrial.trial.base import same_files
from seatrial.trial.unchanged import unchanged

WORSE = 10.0
"""A measured value may be this many times as bad as before. Chosen, not measured."""
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_MEASURED = re.compile(rf"({_NUMBER})(?:(?:/| of )({_NUMBER}))?(?![\w.])")
Run = Callable[[tuple[str, ...]], dict[str, Any] | None]
"""Runs the command of a probe; gives its probe.json when that is a Fail, None for a Pass. Anything else is a BlockedError."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A check that was missed; or why a rung or a whole probe failed, where there is none."""

    model: str
    rung: str
    check: str
    message: str
    """Without numbers and paths."""
    value: str = ""
    threshold: str = ""

    def as_before(self, old: Failure) -> bool:
        """Whether this is what failed before, and not much worse."""
        mine, its = ((one.model, one.rung, one.check, one.message) for one in (self, old))
        return mine == its and _no_worse(self, old)


def excuse(tests: SideTests, found: dict[str, Any], trees: Path, run: Run) -> tuple[str, str]:
    """Why the failures of a gate are not the change's, or nothing; and a note on what was compared."""
    commits = ", ".join(f"{repo.name} {commit[:12]}" for repo, commit in tests.bases)
    if not tests.bases:
        return uncompared(found, "the state before the change is not known: name --base")
    if same_files([repo for repo, _ in tests.bases]):
        return f"nothing differs from the base ({commits}), so there is no change to hold this against", ""
    try:
        with unchanged(tests.bases, trees) as states:
            there = {f"={repo.path}": f"={state.path}" for (repo, _), state in zip(tests.bases, states, strict=True)}
            before = run(tuple(_moved(tests.argv, there)))
    except (BlockedError, UserError) as error:
        return uncompared(found, f"the state before the change cannot be run: {error.message}")
    new = fresh(found, before)
    if new is not None:
        what = ": ".join(part for part in (new.model, new.rung, new.check) if part)
        return "", f"compared with the state before the change ({commits}): this is new{f': {what}' if what else ''}"
    return f"the state before the change ({commits}) fails in the same way", ""


def uncompared(found: dict[str, Any], why: str) -> tuple[str, str]:
    """Why failures that were not compared are not held against the change, or nothing; and a note."""
    if all(not failure.check for failure in failures(found)):
        return f"nothing that failed was measured, and nothing was compared: {why}", ""
    return "", f"not compared with the state before the change: {why}"


def _moved(argv: Sequence[str], places: dict[str, str]) -> Iterator[str]:
    """The command with `NAME=PATH` of each change at its other place."""
    for word in argv:
        end = next((path for path in places if word.endswith(path)), None)
        yield word.removesuffix(end) + places[end] if end else word


def fresh(now: dict[str, Any], before: dict[str, Any] | None) -> Failure | None:
    """The first failure of a failed probe that the one before does not have, or has much milder; None for one that did not fail."""
    old = failures(before) if before is not None else []
    return next((failure for failure in failures(now) if not any(failure.as_before(one) for one in old)), None)


def failures(probe: dict[str, Any]) -> list[Failure]:
    """What of a failed probe failed. One that never came to a rung failed as a whole."""
    judged = probe["judged"]
    rungs = [(family["model"], rung) for family in judged["families"] for rung in family["rungs"] if rung["verdict"] == Verdict.FAIL]
    missed = [failure for model, rung in rungs for failure in _missed(model, rung)]
    return missed or [Failure("", "", "", generic(str(judged.get("reason", ""))))]


def _missed(model: str, rung: dict[str, Any]) -> list[Failure]:
    missed = [check for check in rung.get("checks", ()) if not check["passed"]]
    if not missed:
        return [Failure(model, rung["rung"], "", generic(str(rung.get("reason", ""))))]
    return [
        Failure(
            *(model, rung["rung"], check["name"], generic(check.get("message", ""))),
            value=str(check.get("value", "")),
            threshold=check.get("threshold", ""),
        )
        for check in missed
    ]


def _no_worse(now: Failure, before: Failure) -> bool:
    """A count may not grow, since messages name only the first few; a measured value may be up to `WORSE` times as bad."""
    bad, old = _badness(now), _badness(before)
    if bad is None or old is None:
        return now.value == before.value
    counted = bad[1] or old[1]
    return bad[0] <= (old[0] if counted else WORSE * old[0])


def _badness(failure: Failure) -> tuple[float, bool] | None:
    """How far a value is from what it should be, and whether that is a count; None for what is no number, such as NaN."""
    found = _MEASURED.match(failure.value)
    if found is None:
        return None
    value, whole = float(found[1]), found[2]
    if failure.threshold == "all":  # `13/26 equal`
        return (float(whole) - value, True) if whole is not None else None
    limit = re.match(rf">=? ({_NUMBER})$", failure.threshold)
    if limit is not None:  # a cosine: what it lacks
        return float(limit[1]) - value, False
    return abs(value), failure.value.isdecimal()
