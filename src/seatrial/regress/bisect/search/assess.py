"""What the rows say about where the first bad commit is: a probability for every point.

- Hypothesis c (every point but the good end): c is the first bad commit; a point is bad exactly when c is the point or before it.
  All hypotheses weigh alike before any run: p(c | rows) is proportional to the likelihood of the rows under c.
- Points with the same contents give the same results, so a commit with the contents of a parent is no suspect.
- Skips say nothing. A commit that cannot be tested stays a suspect.
- Without noise (`repeat` 1) a good run clears a point and what is before it, a bad one clears what is not before it. Rows that no single
  commit explains (bad, then good again): the newest change from good to bad that leads to the bad end is searched, and a note says so.
- With noise the likelihood comes from a model of noise.py. A point whose own runs settle it is used as without noise when a later point
  settles the opposite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from seatrial.regress.bisect.record import History, Mark, Run
from seatrial.regress.bisect.search.noise import Marks, Means, Model, Step, Tally, Threshold, prepare

COPIED = "not run: the same files as a point that was"


@dataclass(frozen=True)
class Settings:
    """What a person asked for. `repeat`: at most so many runs of one point; 1 means that runs are not noisy."""

    repeat: int
    confidence: float
    metric: Threshold | None


@dataclass(frozen=True)
class Cell:
    """Suspects that no run so far tells apart."""

    members: int
    """As bits."""
    weight: float
    """Probability of each member."""


@dataclass(frozen=True)
class Assessment:
    """Where the first bad commit may be."""

    history: History
    settings: Settings
    tallies: Mapping[int, Tally]
    """Of the points with a good or bad run."""
    skipped: frozenset[int]
    """Points that were tried and only skipped, and those with the same contents."""
    cells: tuple[Cell, ...]
    region: int
    """Points (bits) worth running: those before every point that is known to be bad."""
    model: str = ""
    steady: bool = True
    """Whether repeated runs agree."""
    notes: tuple[str, ...] = ()

    @property
    def noisy(self) -> bool:
        """Whether a point may be run again."""
        return self.settings.repeat > 1

    @cached_property
    def suspects(self) -> int:
        """Everything with a probability, as bits."""
        return union(cell.members for cell in self.cells)

    def bad(self, point: int) -> float:
        """The probability that a point is bad: that the first bad commit is it or before it."""
        before = self.history.ancestors[point]
        return math.fsum(cell.weight * (cell.members & before).bit_count() for cell in self._heavy)

    @cached_property
    def _heavy(self) -> tuple[Cell, ...]:
        """The cells that make a difference to a probability; most have none left after a few runs."""
        return tuple(cell for cell in self.cells if cell.weight * cell.members.bit_count() > 1e-9)

    @cached_property
    def atoms(self) -> tuple[Cell, ...]:
        """Suspects that no run at all can tell apart, because what lies between them cannot be tested; most probable first."""
        testable = sum(1 << point for point in range(len(self.history.points)) if point not in self.skipped)
        later = descendants(self.history)
        groups: dict[tuple[int, int], int] = {}
        for number, cell in enumerate(self.cells):
            for member in bits(cell.members):
                key = (number, later[member] & testable)
                groups[key] = groups.get(key, 0) | 1 << member
        atoms = [Cell(members, self.cells[number].weight) for (number, _), members in groups.items()]
        return tuple(sorted(atoms, key=lambda atom: (-atom.weight * atom.members.bit_count(), atom.members)))


def bits(mask: int) -> list[int]:
    """The set bits, lowest first."""
    text = bin(mask)[:1:-1]
    found, place = [], text.find("1")
    while place >= 0:
        found.append(place)
        place = text.find("1", place + 1)
    return found


def union(masks: Iterable[int]) -> int:
    """Every bit of any."""
    found = 0
    for mask in masks:
        found |= mask
    return found


def descendants(history: History) -> list[int]:
    """Of each point, itself and what builds on it, as bits."""
    found = [1 << index for index in range(len(history.points))]
    for index in range(history.last, -1, -1):
        for parent in history.points[index].parents:
            found[parent] |= found[index]
    return found


def assess(history: History, rows: Sequence[Run], settings: Settings) -> Assessment:
    """The posterior over points 1 to last. Rows of points that are not in this history (other pins) say nothing here."""
    tallies, skipped = _gather(history, rows, settings)
    notes: list[str] = []
    possible = _possible(history)
    if not possible:
        notes.append("the bad end has the same files as the good end: no commit between them can be to blame")
    if settings.repeat == 1:
        cells, region = _exact(history, tallies, possible, notes)
        return Assessment(history, settings, tallies, skipped, cells, region, notes=tuple(notes))
    return _noisy(Assessment(history, settings, tallies, skipped, (), history.ancestors[history.last]), possible, notes)


def _gather(history: History, rows: Sequence[Run], settings: Settings) -> tuple[dict[int, Tally], frozenset[int]]:
    """Tallies, and the points with only skips. Copied rows are not runs of their own: with noise they would count twice."""
    found: dict[int, list[Run]] = {}
    skips: set[str] = set()
    for row in rows:
        index = history.by_id.get(row.point)
        if index is None or (settings.repeat > 1 and COPIED in row.notes):
            continue
        if row.mark == Mark.SKIP:
            skips.add(history.points[index].contents)
        else:
            found.setdefault(index, []).append(row)
    tested = {history.points[index].contents for index in found}
    skipped = frozenset(index for index, point in enumerate(history.points) if point.contents in skips - tested)
    tallies = {
        index: Tally(
            sum(run.mark == Mark.GOOD for run in runs),
            sum(run.mark == Mark.BAD for run in runs),
            tuple(run.value for run in runs if isinstance(run.value, int | float) and math.isfinite(run.value)),
        )
        for index, runs in sorted(found.items())
    }
    return tallies, skipped


def _possible(history: History) -> int:
    """Every point but the good end, less those with the same contents as a parent: if one is bad, that parent was bad before it.

    Equal contents further apart say less: what is landed, reverted and landed again is bad twice, and the second time is to blame.
    """
    points = history.points
    changed = (
        index for index, point in enumerate(points) if index and all(points[parent].contents != point.contents for parent in point.parents)
    )
    return union(1 << index for index in changed)


def _exact(history: History, tallies: Mapping[int, Tally], possible: int, notes: list[str]) -> tuple[tuple[Cell, ...], int]:
    """Runs are believed. A point whose runs disagree says nothing."""
    unsure = [index for index, tally in tallies.items() if tally.disagree]
    if unsure:
        notes.append(f"{len(unsure)} commits gave good and bad runs and were left out; --repeat treats this as noise")
    goods = [index for index, tally in tallies.items() if not tally.bads]
    bads = [index for index, tally in tallies.items() if not tally.goods]
    cleared = union(history.ancestors[index] for index in goods)
    notes += _came_and_went(history, [index for index in bads if cleared >> index & 1])
    suspects, region = possible & ~cleared, history.ancestors[history.last]
    for index in reversed([index for index in bads if not cleared >> index & 1]):
        before = history.ancestors[index]
        if suspects & before:
            suspects, region = suspects & before, region & before
        else:
            notes.append(f"{history.points[index].commit[:12]} is bad on another branch for a reason of its own; that one is not searched")
    count = suspects.bit_count()
    return ((Cell(suspects, 1 / count),) if count else ()), region


def _came_and_went(history: History, dropped: Sequence[int]) -> list[str]:
    """A note about bad points before good ones."""
    if not dropped:
        return []
    names = ", ".join(history.points[index].commit[:12] for index in dropped)
    return [f"the failure came and went: {names} bad, and good again later; the newest change from good to bad was searched"]


def _noisy(blank: Assessment, possible: int, notes: list[str]) -> Assessment:
    """The posterior under the model that fits."""
    history, settings, tallies = blank.history, blank.settings, dict(blank.tallies)
    doubt = 1 - settings.confidence
    model, steady = _model(history, tallies, settings, notes)
    cells = _posterior(history, model, tallies, possible)
    if isinstance(model, Step):
        best = max(cells, key=lambda cell: cell.weight, default=None)
        late = _side(history, tallies, best) if best else 0
        why = model.misfit(late, doubt) if best else None
        if why:
            notes.append(f"the values are not one step ({why}): every commit is held against the check's limit")
            model = Means(model.scatter)
    if not isinstance(model, Step):
        level = math.log(max(len(tallies), 1) / doubt)
        settled = {index: model.odds(index) for index in tallies if abs(model.odds(index)) > level}
        cleared = union(history.ancestors[index] for index, odds in settled.items() if odds < 0 and index != history.last)
        dropped = [index for index, odds in settled.items() if odds > 0 and cleared >> index & 1]
        notes += _came_and_went(history, dropped)
        for index in dropped:
            del tallies[index]
        if dropped:
            model = type(model)(tallies, 0, history.last) if isinstance(model, Marks) else _without(model, dropped)
        cells = _posterior(history, model, tallies, possible)
    return Assessment(
        history, settings, blank.tallies, blank.skipped, cells, blank.region, model=model.name, steady=steady, notes=tuple(notes)
    )


def _without(model: Means | Step, dropped: Sequence[int]) -> Means:
    values = {index: found for index, found in model.scatter.values.items() if index not in dropped}
    scatter = model.scatter
    return Means(type(scatter)(values, scatter.means, scatter.deviation, scatter.freedom, scatter.tallies))


def _model(history: History, tallies: Mapping[int, Tally], settings: Settings, notes: list[str]) -> tuple[Marks | Step | Means, bool]:
    """Values if there is a check's limit and every run has one; else marks."""
    if settings.metric is not None and tallies:
        if all(len(tally.values) == tally.runs for tally in tallies.values()):
            scatter = prepare(tallies, settings.metric, 0, history.last)
            if scatter is not None and scatter.flips:
                notes.append("single runs jump to the other side of the limit: only on which side each run lies is used")
            elif scatter is not None:
                return Step(scatter), scatter.steady
        else:
            notes.append("some runs have no value of the metric: only whether they passed is used")
    return Marks(tallies, 0, history.last), not any(tally.disagree for tally in tallies.values())


def _side(history: History, tallies: Mapping[int, Tally], cell: Cell) -> int:
    """The tested points (bits) that are bad if the first bad commit is in this cell."""
    one = cell.members & -cell.members
    return sum(1 << index for index in tallies if history.ancestors[index] & one)


def _posterior(history: History, model: Model, tallies: Mapping[int, Tally], possible: int) -> tuple[Cell, ...]:
    """p(c) = L(c) / Σ L. Suspects with the same tested points after them have the same likelihood, and make a cell."""
    cells = [possible] if possible else []
    for index in tallies:
        before = history.ancestors[index]
        cells = [part for cell in cells for part in (cell & before, cell & ~before) if part]
    logs = [model.log_likelihood(_side(history, tallies, Cell(cell, 0.0))) for cell in cells]
    top = max(logs, default=0.0)
    if top == -math.inf:
        return ()
    shares = [math.exp(log - top) for log in logs]
    total = math.fsum(share * cell.bit_count() for share, cell in zip(shares, cells, strict=True))
    return tuple(Cell(cell, share / total) for cell, share in zip(cells, shares, strict=True))
