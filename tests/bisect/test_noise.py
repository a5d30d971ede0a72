"""The search with noise: the stated confidence is honest, steady values decide at once, and wild runs convict nobody."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from seatrial.bisect.bisect_records import COPIED, BisectAnswer, BisectRun, History, Mark
from seatrial.bisect.noise_models import MarksModel, MeansModel, Tally, Threshold, measure_scatter, robust_deviation
from seatrial.bisect.posterior import SearchSettings, answer, assess, choose_points
from tests.bisect.bisects import history, run, runs

LIMIT = Threshold(0.5, good_below=True)
SEEDS = 60
Measure = Callable[[int], tuple[Mark, float | None]]


def drive(past: History, settings: SearchSettings, measure: Measure, jobs: int = 1) -> tuple[BisectAnswer, list[BisectRun]]:
    """Run a bisect to its end."""
    rows: list[BisectRun] = []
    todo = [0, past.last]
    while todo:
        for index in todo:
            mark, value = measure(index)
            rows.append(run(past, len(rows) + 1, index, mark, value=value))
        todo = choose_points(assess(past, rows, settings), jobs)
    return answer(assess(past, rows, settings)), rows


def metric(rng: random.Random, level: Callable[[int], float], deviation: float, wild: float = 0.0) -> Measure:
    """Values around a level; some of them wild."""

    def measure(index: int) -> tuple[Mark, float]:
        noise = rng.choice((-1, 1)) * rng.uniform(5, 60) if rng.random() < wild else rng.gauss(0, 1)
        value = level(index) + deviation * noise
        return (Mark.BAD if value >= LIMIT.limit else Mark.GOOD), value

    return measure


def exits(rng: random.Random, first_bad: int, rates: tuple[float, float], last: int) -> Measure:
    """Exit codes that fail at one rate before and at another from the first bad commit on; the ends show first what they are."""
    seen: set[int] = set()

    def measure(index: int) -> tuple[Mark, None]:
        failed = rng.random() < rates[index >= first_bad]
        if index in (0, last) and index not in seen:
            seen.add(index)
            failed = index == last
        return (Mark.BAD if failed else Mark.GOOD), None

    return measure


def holds(found: BisectAnswer, past: History, first_bad: int) -> bool:
    assert found.state in ("found", "range")
    return past.points[first_bad].id in {suspect.point for suspect in found.suspects}


def test_steady_values_cost_no_repeats_but_the_ends() -> None:
    past = history(500)
    found, rows = drive(past, SearchSettings(10, 0.99, LIMIT), lambda index: (Mark.BAD, 0.9) if index >= 321 else (Mark.GOOD, 0.1))
    assert (found.state, found.suspects[0].point) == ("found", past.points[321].id)
    assert len(rows) <= 6 + 9 + 4


@pytest.mark.parametrize("first_bad", [3, 40, 63])
def test_steady_drift_is_held_against_the_limit(first_bad: int) -> None:
    past = history(64)
    found, _ = drive(past, SearchSettings(5, 0.99, LIMIT), metric(random.Random(1), lambda index: 0.5 + (index - first_bad) * 0.01, 0.0))
    assert (found.state, found.suspects[0].point) == ("found", past.points[first_bad].id)


def test_two_steps_find_the_one_over_the_limit() -> None:
    past = history(64)
    levels = metric(random.Random(1), lambda index: 0.0 if index < 20 else 0.4 if index < 45 else 1.0, 0.002)
    found, _ = drive(past, SearchSettings(5, 0.99, LIMIT), levels)
    assert (found.state, found.suspects[0].point) == ("found", past.points[45].id)


def test_a_weak_metric_is_found_in_several_jobs() -> None:
    past = history(60)
    for seed in range(3):
        first_bad = random.Random(f"weak {seed}").randrange(1, 60)
        levels = metric(random.Random(seed), lambda index, bad=first_bad: float(index >= bad), 1 / 1.5)  # type: ignore[misc]
        found, rows = drive(past, SearchSettings(30, 0.99, LIMIT), levels, jobs=3)
        assert holds(found, past, first_bad)
        assert max(sum(row.point == point.id for row in rows) for point in past.points) <= 30


@pytest.mark.parametrize("deviation", [0.0, 0.1])
@pytest.mark.parametrize(("first_bad", "wild"), [(80, 40.0), (20, -40.0)])
def test_one_wild_run_convicts_nobody(deviation: float, first_bad: int, wild: float) -> None:
    past, inner = history(100), iter([wild])
    levels = metric(random.Random(3), lambda index: float(index >= first_bad), deviation)

    def measure(index: int) -> tuple[Mark, float | None]:
        value = next(inner, None) if 0 < index < past.last else None
        return levels(index) if value is None else (Mark.BAD if value >= LIMIT.limit else Mark.GOOD, value)

    found, _ = drive(past, SearchSettings(10, 0.99, LIMIT), measure)
    assert (found.state, found.suspects[0].point) == ("found", past.points[first_bad].id)


def test_flaky_exit_codes() -> None:
    past = history(60)
    for seed in range(3):
        first_bad = random.Random(f"flaky {seed}").randrange(1, 60)
        found, _ = drive(past, SearchSettings(20, 0.99, None), exits(random.Random(seed), first_bad, (0.2, 1.0), 59))
        assert holds(found, past, first_bad)
        assert "Beta-Bernoulli" in found.model


def test_too_few_runs_leave_a_range_not_a_guess() -> None:
    past = history(40)
    levels = metric(random.Random(5), lambda index: float(index >= 20), 2.0)
    found, _ = drive(past, SearchSettings(2, 0.99, LIMIT), levels)
    assert found.state == "range"
    assert holds(found, past, 20)
    assert "2 runs of each commit do not tell them apart" in found.why


def test_a_run_without_a_value_leaves_marks_only() -> None:
    past = history(10)
    rows = (*runs(past, (0, Mark.GOOD, 0.1), (9, Mark.BAD, 0.9)), run(past, 3, 5, Mark.BAD), run(past, 4, 4, Mark.GOOD, value="NaN"))
    state = assess(past, rows, SearchSettings(5, 0.99, LIMIT))
    assert "Beta-Bernoulli" in state.model
    assert "no value" in state.notes[0]


def test_copies_do_not_count_as_runs() -> None:
    past = history(10)
    rows = runs(past, (0, Mark.GOOD), (9, Mark.BAD), (5, Mark.BAD))
    copies = tuple(run(past, 4 + extra, 6, Mark.BAD, notes=(COPIED,)) for extra in range(3))
    settings = SearchSettings(5, 0.99, None)
    assert assess(past, (*rows, *copies), settings).cells == assess(past, rows, settings).cells


def test_more_failures_speak_more_for_bad() -> None:
    odds = [MarksModel({0: Tally(3), 9: Tally(0, 3), 5: Tally(1, bads)}, 0, 9).odds(5) for bads in range(4)]
    assert odds == sorted(odds)
    assert odds[0] < 0 < odds[3]


def test_prepare_orients_scales_and_clips() -> None:
    tallies = {0: Tally(3, 0, (10.0, 10.2, 9.8)), 9: Tally(0, 3, (5.0, 5.2, 4.8)), 4: Tally(0, 1, (-1000.0,))}
    scatter = measure_scatter(tallies, Threshold(7.5, good_below=False), 0, 9)
    assert scatter is not None
    assert scatter.means == pytest.approx((-0.5, 0.5))
    assert 0.5 < scatter.values[4][0] < 1.0
    assert measure_scatter({0: tallies[0]}, LIMIT, 0, 9) is None


def test_robust_deviation_ignores_a_wild_value() -> None:
    rng = random.Random(2)
    groups = [[rng.gauss(0, 1) for _ in range(5)] for _ in range(40)]
    groups[0][0] = 1e6
    assert robust_deviation(groups) == pytest.approx(1.0, abs=0.3)


SWEEP = [(100, 0.9, 30, 1.5, 0.0), (100, 0.9, 10, 10.0, 0.03), (100, 0.9, 5, 1.5, 0.0)]


@pytest.mark.slow
@pytest.mark.parametrize(("points", "confidence", "repeat", "ratio", "wild"), SWEEP)
def test_stated_confidence_of_a_metric_is_honest(points: int, confidence: float, repeat: int, ratio: float, wild: float) -> None:
    past, right = history(points), 0
    for seed in range(SEEDS):
        rng = random.Random(f"sweep {seed}")
        first_bad = rng.randrange(1, points)
        levels = metric(rng, lambda index, bad=first_bad: float(index >= bad), 1 / ratio, wild)  # type: ignore[misc]
        right += holds(drive(past, SearchSettings(repeat, confidence, LIMIT), levels)[0], past, first_bad)
    assert right >= confidence * SEEDS


def flips(rng: random.Random, first_bad: int, share: float) -> Measure:
    """Steady values, of which a share is the other side's."""

    def measure(index: int) -> tuple[Mark, float]:
        bad = (index >= first_bad) is not (rng.random() < share)
        return (Mark.BAD if bad else Mark.GOOD), float(bad) + rng.gauss(0, 0.001)

    return measure


