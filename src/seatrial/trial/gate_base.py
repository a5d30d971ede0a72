"""A gate that failed, once more without the change: what fails there in the same way is not the change's doing, and ends no trial.

- The same command runs on worktrees of the commits before the change. Without such commits, or where they cannot be had, the
  Fail stands, and it is said that nothing was compared.
- Excused means Blocked, never Pass: nothing was proven. One failure that the base does not have is a Fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from seatrial.model.errors import BlockedError, UserError
from seatrial.model.loop import SideTests
from seatrial.model.verdict import Verdict
from seatrial.trial.unchanged import unchanged

Failure = tuple[str, str, str]
"""Model, rung, and a check that it missed; or why it failed, where it has none."""
Run = Callable[[tuple[str, ...]], dict[str, Any] | None]
"""Runs the command of a probe; gives its probe.json when that is a Fail, and None otherwise."""


def excuse(tests: SideTests, found: dict[str, Any], trees: Path, run: Run) -> tuple[str, str]:
    """Why the failures of a gate are not the change's, or nothing; and a note on what was compared."""
    commits = ", ".join(f"{repo.name} {commit[:12]}" for repo, commit in tests.bases)
    if not tests.bases:
        return "", "not compared with the state before the change, which is not known: name --base"
    try:
        with unchanged(tests.bases, trees) as states:
            there = {f"={repo.path}": f"={state.path}" for (repo, _), state in zip(tests.bases, states, strict=True)}
            before = run(tuple(_moved(tests.argv, there)))
    except (BlockedError, UserError) as error:
        return "", f"not compared with the state before the change: {error.message}"
    if before is None or not failures(found) <= failures(before):
        return "", f"compared with the state before the change ({commits}): this is new"
    return f"the state before the change ({commits}) fails in the same way", ""


def _moved(argv: Sequence[str], places: dict[str, str]) -> Iterator[str]:
    """The command with `NAME=PATH` of each change at its other place."""
    for word in argv:
        end = next((path for path in places if word.endswith(path)), None)
        yield word.removesuffix(end) + places[end] if end else word


def failures(probe: dict[str, Any]) -> set[Failure]:
    """What of a failed probe failed. One that never came to a rung failed as a whole."""
    judged = probe["judged"]
    rungs = [(family["model"], rung) for family in judged["families"] for rung in family["rungs"] if rung["verdict"] == Verdict.FAIL]
    return {(model, rung["rung"], what) for model, rung in rungs for what in _missed(rung)} or {("", "", judged["reason"])}


def _missed(rung: dict[str, Any]) -> list[str]:
    return [check["name"] for check in rung.get("checks", ()) if not check["passed"]] or [rung["reason"]]
