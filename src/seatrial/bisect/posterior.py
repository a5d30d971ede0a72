"""What the rows say about the first bad commit (a probability for every point), which points to run next, and the answer.

Pure functions of the history and the rows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from functools import cached_property

from seatrial.bisect.bisect_records import COPIED, BisectAnswer, BisectRun, History, Mark, Suspect
from seatrial.bisect.noise_models import MarksModel, MeansModel, Model, StepModel, Tally, Threshold, measure_scatter
from seatrial.core.records import replace


@dataclass(frozen=True)
class SearchSettings:
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
    settings: SearchSettings
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
        return self.settings.repeat > 1

    @cached_property
    def suspects(self) -> int:
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
    text = bin(mask)[:1:-1]
    found, place = [], text.find("1")
    while place >= 0:
        found.append(place)
        place = text.find("1", place + 1)
    return found


def union(masks: Iterable[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def descendants(history: History) -> list[int]:
    found = [1 << index for index in range(len(history.points))]
    for index in range(history.last, -1, -1):
        for parent in history.points[index].parents:
            found[parent] |= found[index]
    return found


def assess(history: History, rows: Sequence[BisectRun], settings: SearchSettings) -> Assessment:
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


def _gather(history: History, rows: Sequence[BisectRun], settings: SearchSettings) -> tuple[dict[int, Tally], frozenset[int]]:
    """Tallies, and the points with only skips. Copied rows are not runs of their own: with noise they would count twice."""
    found: dict[int, list[BisectRun]] = {}
    skips: set[str] = set()
    for row in rows:
        index = history.by_id.get(row.point)
        if index is None or (settings.repeat > 1 and row.copied):
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
    """Every point but the good end, less those with the same contents as a parent: if one is bad, that parent was bad before it. Equal
    contents further apart say less: what is landed, reverted and landed again is bad twice, and the second time is to blame."""
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
    if isinstance(model, StepModel):
        best = max(cells, key=lambda cell: cell.weight, default=None)
        late = _side(history, tallies, best) if best else 0
        why = model.misfit(late, doubt) if best else None
        if why:
            notes.append(f"the values are not one step ({why}): every commit is held against the check's limit")
            model = MeansModel(model.scatter)
    if not isinstance(model, StepModel):
        level = math.log(max(len(tallies), 1) / doubt)
        settled = {index: model.odds(index) for index in tallies if abs(model.odds(index)) > level}
        cleared = union(history.ancestors[index] for index, odds in settled.items() if odds < 0 and index != history.last)
        dropped = [index for index, odds in settled.items() if odds > 0 and cleared >> index & 1]
        notes += _came_and_went(history, dropped)
        for index in dropped:
            del tallies[index]
        if isinstance(model, MarksModel):
            model = MarksModel(tallies, 0, history.last)
        elif dropped:
            values = {index: found for index, found in model.scatter.values.items() if index not in dropped}
            model = MeansModel(replace_fields(model.scatter, values=values, flips=False))
        cells = _posterior(history, model, tallies, possible)
    return Assessment(
        history, settings, blank.tallies, blank.skipped, cells, blank.region, model=model.name, steady=steady, notes=tuple(notes)
    )


def _model(history: History, tallies: Mapping[int, Tally], settings: SearchSettings, notes: list[str]) -> tuple[Model, bool]:
    """Values if there is a check's limit and every run has one; else marks."""
    if settings.metric is not None and tallies:
        if all(len(tally.values) == tally.runs for tally in tallies.values()):
            scatter = measure_scatter(tallies, settings.metric, 0, history.last)
            if scatter is not None and scatter.flips:
                notes.append("single runs jump to the other side of the limit: only on which side each run lies is used")
            elif scatter is not None:
                return StepModel(scatter), scatter.steady
        else:
            notes.append("some runs have no value of the metric: only whether they passed is used")
    return MarksModel(tallies, 0, history.last), not any(tally.disagree for tally in tallies.values())


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


STEADY_ENDS = 3
NOISY_ENDS = 5
"""Runs of each end before the search: when they agree, and when not. Later, when not: as many as the point with the most runs."""
BORDER_RUNS = 3
"""Runs of the suspect and of the last good point before it is convicted, when runs may be repeated: one wild run must not decide, also
where the ends happened to agree. With two, simulations where 1 run in 10 is wild are not honest (see tests)."""
AGAIN = 0.7
"""What a second run of the same point in the same round is worth, against one of another point."""