@pytest.mark.slow
def test_stated_confidence_is_honest_where_runs_jump_to_the_other_side() -> None:
    past, found = history(100), []
    for seed in range(150):
        rng = random.Random(f"bimodal0.1{seed}")
        first_bad = rng.randrange(1, 100)
        said, _ = drive(past, SearchSettings(10, 0.99, LIMIT), flips(rng, first_bad, 0.1))
        if said.state == "found":
            found.append(said.suspects[0].point == past.points[first_bad].id)
    assert len(found) > 100
    assert sum(found) >= 0.985 * len(found)


def test_runs_that_jump_are_counted_and_runs_that_scatter_are_measured() -> None:
    past = history(10)
    ends = ((0, Mark.GOOD, 0.0), (0, Mark.GOOD, 0.01), (9, Mark.BAD, 1.0), (9, Mark.BAD, 1.01))
    jumped = assess(past, runs(past, *ends, (9, Mark.GOOD, 0.0)), SearchSettings(5, 0.99, LIMIT))
    assert "Beta-Bernoulli" in jumped.model
    assert "jump" in jumped.notes[0]
    wide = ((0, Mark.GOOD, -0.4), (0, Mark.GOOD, 0.4), (0, Mark.BAD, 0.6), (9, Mark.BAD, 0.6), (9, Mark.BAD, 1.4))
    assert "step" in assess(past, runs(past, *wide), SearchSettings(5, 0.99, LIMIT)).model


