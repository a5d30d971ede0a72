"""Which points to run next, and what the answer is; pure functions of the rows (see assess.py for what rows say).

- A run of point x is worth what it is expected to tell: H(P(x is bad)) · (1 - P(x is skipped)), H the entropy of a coin in bits. For k
  runs at once the j-th aims at P = j / (k + 1): there H is taken of P bent so that the aim becomes 1/2.
- Skips come in blocks, or scattered. Where k points between two tested ones were skipped, over an extent of e, a point between them is
  skipped with k / (k + 1), and one at distance d beside them with that times 1 / (1 + d / e). So the search leaves a broken period in
  growing jumps, and the more skips it has seen the longer it stays away; two skips alone do not make a broken period.
- With noise the ends are run again first: they are known to be good and bad, so they show how much runs scatter.
- `found` needs the confidence, and a bad run of the commit itself. It is a `range` when nothing is left that would tell more.
- No run is chosen that cannot change the answer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from seatrial.regress.bisect.record import Answer, History, Mark, Run, Suspect
from seatrial.regress.bisect.search.assess import COPIED, Assessment, Cell, Settings, assess, bits, union
from seatrial.regress.bisect.search.noise import Tally, Threshold

__all__ = ["Assessment", "Settings", "Threshold", "answer", "assess", "choose", "known_by_contents", "rounds_needed", "useless"]

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


def known_by_contents(history: History, rows: Sequence[Run]) -> list[Run]:
    """Rows for the points that were not run but have the same contents as one that was: its last good or bad row."""
    source: dict[str, Run] = {}
    have: set[str] = set()
    for row in rows:
        index = history.by_id.get(row.point)
        if index is not None and row.mark != Mark.SKIP:
            have.add(row.point)
            source[history.points[index].contents] = row
    number = max((row.number for row in rows), default=0)
    found: list[Run] = []
    for point in history.points:
        if point.contents not in source or point.id in have:
            continue
        row, number = source[point.contents], number + 1
        told = {"reason": f"the same files as {row.commit[:12]}", "notes": (COPIED,), "seconds": 0.0, "directory": "", "built": False}
        found.append(row.model_copy(update={"number": number, "point": point.id, "commit": point.commit, **told}))
    return found


def choose(assessment: Assessment, count: int) -> list[int]:
    """Up to `count` points to run now, the same one more than once where noise makes that worth most; none when it is over."""
    if not assessment.cells or _settled(assessment):
        return []
    chosen: list[int] = _ends(assessment)[:count]
    unconfirmed = _unconfirmed(assessment)
    if unconfirmed is not None and len(chosen) < count:
        chosen.append(unconfirmed)
    margin = (1 - assessment.settings.confidence) / 10 if assessment.noisy else 0.0
    worth = _Worth(assessment)
    open_points = {point: chance for point in _eligible(assessment) if margin < (chance := assessment.bad(point)) < 1 - margin}
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
    """Runs that a point may still have."""
    return assessment.settings.repeat - assessment.tallies.get(point, Tally()).runs


def _eligible(assessment: Assessment) -> list[int]:
    """Points that may be run: not the ends, not what was only skipped, not what has had its runs."""
    return [
        point
        for point in bits(assessment.region)
        if 0 < point < assessment.history.last and point not in assessment.skipped and _left(assessment, point) > 0
    ]


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
    """The expected information of one run."""

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
    """A point that must be run before the most probable suspects are convicted; None when there is none, or it may not be run.

    On branches two bad points can leave a suspect that was never run. If each was broken by its own commit, that suspect is innocent.
    And one wild run of a point sends the whole search to it, so that it ends up on the border.
    """
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
    """Whether no further run is needed."""
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


def answer(assessment: Assessment) -> Answer:
    """What the rows say so far."""
    history = assessment.history
    flaky = tuple(history.points[index].id for index, tally in assessment.tallies.items() if tally.disagree)
    said = Answer(state="open", model=assessment.model, flaky=flaky, notes=assessment.notes)
    if not assessment.cells:
        return said.model_copy(update={"why": "the rows contradict each other: no commit explains them"})
    atoms: list[Cell] = []
    confidence = 0.0
    for atom in assessment.atoms:
        if confidence < _wanted(assessment):
            atoms.append(atom)
            confidence += atom.weight * atom.members.bit_count()
    suspects = union(atom.members for atom in atoms)
    over = not choose(assessment, 1)
    found = over and suspects.bit_count() == 1 and _confirmed(assessment, atoms[0])
    last_good, first_bad = (None if index is None else history.points[index].id for index in _border(assessment, suspects))
    return Answer(
        state="found" if found else "range" if over else "open",
        suspects=tuple(_suspect(history, point, atom.weight) for atom in atoms for point in bits(atom.members)),
        confidence=min(confidence, 1.0),
        last_good=last_good,
        first_bad=first_bad,
        why=_why(assessment, atoms) if over and not found else "",
        model=said.model,
        flaky=said.flaky,
        notes=said.notes,
    )


def _suspect(history: History, point: int, probability: float) -> Suspect:
    one = history.points[point]
    return Suspect(point=one.id, repo=one.repo, commit=one.commit, subject=one.subject, probability=min(probability, 1.0))


def _border(assessment: Assessment, suspects: int) -> tuple[int | None, int | None]:
    """The newest good point that has no suspect in its past, and the oldest bad one that has all of them."""
    before = assessment.history.ancestors
    goods = [index for index, tally in assessment.tallies.items() if tally.goods and not before[index] & suspects]
    bads = [index for index, tally in assessment.tallies.items() if tally.bads and before[index] & suspects == suspects]
    return (goods[-1] if goods else None), (bads[0] if bads else None)


def _why(assessment: Assessment, atoms: Sequence[Cell]) -> str:
    """Why it is only a range."""
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