def rounds_needed(count_of_points: int, jobs: int, noisy: bool) -> int:
    """Rounds to tell so many suspects apart with `jobs` runs each: the least r with (jobs + 1)^r >= points; noise adds one for the ends."""
    rounds, reach = 0, 1
    while reach < count_of_points:
        rounds, reach = rounds + 1, reach * (jobs + 1)
    return rounds + noisy


def known_by_contents(history: History, rows: Sequence[BisectRun]) -> list[BisectRun]:
    """Rows for the points that were not run but have the same contents as one that was: its last good or bad row."""
    source: dict[str, BisectRun] = {}
    have: set[str] = set()
    for row in rows:
        index = history.by_id.get(row.point)
        if index is not None and row.mark != Mark.SKIP:
            have.add(row.point)
            source[history.points[index].contents] = row
    number = max((row.number for row in rows), default=0)
    found: list[BisectRun] = []
    for point in history.points:
        if point.contents not in source or point.id in have:
            continue
        row, number = source[point.contents], number + 1
        told = {"reason": f"the same files as {row.commit[:12]}", "notes": (COPIED,), "copied": True, "unedited": ()}
        unrun = {"seconds": 0.0, "directory": "", "built": False}
        found.append(replace(row, number=number, point=point.id, commit=point.commit, **told, **unrun))
    return found


def choose_points(assessment: Assessment, count: int) -> list[int]:
    """Up to `count` points to run now, the same one more than once where noise makes that worth most; none when it is over."""
    if not assessment.cells or _settled(assessment):
        return []
    chosen: list[int] = _ends(assessment)[:count]
    unconfirmed = _unconfirmed(assessment)
    if unconfirmed is not None and len(chosen) < count:
        chosen.append(unconfirmed)
    margin = (1 - assessment.settings.confidence) / 10 if assessment.noisy else 0.0
    worth = _Worth(assessment)
    # Not the ends, not what was only skipped, not what has had its runs.
    eligible = [
        point
        for point in bits(assessment.region)
        if 0 < point < assessment.history.last and point not in assessment.skipped and _left(assessment, point) > 0
    ]
    open_points = {point: chance for point in eligible if margin < (chance := assessment.bad(point)) < 1 - margin}
    for turn in range(1, count - len(chosen) + 1):
        aim = turn / (count + 1)
        taken = Counter(chosen)
        values = {
            point: worth(point, chance, aim) * AGAIN ** taken[point]
            for point, chance in open_points.items()
            if _left(assessment, point) > taken[point]
        }
        best = max(values, key=lambda point: (values[point], -point), default=None)
        if best is None:
            break
        chosen.append(best)
    return chosen


def _left(assessment: Assessment, point: int) -> int:
    return assessment.settings.repeat - assessment.tallies.get(point, Tally()).runs


def _ends(assessment: Assessment) -> list[int]:
    """Runs that the ends still need before anything else, with noise."""
    if not assessment.noisy:
        return []
    ends = (0, assessment.history.last)
    most = max((tally.runs for point, tally in assessment.tallies.items() if point not in ends), default=0)
    wanted = min(assessment.settings.repeat, STEADY_ENDS if assessment.steady else max(NOISY_ENDS, most))
    owed = [(wanted - assessment.tallies.get(end, Tally()).runs, end) for end in ends if end not in assessment.skipped]
    return [end for turn in range(wanted) for missing, end in owed if turn < missing]


class _Worth:
    def __init__(self, assessment: Assessment) -> None:
        self.tested = sorted(assessment.tallies)
        self.blocks: dict[int, tuple[int, int, int]] = {}
        """How many points were skipped in each stretch between tested points, the first and the last."""
        for point in sorted(assessment.skipped):
            stretch = bisect_left(self.tested, point)
            count, first, _ = self.blocks.get(stretch, (0, point, point))
            self.blocks[stretch] = (count + 1, first, point)

    def __call__(self, point: int, chance: float, aim: float) -> float:
        bent = chance / (2 * aim) if chance < aim else 1 - (1 - chance) / (2 * (1 - aim))
        return -(bent * math.log2(bent) + (1 - bent) * math.log2(1 - bent)) * (1 - self.skip(point)) if 0 < bent < 1 else 0.0

    def skip(self, point: int) -> float:
        """The chance that this point is skipped, by the skipped ones around it."""
        block = self.blocks.get(bisect_left(self.tested, point))
        if block is None:
            return 0.0
        count, first, last = block
        distance = max(first - point, point - last, 0)
        return count / (count + 1) / (1 + distance / (last - first + 1))


