"""The search on simulated histories without noise: the smallest range, few runs, and no innocent commit blamed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from seatrial.bisect.bisect_records import COPIED, BisectAnswer, BisectRun, History, Mark
from seatrial.bisect.posterior import SearchSettings, answer, assess, bits, choose_points, known_by_contents, rounds_needed, useless
from tests.bisect.bisects import history, run, runs

EXACT = SearchSettings(repeat=1, confidence=0.99, metric=None)
POINTS = 500


def forked(parents: Sequence[tuple[int, ...]]) -> History:
    """Points with these parents."""
    past = history(len(parents))
    return History(tuple(point.model_copy(update={"parents": before}) for point, before in zip(past.points, parents, strict=True)))


def drive(past: History, mark: Callable[[int], Mark], jobs: int = 1) -> tuple[BisectAnswer, list[BisectRun], int]:
    """Run a bisect to its end: the answer, all rows, and the rounds after the ends."""
    rows: list[BisectRun] = []
    rounds, todo = -1, [0, past.last]
    while todo:
        rounds += 1
        rows += [run(past, len(rows) + place, index, mark(index)) for place, index in enumerate(todo, start=1)]
        todo = choose_points(assess(past, rows, EXACT), jobs)
    return answer(assess(past, rows, EXACT)), rows, rounds


def untestable(rng: random.Random, blocks: bool) -> set[int]:
    """12 % of the points but the ends, scattered or in blocks."""
    found: set[int] = set()
    while len(found) < 0.12 * POINTS:
        start = rng.randrange(1, POINTS - 1)
        found |= set(range(start, min(start + (rng.choice((5, 20, 60)) if blocks else 1), POINTS - 1)))
    return found


def check_seed(seed: int, blocks: bool) -> None:
    rng, past = random.Random(seed), history(POINTS)
    first_bad, holes = rng.randrange(1, POINTS), untestable(rng, blocks)
    found, rows, _ = drive(past, lambda index: Mark.SKIP if index in holes else Mark.BAD if index >= first_bad else Mark.GOOD)
    low = max(index for index in range(first_bad) if index not in holes)
    high = min(index for index in range(first_bad, POINTS) if index not in holes)
    assert {suspect.point for suspect in found.suspects} == {past.points[index].id for index in range(low + 1, high + 1)}
    assert found.state == ("found" if high - low == 1 else "range")
    assert (found.last_good, found.first_bad) == (past.points[low].id, past.points[high].id)
    assert sum(row.mark is not Mark.SKIP for row in rows) - 2 <= math.ceil(math.log2(POINTS)) + 3


@pytest.mark.parametrize("blocks", [False, True])
def test_smallest_range_with_untestable_points(blocks: bool) -> None:
    for seed in range(5):
        check_seed(seed, blocks)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_smallest_range_for_more_seeds(blocks: bool) -> None:
    for seed in range(5, 100):
        check_seed(seed, blocks)


def test_a_broken_period_in_the_middle_is_left_in_jumps() -> None:
    past = history(POINTS)
    _, rows, _ = drive(past, lambda index: Mark.SKIP if 220 <= index < 280 else Mark.BAD if index >= 400 else Mark.GOOD)
    assert sum(row.mark is Mark.SKIP for row in rows) <= 4


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_rounds_are_as_announced(jobs: int) -> None:
    past = history(200)
    for first_bad in (1, 57, 100, 199):
        found, _, rounds = drive(past, lambda index, bad=first_bad: Mark.BAD if index >= bad else Mark.GOOD, jobs)  # type: ignore[misc]
        assert (found.state, found.suspects[0].point, found.confidence) == ("found", past.points[first_bad].id, 1.0)
        assert rounds <= rounds_needed(199, jobs, noisy=False) + 1


def test_rounds_needed() -> None:
    assert [rounds_needed(n, k, noisy=False) for n, k in ((1, 1), (2, 1), (500, 1), (500, 2), (9, 2), (10, 2))] == [0, 1, 9, 6, 2, 3]
    assert rounds_needed(500, 1, noisy=True) == 10


def test_came_and_went_searches_the_newest_change() -> None:
    past = history(100)
    state = assess(past, runs(past, (0, Mark.GOOD), (99, Mark.BAD), (30, Mark.BAD), (60, Mark.GOOD)), EXACT)
    assert bits(state.suspects) == list(range(61, 100))
    assert "came and went" in state.notes[0]
    assert past.points[30].commit[:12] in state.notes[0]


def test_a_merged_branch_is_searched() -> None:
    # 0 - 1 - 2 - 3 ------- 7(merge) - 8;  1 - 4 - 5 - 6 - 7
    past = forked([(), (0,), (1,), (2,), (1,), (4,), (5,), (3, 6), (7,)])
    for culprit in range(1, 9):
        found, _, _ = drive(past, lambda index, c=culprit: Mark.BAD if past.ancestors[index] >> c & 1 else Mark.GOOD)  # type: ignore[misc]
        assert (found.state, found.suspects[0].point) == ("found", past.points[culprit].id)


def test_a_suspect_that_was_never_run_is_run_before_it_is_blamed() -> None:
    # Both branches are broken by commits of their own; what they share is innocent.
    past = forked([(), (0,), (1,), (1,), (2, 3), (4,)])
    rows = runs(past, (0, Mark.GOOD), (5, Mark.BAD), (2, Mark.BAD), (3, Mark.BAD))
    state = assess(past, rows, EXACT)
    assert (bits(state.suspects), answer(state).state, choose_points(state, 1)) == ([1], "open", [1])
    state = assess(past, (*rows, run(past, 5, 1, Mark.GOOD)), EXACT)
    assert (answer(state).state, bits(state.suspects)) == ("found", [3])
    assert "another branch" in state.notes[0]


def test_disagreeing_runs_say_nothing_without_repeat() -> None:
    past = history(10)
    state = assess(past, runs(past, (0, Mark.GOOD), (9, Mark.BAD), (5, Mark.BAD), (5, Mark.GOOD)), EXACT)
    assert bits(state.suspects) == list(range(1, 10))
    assert answer(state).flaky == (past.points[5].id,)


def test_a_bad_end_that_is_good_leaves_no_suspect() -> None:
    past = history(10)
    state = assess(past, runs(past, (0, Mark.GOOD), (9, Mark.GOOD)), EXACT)
    assert (answer(state).state, answer(state).suspects, choose_points(state, 3)) == ("open", (), [])
    assert "contradict" in answer(state).why


def test_a_skip_with_a_later_run_counts_as_tested() -> None:
    past = history(3)
    found = answer(assess(past, runs(past, (0, Mark.GOOD), (2, Mark.BAD), (1, Mark.SKIP), (1, Mark.GOOD)), EXACT))
    assert (found.state, found.suspects[0].point) == ("found", past.points[2].id)


def test_what_a_skip_leaves_is_a_range() -> None:
    past = history(3)
    found = answer(assess(past, runs(past, (0, Mark.GOOD), (2, Mark.BAD), (1, Mark.SKIP)), EXACT))
    assert (found.state, len(found.suspects), found.confidence) == ("range", 2, 1.0)
    assert "1 of these 2 commits could not be tested" in found.why


def test_equal_contents_are_copied_once() -> None:
    past = history(6)
    past = History(tuple(point.model_copy(update={"contents": "same"}) if i in (2, 3) else point for i, point in enumerate(past.points)))
    rows = runs(past, (0, Mark.GOOD), (5, Mark.BAD), (2, Mark.GOOD))
    copies = known_by_contents(past, rows)
    assert [(copy.number, copy.point, copy.mark, copy.directory, copy.notes) for copy in copies] == [
        (4, past.points[3].id, Mark.GOOD, "", (COPIED,))
    ]
    assert known_by_contents(past, (*rows, *copies)) == []


def test_useless_names_what_cannot_matter_any_more() -> None:
    past = history(100)
    state = assess(past, runs(past, (0, Mark.GOOD), (99, Mark.BAD), (50, Mark.BAD)), EXACT)
    assert useless(state, [25, 50, 75]) == {50, 75}
