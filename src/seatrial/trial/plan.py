"""Chooses levels: asked for by number, or required by the diff.

- A changed path that no rule names, and an empty diff, fan out to the default levels: never to none. Only where every changed path is
  known to need no level (documentation, recipes), none is required.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from seatrial.core.errors import UserError
from seatrial.core.guarded import parse_count
from seatrial.core.loop import Loop
from seatrial.core.records import Plan, PlannedLevel, RepoState
from seatrial.core.specs import Concern, Level, Surface, matches
from seatrial.evidence.changes import ChangedLine
from seatrial.metrics.checks import CheckSyntaxError, parse
from seatrial.triage.signatures import GENERAL, load_signatures

_DEFINES = re.compile(r"(?:async def|def|class)\s+(\w+)")


@dataclass(frozen=True, slots=True)
class Diff:
    repo: str
    base: str
    paths: tuple[str, ...]
    lines: tuple[ChangedLine, ...] = ()
    """Added and removed lines, for words."""
    complete: bool = True
    """False when the diff was too large to be read whole: a word that is missing then proves nothing."""
    packages: tuple[str, ...] = ()
    """What the checkout provides."""


@dataclass(frozen=True, slots=True)
class LevelCause:
    """One path or line of a diff that asks for a level, and the rule by which it does."""

    level: int
    repo: str
    path: str
    rule: str
    """The glob, word or import, in words."""
    concern: str = ""
    """The row of the loop's table."""
    line: int | None = None
    text: str = ""
    """The changed line, as it stands: it may hold a secret."""

    @property
    def reason(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{self.repo}: {place} {self.rule}" + (f" ({self.concern})" if self.concern else "")


@dataclass(slots=True)
class DiffReading:
    """What one diff asks for."""

    causes: list[LevelCause] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    """Paths that no rule names, and lines that were not read."""
    not_needed: list[str] = field(default_factory=list)
    """Paths that are known to need no level."""


def read_diff(loop: Loop, diff: Diff) -> DiffReading:
    """Hold a diff against everything that the loop knows."""
    found = DiffReading()
    rows = [row for row in loop.concerns() if row.package is None or row.package in diff.packages]
    aside: set[str] = set()
    for path in diff.paths:
        if any(row.glob_of(path) for row in rows if not row.levels):
            aside.add(path)
            found.not_needed.append(f"{diff.repo}: {path}")
            continue
        pins = [row for row in rows if row.only_with and row.glob_of(path)]
        aside |= {path} if pins else set()
        causes = [*_by_path(loop.levels(), rows, diff, path), *(cause for row in pins for cause in _by_pin(row, diff, path))]
        found.causes += causes
        if not causes:
            (found.not_needed if pins else found.unmatched).append(f"{diff.repo}: {path}")
    searched = [line for line in diff.lines if line.path not in aside]
    found.causes += _by_word(loop.levels(), rows, diff, searched)
    found.causes += [cause for surface in loop.surfaces() for cause in _by_import(loop.title, surface, diff, searched)]
    if not diff.complete:
        found.unmatched.append(f"{diff.repo}: lines beyond what is read of a diff")
    return found


def _by_path(levels: Iterable[Level], rows: Iterable[Concern], diff: Diff, path: str) -> Iterator[LevelCause]:
    for level in levels:
        glob = next((glob for glob in level.required_when if matches(path, glob)), None)
        if glob is not None:
            yield LevelCause(level.number, diff.repo, path, f"matches {glob}")
    for row in rows:
        glob = None if row.only_with else row.glob_of(path)
        if glob is not None:
            yield from (LevelCause(number, diff.repo, path, f"matches {glob}", row.name) for number in row.levels)


def _by_pin(row: Concern, diff: Diff, path: str) -> Iterator[LevelCause]:
    """A row that asks for words: by the line that says one, or because no line could be read."""
    lines = [line for line in diff.lines if line.path == path]
    said = next(((line, word) for line in lines for word in row.only_with if _beginning(word).search(f"{line.within}\n{line.text}")), None)
    if said is not None:
        yield from (_at(number, diff, said[0], f"says {said[1]!r}", row.name) for number in row.levels)
    elif not lines or not diff.complete:
        rule = f"matches {row.glob_of(path)}, and its lines were not read"
        yield from (LevelCause(number, diff.repo, path, rule, row.name) for number in row.levels)


def _by_word(levels: Iterable[Level], rows: Iterable[Concern], diff: Diff, lines: Sequence[ChangedLine]) -> Iterator[LevelCause]:
    """Words that occur in changed lines, each by the first line that says it."""
    wanted: list[tuple[tuple[int, ...], str, str]] = [((level.number,), word, "") for level in levels for word in level.words]
    wanted += [(row.levels, word, row.name) for row in rows for word in row.words]
    # One text for all: a large diff is searched for some sixty words.
    whole = "\n".join(line.text for line in lines)
    starts = list(accumulate((len(line.text) + 1 for line in lines), initial=0))
    for numbers, word, name in wanted:
        found = _beginning(word).search(whole)
        if found is not None:
            line = lines[bisect_right(starts, found.start()) - 1]
            yield from (_at(number, diff, line, f"says {word!r}", name) for number in numbers)


def _by_import(title: str, surface: Surface, diff: Diff, lines: Sequence[ChangedLine]) -> Iterator[LevelCause]:
    """What the loop imports: each name by the first changed line inside its definition."""
    told: set[str] = set()
    inside = ""
    before: ChangedLine | None = None
    for line in lines:
        if not surface.is_file(line.path):
            continue
        if before is None or (line.within, line.removed) != (before.within, before.removed) or line.number != before.number + 1:
            inside = _defined(line.within)
        inside, before = _defined(line.text) or inside, line
        name = inside if inside in surface.names else "" if surface.names else surface.module
        if name and name not in told:
            told.add(name)
            yield from (_at(number, diff, line, f"is in {name}, which {title} imports", "") for number in surface.levels)


def _defined(text: str) -> str:
    """The function or class that a line of the outermost level opens."""
    found = _DEFINES.match(text)
    return found[1] if found else ""


def _beginning(word: str) -> re.Pattern[str]:
    """Finds where a word begins; what follows it does not matter."""
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(word)}", re.IGNORECASE)