def _unconfirmed(assessment: Assessment) -> int | None:
    """A point that must be run before the most probable suspects are convicted; None when there is none, or it may not be run. On branches
    two bad points can leave a suspect that was never run. If each was broken by its own commit, that suspect is innocent. And one wild run
    of a point sends the whole search to it, so that it ends up on the border."""
    top = assessment.atoms[0]
    if top.weight * top.members.bit_count() < _wanted(assessment):
        return None
    needed: list[int] = []
    if top.members.bit_count() == 1 and not _confirmed(assessment, top):
        needed.append(top.members.bit_length() - 1)
    if assessment.noisy:
        border = [point for point in _border(assessment, top.members) if point is not None]
        needed += [point for point in border if assessment.tallies[point].runs < BORDER_RUNS]
    return next((point for point in needed if point not in assessment.skipped and _left(assessment, point) > 0), None)


def _confirmed(assessment: Assessment, atom: Cell) -> bool:
    """Whether a run was bad of this commit itself or of one with the same contents."""
    points = assessment.history.points
    contents = {points[member].contents for member in bits(atom.members)}
    return any(tally.bads and points[index].contents in contents for index, tally in assessment.tallies.items())


def _wanted(assessment: Assessment) -> float:
    """The probability at which it is over; rounding of sums is allowed for."""
    return (assessment.settings.confidence if assessment.noisy else 1.0) - 1e-9


def _settled(assessment: Assessment) -> bool:
    top = assessment.atoms[0]
    certain = top.weight * top.members.bit_count() >= _wanted(assessment)
    return certain and _unconfirmed(assessment) is None and not _ends(assessment)


def useless(assessment: Assessment, running: Sequence[int]) -> set[int]:
    """Those of the running points whose result can no longer matter."""
    if not assessment.cells or _settled(assessment):
        return set(running)
    margin = (1 - assessment.settings.confidence) / 10 if assessment.noisy else 0.0
    needed = {*_ends(assessment), _unconfirmed(assessment)}
    return {point for point in running if point not in needed and not margin < assessment.bad(point) < 1 - margin}


def answer(assessment: Assessment) -> BisectAnswer:
    history = assessment.history
    flaky = tuple(history.points[index].id for index, tally in assessment.tallies.items() if tally.disagree)
    said = BisectAnswer(state="open", model=assessment.model, flaky=flaky, notes=assessment.notes)
    if not assessment.cells:
        return replace(said, why="the rows contradict each other: no commit explains them")
    atoms: list[Cell] = []
    confidence = 0.0
    for atom in assessment.atoms:
        if confidence < _wanted(assessment):
            atoms.append(atom)
            confidence += atom.weight * atom.members.bit_count()
    suspects = union(atom.members for atom in atoms)
    over = not choose_points(assessment, 1)
    found = over and suspects.bit_count() == 1 and _confirmed(assessment, atoms[0])
    last_good, first_bad = (None if index is None else history.points[index].id for index in _border(assessment, suspects))
    return BisectAnswer(
        state="found" if found else "range" if over else "open",
        suspects=tuple(
            Suspect(point=one.id, repo=one.repo, commit=one.commit, subject=one.subject, probability=min(atom.weight, 1.0))
            for atom in atoms
            for one in (history.points[point] for point in bits(atom.members))
        ),
        confidence=min(confidence, 1.0),
        last_good=last_good,
        first_bad=first_bad,
        why=_why(assessment, atoms) if over and not found else "",
        model=said.model,
        flaky=said.flaky,
        notes=said.notes,
    )


def _border(assessment: Assessment, suspects: int) -> tuple[int | None, int | None]:
    """The newest good point that has no suspect in its past, and the oldest bad one that has all of them."""
    before = assessment.history.ancestors
    goods = [index for index, tally in assessment.tallies.items() if tally.goods and not before[index] & suspects]
    bads = [index for index, tally in assessment.tallies.items() if tally.bads and before[index] & suspects == suspects]
    return (goods[-1] if goods else None), (bads[0] if bads else None)


def _why(assessment: Assessment, atoms: Sequence[Cell]) -> str:
    members = union(atom.members for atom in atoms)
    untested = [point for point in bits(members) if point in assessment.skipped]
    if members.bit_count() == 1:
        return "it is the only commit left, but no run of its own shows that it is bad"
    reasons = []
    if untested:
        reasons.append(f"{len(untested)} of these {members.bit_count()} commits could not be tested")
    if len(atoms) > 1:
        reasons.append(
            f"{assessment.settings.repeat} runs of each commit do not tell them apart" if assessment.noisy else "no run tells them apart"
        )
    return "; ".join(reasons) or "no run tells them apart"
