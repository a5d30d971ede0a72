"""token_mult_prob_error: its value, its distribution, and that nothing is left out of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from seatrial.instruments.refit.agreement import Mismatch, token_mult_prob_error


def compare(*gaps: Sequence[float]) -> Mismatch:
    """Sequences with these differences, in both directions."""
    generator = [[-1.0 - gap if index % 2 else -1.0 for index, gap in enumerate(row)] for row in gaps]
    policy = [[-1.0 if index % 2 else -1.0 - gap for index, gap in enumerate(row)] for row in gaps]
    return token_mult_prob_error(generator, policy)


def test_equal_log_probabilities_give_one() -> None:
    found = compare([0.0] * 5, [0.0])
    assert found == Mismatch(1.0, 6, 2, 1.0, 1.0, 1.0, 1.0, 0.0, 0, 0.0)


def test_value_is_the_mean_over_tokens_and_not_over_sequences() -> None:
    found = compare([math.log(2)], [0.0, 0.0, 0.0])
    assert found.value == pytest.approx(1.25)
    assert (found.tokens, found.sequences) == (4, 2)
    assert found.max_sequence == pytest.approx(2.0)
    assert found.max_abs == pytest.approx(math.log(2))


def test_one_sequence_that_is_far_off_is_seen_although_the_mean_is_fine() -> None:
    found = compare(*[[0.0] * 10] * 99, [math.log(3)] * 10)
    assert found.value < 1.05
    assert (found.p50, found.p90, found.p99) == (1.0, 1.0, 1.0)
    assert found.max_sequence == pytest.approx(3.0)
    assert found.outlier_share == pytest.approx(0.01)


def test_percentiles_are_values_that_occurred() -> None:
    found = compare(*[[math.log(1.005 + index / 100)] for index in range(100)])
    assert [found.p50, found.p90, found.p99, found.max_sequence] == pytest.approx([1.495, 1.895, 1.985, 1.995])
    assert found.outlier_share == pytest.approx(0.95)


def test_the_bound_of_an_outlier_is_an_argument() -> None:
    assert token_mult_prob_error([[0.0], [0.0]], [[0.2], [0.0]], outlier=1.5).outlier_share == 0.0
    assert token_mult_prob_error([[0.0], [0.0]], [[0.2], [0.0]]).outlier_share == 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_the_value_nan_and_is_counted(bad: float) -> None:
    found = token_mult_prob_error([[-1.0, bad], [-1.0]], [[-1.0, -1.0], [-1.0]])
    assert found.nonfinite == 1
    assert all(math.isnan(value) for value in (found.value, found.p50, found.p99, found.max_sequence, found.max_abs))
    assert found.outlier_share == 0.5, "a sequence without a mean is an outlier"


def test_infinities_that_cancel_are_not_equal() -> None:
    found = token_mult_prob_error([[-math.inf]], [[-math.inf]])
    assert found.nonfinite == 1
    assert math.isnan(found.value)


def test_a_huge_difference_is_infinite_and_no_error() -> None:
    found = token_mult_prob_error([[0.0]], [[-1000.0]])
    assert (found.value, found.nonfinite, found.max_abs, found.outlier_share) == (math.inf, 0, 1000.0, 1.0)


@pytest.mark.parametrize("empty", [[], [[]], [[], []]])
def test_without_tokens_there_is_no_value(empty: list[list[float]]) -> None:
    found = token_mult_prob_error(empty, empty)
    assert (found.tokens, found.sequences) == (0, len(empty))
    assert math.isnan(found.value)
    assert math.isnan(found.outlier_share)
    assert not found.value < 1.05, "nothing was compared, so nothing passes"


def test_an_empty_sequence_beside_others_takes_no_part() -> None:
    found = token_mult_prob_error([[], [0.0]], [[], [0.0]])
    assert (found.value, found.sequences, found.outlier_share) == (1.0, 2, 0.0)


def test_other_lengths_are_an_error_that_names_the_sequence() -> None:
    with pytest.raises(ValueError, match="sequence 1 has 2 tokens at the generator and 1 at the policy"):
        token_mult_prob_error([[0.0], [0.0, 0.0]], [[0.0], [0.0]])
    with pytest.raises(ValueError, match="1 sequences of the generator, 2 of the policy"):
        token_mult_prob_error([[0.0]], [[0.0], [0.0]])