def _at(level: int, diff: Diff, line: ChangedLine, rule: str, concern: str) -> LevelCause:
    return LevelCause(level, diff.repo, line.path, rule, concern, line.number, f"{'-' if line.removed else '+'} {line.text.strip()}")


@dataclass(frozen=True, slots=True)
class RequiredLevel:
    """What the diffs of a change ask for."""

    levels: tuple[PlannedLevel, ...]
    """None when every changed path is known to need no level."""
    unmatched: tuple[str, ...] = ()
    """Paths that no rule names."""
    not_needed: tuple[str, ...] = ()
    """Paths that are known to need no level."""
    causes: tuple[LevelCause, ...] = ()
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


def required(loop: Loop, diffs: Sequence[Diff]) -> RequiredLevel:
    """The levels that the diffs require, each with its reasons."""
    readings = [read_diff(loop, diff) for diff in diffs]
    causes = tuple(cause for reading in readings for cause in reading.causes)
    unmatched = tuple(text for reading in readings for text in reading.unmatched)
    not_needed = tuple(text for reading in readings for text in reading.not_needed)
    if not_needed and not unmatched and not causes:
        return RequiredLevel((), not_needed=not_needed)
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
    return RequiredLevel(chosen, unmatched, not_needed, causes)


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
    found: RequiredLevel | None = None,
    arguments: tuple[str, ...] = (),
    options: Mapping[str, str] | None = None,
) -> Plan:
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


def require_known(loop: Loop, ids: Iterable[str], origins: Mapping[str, str]) -> None:
    """Refuse an id that no failure has; `origins` says where each was given."""
    known = [signature.id for signature in (*loop.signatures(), *load_signatures(GENERAL)) if not signature.harmless]
    for name in ids:
        if name in known or _is_check(name):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        fix = f"did you mean {close[0]}?" if close else f"known ids: {', '.join(known)}; or the expression of a check"
        raise UserError(f"{origins.get(name, 'configuration')}: known_issues: {name!r} is no known failure of {loop.title}", fix)


def _is_check(text: str) -> bool:
    try:
        parse(text)
    except CheckSyntaxError:
        return False
    return True