def test_a_bad_end_with_mostly_good_runs_does_not_clear_what_is_before_it() -> None:
    past = history(10)
    seen = {0: (-0.3, 0.2, 0.1, -0.1, 0.3), 5: (0.9, 1.3, 1.1, 0.8, 1.0), 8: (0.9, 1.2, 1.1, 0.7, 1.0), 9: (0.1, 0.3, 0.2, 0.0, 0.4, 0.55)}
    rows = [(index, Mark.BAD if value >= LIMIT.limit else Mark.GOOD, value) for index, values in seen.items() for value in values]
    state = assess(past, runs(past, *rows), SearchSettings(10, 0.99, LIMIT))
    assert state.bad(8) > 0.99
    assert not any("came and went" in note for note in state.notes)


@pytest.mark.parametrize(("inclusive", "below", "mark"), [(True, True, Mark.GOOD), (False, True, Mark.BAD), (False, False, Mark.BAD)])
def test_a_value_on_the_limit_is_what_the_check_says(inclusive: bool, below: bool, mark: Mark) -> None:
    limit = Threshold(0.0, below, inclusive)
    assert limit.passes(0.0) is (mark is Mark.GOOD)
    away = 1.0 if below else -1.0
    tallies = {0: Tally(1, 0, (-away,)), 5: Tally(mark is Mark.GOOD, mark is Mark.BAD, (0.0,)), 9: Tally(0, 1, (away,))}
    scatter = measure_scatter(tallies, limit, 0, 9)
    assert scatter is not None
    assert (MeansModel(scatter).odds(5) > 0) is (mark is Mark.BAD)


@pytest.mark.slow
@pytest.mark.parametrize("rates", [(0.0, 1.0), (0.2, 0.8), (0.0, 0.5)])
def test_stated_confidence_of_exit_codes_is_honest(rates: tuple[float, float]) -> None:
    past, right = history(100), 0
    for seed in range(SEEDS):
        rng = random.Random(f"sweep {seed}")
        first_bad = rng.randrange(1, 100)
        right += holds(drive(past, SearchSettings(30, 0.9, None), exits(rng, first_bad, rates, 99))[0], past, first_bad)
    assert right >= 0.9 * SEEDS
