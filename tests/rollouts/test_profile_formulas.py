"""The statistics of a profile against their definitions, by brute force."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from seatrial.rollouts.results import profile_build
from seatrial.rollouts.results.profile_build import bars, numbers, pass_rates


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_one(n: int) -> None:
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
        assert profile_build.pass_at(n, correct, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_pass_at_more_than_there_are_is_refused() -> None:
    for n, correct, k in ((4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)):
        with pytest.raises(ValueError, match="pass@"):
            profile_build.pass_at(n, correct, k)
    with pytest.raises(ValueError, match="best@3 of 2"):
        profile_build.best_at([0.0, 1.0], 3)


def test_best_at_k_is_the_mean_largest_of_all_draws() -> None:
    rewards = sorted([0.25, -1.0, 3.5, 0.25, 2.0, 0.0])
    for k in range(1, 7):
        draws = [max(draw) for draw in itertools.combinations(rewards, k)]
        assert profile_build.best_at(rewards, k) == pytest.approx(statistics.mean(draws))
    assert profile_build.best_at([0.0, 0.0, 1.0], 2) == pytest.approx(profile_build.pass_at(3, 1, 2))


def test_a_vote_goes_by_answer_and_reward_and_ties_are_averaged() -> None:
    # right once, wrong twice, one without an answer, then right twice more
    answers, rewards = [7, 8, 8, 0, 7, 7], [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert profile_build.majorities(answers, rewards, [1, 2, 3, 4, 5, 6]) == [1.0, 0.5, 0.0, 0.0, 0.5, 1.0]
    assert profile_build.majorities([0, 0], [1.0, 1.0], [1, 2]) == [0.0, 0.0]
    assert profile_build.majorities([7, 7, 7], [1.0, 0.5, 0.5], [3]) == [0.5]
    assert profile_build.majorities([7], [1.0], []) == []


def test_the_spread_of_one_is_unknown() -> None:
    assert profile_build.std([1.0]) is None
    assert profile_build.std([]) is None
    assert profile_build.std([1e9, 1e9 + 1, 1e9 + 2]) == pytest.approx(1.0)


def test_quantiles() -> None:
    assert profile_build.quantile([4.0], 0.95) == 4
    assert profile_build.quantile([1.0, 2.0, 3.0, 10.0], 0.5) == 2.5
    assert profile_build.quantile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert profile_build.quantile([1.0, 2.0, 3.0], 1.0) == 3


def test_wilson() -> None:
    assert profile_build.wilson(5, 10) == pytest.approx((0.236593, 0.763407), abs=1e-6)
    assert profile_build.wilson(0, 7) == pytest.approx((0.0, 0.354330), abs=1e-6)
    assert profile_build.wilson(7, 7) == pytest.approx((0.645670, 1.0), abs=1e-6)
    assert (profile_build.wilson(0, 7)[0], profile_build.wilson(7, 7)[1]) == (0.0, 1.0)


def test_an_interval_over_tasks_is_students() -> None:
    low, high = profile_build.interval([0.0, 1.0]) or (math.nan, math.nan)
    assert (low, high) == pytest.approx((0.5 - 12.7062 * 0.5, 0.5 + 12.7062 * 0.5))
    values = [float(value) for value in range(21)]
    low, high = profile_build.interval(values) or (math.nan, math.nan)
    assert (high - low) / 2 == pytest.approx(2.085963 * statistics.stdev(values) / math.sqrt(21), rel=1e-4)


def test_where_tasks_do_not_differ_no_interval_is_made_up() -> None:
    assert profile_build.interval([1.0, 1.0, 1.0]) is None
    assert profile_build.interval([0.3]) is None
    assert profile_build.interval([]) is None


def test_ks_are_powers_of_two_and_all() -> None:
    assert [profile_build.default_ks(n) for n in (1, 2, 3, 4, 6, 16)] == [
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 4),
        (1, 2, 4, 6),
        (1, 2, 4, 8, 16),
    ]


def test_numbers_are_those_of_the_standard_library() -> None:
    source = random.Random(5)
    values = [source.expovariate(0.01) for _ in range(31)]
    found = numbers([*values, math.nan])
    assert found is not None
    assert (found.n, found.min, found.max) == (31, min(values), max(values))
    assert (found.mean, found.std, found.median, found.total) == pytest.approx(
        (statistics.mean(values), statistics.stdev(values), statistics.median(values), sum(values))
    )
    assert numbers([math.nan, math.nan]) is None
    assert numbers([]) is None
    one = numbers([math.nan, 3.0])
    assert one is not None
    assert (one.n, one.std, one.median) == (1, None, 3.0)
    same = numbers([2.0, 2.0])
    assert same is not None
    assert same.std == 0.0


def test_pass_rates_of_none_and_of_all_have_their_own_bars() -> None:
    found = {bar.label: bar.count for bar in pass_rates([0, 0, 0.05, 0.1, 0.5, 0.95, 1, 1, 1])}
    assert {label: count for label, count in found.items() if count} == {"0": 2, "to 0.1": 2, "to 0.5": 1, "below 1": 1, "1": 3}


def test_few_values_have_a_bar_each_and_many_are_cut_into_steps() -> None:
    assert [(bar.label, bar.count) for bar in bars([0.0, 0.0, 0.5, 1.0])] == [("0", 2), ("0.5", 1), ("1", 1)]
    made = bars([float(value) for value in range(1000)])
    assert sum(bar.count for bar in made) == 1000
    assert (len(made), made[-1].label, made[-1].count) == (21, "above 989", 10)
    assert bars([]) == ()
    mostly = bars(sorted([1.0] * 9999 + [1 + value / 64 for value in range(40)]))
    assert sum(bar.count for bar in mostly) == 10039
