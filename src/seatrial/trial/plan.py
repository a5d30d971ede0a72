"""Choosing levels: asked for by number, or required by the diff.

- Each level that is chosen carries the reason; `causes` says how a diff is read.
- A changed path that no rule names, and a diff that is empty, fan out to the default levels: never to none.
- Only where every changed path is known to need no level (documentation, recipes) is none required. A trial of none is
  Skipped, never a Pass: nothing was shown.
- Level 0 always comes first: what fails there makes every later level hard to read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_count
from seatrial.model.knowledge import Level
from seatrial.model.loop import Loop
from seatrial.model.record import Plan, PlannedLevel, RepoState
from seatrial.trial.causes import Cause, Diff, read


@dataclass(frozen=True, slots=True)
class Required:
    """What the diffs of a change ask for."""

    levels: tuple[PlannedLevel, ...]
    """None when every changed path is known to need no level."""
    unmatched: tuple[str, ...] = ()
    """Paths that no rule names."""
    not_needed: tuple[str, ...] = ()
    """Paths that are known to need no level."""
    causes: tuple[Cause, ...] = ()
    """Every path and line that asks for a level, in the order of the diffs."""


def parse_levels(text: str, loop: Loop) -> tuple[int, ...]:
    """`0,1,4-6` or `all` as level numbers of this loop; an unknown one is an error that lists the known ones."""
    known = [level.number for level in loop.levels()]
    if text.strip() == "all":
        return tuple(known)
    chosen: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part, re.ASCII)
        if not found:
            raise UserError(f"--level {text!r}: {part!r} is not a level", "use numbers such as 0,1,6, a range such as 0-2, or all")
        first, last = parse_count(found[1]), parse_count(found[2] or found[1])
        chosen += range(first, min(last, max(first, *known) + 1) + 1) if first <= last else []
        if first > last:
            raise UserError(f"--level {text!r}: {part.strip()!r} runs backwards", f"use {last}-{first}")
    for number in chosen:
        if number not in known:
            listed = "; ".join(f"{level.number} {level.title}" for level in loop.levels())
            raise UserError(f"unknown level {number}: {loop.title} has {listed}", f"choose from {', '.join(map(str, known))}")
    return tuple(dict.fromkeys(chosen))


def requested(loop: Loop, numbers: Sequence[int] | None) -> tuple[PlannedLevel, ...]:
    """The levels that were asked for, or the defaults."""
    if numbers is None:
        return tuple(_planned(level, ("default level",)) for level in loop.levels() if level.default)
    return tuple(_planned(level, ("requested",)) for level in loop.levels() if level.number in numbers)


def required(loop: Loop, diffs: Sequence[Diff]) -> Required:
    """The levels that the diffs require, each with its reasons."""
    readings = [read(loop, diff) for diff in diffs]
    causes = tuple(cause for reading in readings for cause in reading.causes)
    unmatched = tuple(text for reading in readings for text in reading.unmatched)
    not_needed = tuple(text for reading in readings for text in reading.not_needed)
    if not_needed and not unmatched and not causes:
        return Required((), not_needed=not_needed)
    reasons: dict[int, list[str]] = {}
    for cause in causes:
        reasons.setdefault(cause.level, []).append(cause.reason)
    if unmatched or not causes:
        why = f"{len(unmatched)} changed paths match no level ({unmatched[0]})" if unmatched else "no changed path was found"
        for level in loop.levels():
            if level.default:
                reasons.setdefault(level.number, []).append(f"default level: {why}")
    first = loop.levels()[0]
    reasons.setdefault(first.number, []).append("the smoke comes first")
    chosen = tuple(_planned(level, _few(reasons[level.number])) for level in loop.levels() if level.number in reasons)
    return Required(chosen, unmatched, not_needed, causes)


def _few(reasons: Sequence[str], most: int = 4) -> tuple[str, ...]:
    """The first reasons, and how many more there are."""
    return (*reasons[:most], f"{len(reasons) - most} more such reasons") if len(reasons) > most else tuple(reasons)


def _planned(level: Level, reasons: tuple[str, ...]) -> PlannedLevel:
    return PlannedLevel(number=level.number, name=level.name, title=level.title, reasons=reasons, cost=level.cost, skip=level.skip)


def make_plan(
    loop: Loop,
    levels: tuple[PlannedLevel, ...],
    model: str | None,
    changes: tuple[RepoState, ...] = (),
    found: Required | None = None,
    arguments: tuple[str, ...] = (),
    options: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of a trial."""
    return Plan(
        loop=loop.name,
        levels=levels,
        model=model or loop.default_model,
        changes=changes,
        unmatched=found.unmatched if found else (),
        not_needed=found.not_needed if found else (),
        arguments=arguments,
        options=dict(options or {}),
    )


def totals(plan: Plan) -> Mapping[str, float]:
    """What the whole plan costs: minutes and CPU add up, disk adds up, GPUs and memory are the largest."""
    costs = [level.cost for level in plan.levels if not level.skip]
    return {
        "minutes": sum(cost.minutes for cost in costs),
        "cpu_seconds": sum(cost.cpu_seconds for cost in costs),
        "disk_mb": sum(cost.disk_mb for cost in costs),
        "gpus": max((cost.gpus for cost in costs), default=0),
        "memory_mb": max((cost.memory_mb for cost in costs), default=0),
    }
