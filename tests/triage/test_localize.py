"""Where generator and trainer disagree: sums, percentiles, what the error follows, and what makes the evidence worthless."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.core.records import Association, Localization
from seatrial.core.series import Metrics, Series, TokenRow
from seatrial.triage import token_errors
from seatrial.triage.token_errors import Histogram, collect
from seatrial.triage.token_mismatch import localize
from tests.triage.token_rows import PROMPT, Off, row, rows

METRIC = "train/token_mult_prob_error"


def found(given: list[TokenRow], metrics: Metrics | None = None) -> Localization:
    return localize(given, metrics or Metrics(), "trial", 0, "smoke")


def logged(*values: float, tag: str = METRIC) -> Metrics:
    return Metrics(series={tag: Series(tag, tuple(range(1, len(values) + 1)), values)})


def followed(result: Localization) -> set[str]:
    return {item.name for item in result.associations if item.follows}


def test_the_error_of_a_step_is_what_the_trainer_computes() -> None:
    # Measured with NeMo-RL's own loss: one of eight tokens off by 0.5 gives 1.08109.
    result = found([row([0.5, 0, 0, 0]), row([0, 0, 0, 0], 1)], logged(1.08109))
    (step,) = result.steps
    assert step.error == pytest.approx(1.08109, abs=1e-5)
    assert (step.agrees, step.batches, step.tokens) == (True, 1, 8)
    assert (result.sequences, result.tokens, result.prompts) == (2, 8, 1)
    assert result.worst[0].source == "train_data_step1.jsonl:1"
    assert (result.worst[0].position, result.worst[0].position_error) == (PROMPT, 0.5)
    assert result.sequences_above == 0.5
    assert result.above == {"0.05": 1 / 8, "0.5": 0.0}


def test_a_step_in_several_batches_logs_the_mean_over_them() -> None:
    short, long = row([1.0, 0.0], 0), row([0.0] * 6, 1)
    mean_of_batches = ((math.e + 1) / 2 + 1) / 2
    (step,) = found([short, long], logged(mean_of_batches)).steps
    assert (step.agrees, step.batches) == (True, 2)
    assert step.error == pytest.approx((math.e + 7) / 8)


def test_a_metric_of_another_run_is_said() -> None:
    result = found([row([0.5, 0, 0, 0])], logged(1.3))
    assert result.steps[0].agrees is False
    assert result.conclusion[0].startswith("the evidence does not belong together: in 1 of 1 steps")
    assert "no metric was at hand to hold the tokens against" in found([row([0.5])]).conclusion


def test_runs_have_metrics_of_their_own() -> None:
    metrics = Metrics(series={f"{run}/{METRIC}": Series(METRIC, (1,), (value,)) for run, value in (("full", 1.0), ("delta", math.e))})
    result = found([row([0.0], run="full"), row([1.0], run="delta")], metrics)
    assert [(step.run, step.agrees) for step in result.steps] == [("delta", True), ("full", True)]
    assert [step.agrees for step in found([row([0.0], run="full"), row([1.0], run="delta")], logged(1.0)).steps] == [None, None]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_is_named_and_never_dropped(bad: float) -> None:
    result = found([row([0.0] * 4), row([0.0, bad, 0.0], 1)], logged(math.nan))
    assert result.non_finite.in_loss == 1
    assert result.non_finite.places[0].startswith(f"train_data_step1.jsonl:2, position {PROMPT + 1}: generator -1.0, trainer ")
    assert (result.steps[0].error, result.steps[0].non_finite, result.steps[0].agrees) == ("Infinity", 1, True)
    assert (result.percentiles["50"], result.percentiles["max"]) == (0.0, "Infinity")
    assert result.worst[0].error == "Infinity"
    assert result.conclusion[0].startswith("1 tokens of the loss are not finite")
    assert result.histogram[-1].label == "not finite"
    assert found([row([0.0, bad, 0.0])], logged(1.0)).steps[0].agrees is False


def test_both_sides_at_minus_infinity_do_not_agree() -> None:
    given = row([0.0, 0.0])
    spoilt = (*given.generation[:-1], -math.inf)
    same = TokenRow("f:1", "run", 1, 0, "p", spoilt, spoilt, given.mask, length=5)
    assert found([same]).non_finite.in_loss == 1


def test_values_outside_the_loss_are_counted_apart() -> None:
    given = row([0.0, 0.1, 0.0], mask=(False,) * 3 + (True, True, False), training=(0.0, math.nan, 0.0, -1.0, -1.1, math.nan))
    result = found([given])
    assert (result.non_finite.in_loss, result.non_finite.outside) == (0, 2)
    assert "2 tokens outside the loss are not finite: they alone can make the loop's metric NaN" in result.conclusion
    generator = (0.0, math.nan, math.nan, -1.0, -1.0, -1.0)  # of the prompt: nobody asks a generator for those
    assert found([row([0.1] * 3, generation=generator)]).non_finite.outside == 0


def test_the_first_token_of_all_is_not_looked_at() -> None:
    given = row([0.1], generation=(-5.0, 0.0, 0.0, -1.0), mask=(True, False, False, True))
    assert found([given]).tokens == 1


def test_masking_does_not_hide_an_outlier() -> None:
    result = found([row([0.0] * 4), row([2.0] * 4, 1, masked_out=True)], logged(1.0))
    (step,) = result.steps
    assert (step.error, step.agrees, step.tokens) == (1.0, True, 4)
    assert step.with_masked_out == pytest.approx((1 + math.exp(2)) / 2)
    assert result.masked_out == 1
    assert "in 1 of 1 steps only the masking of sequences keeps the error at or below 1.05" in result.conclusion
    assert result.worst[0].masked_out


def test_a_step_with_nothing_in_the_loss_is_zero_as_the_loop_has_it() -> None:
    (step,) = found([row([0.1] * 4, masked_out=True)], logged(0.0)).steps
    assert (step.error, step.tokens, step.agrees) == (0.0, 0, True)


def test_what_the_tokens_do_not_show_is_said() -> None:
    result = found([row([0.0, 0.0]), row([0.0], 1)], logged(1.0, 1.4, 1.5))
    assert result.conclusion[0] == "step 2 of run and 1 more logged a metric and no tokens: nothing here is about them"
    masked = found([row([0.0, 0.0], masked_out=True)], logged(0.0)).conclusion
    assert masked[0] == "in 1 of 1 steps every sequence was taken out of the loss: nothing was trained on"
    empty = row([0.0], 1, mask=(False,) * (PROMPT + 1))
    assert found([row([0.0]), empty], logged(1.0)).conclusion[0] == "1 of 2 sequences have no token in the loss"


def test_one_sequence_that_is_off_is_not_called_even() -> None:
    last = found(rows(lambda chance, number, _: 3.0 if number == 5 else chance.gauss(0, 0.001))).conclusion[-1]
    assert last.startswith("1 of 16 sequences hold most of the error, and share nothing that could be tested (")


def test_no_mismatch_is_said() -> None:
    result = found(rows(lambda chance, _, __: chance.gauss(0, 0.005)))
    assert result.conclusion[-1] == "no mismatch in these tokens: every step and every sequence has an error of at most 1.05"


def test_a_large_error_that_is_finite_is_infinite_where_it_overflows() -> None:
    result = found([row([0.0, 9999.0])], logged(math.inf))
    assert (result.steps[0].error, result.steps[0].agrees, result.non_finite.in_loss) == ("Infinity", True, 0)
    assert result.percentiles["max"] == 9999.0


FOLLOWS: dict[str, tuple[Off, str, str]] = {
    "position": (lambda chance, _, along: chance.gauss(0, 0.01 + along), "position", "KV cache, rope, position ids"),
    "start": (lambda chance, _, along: chance.gauss(0, 1.5 if along < 0.2 else 0.01), "first 16 tokens", "prefill"),
    "prompt": (lambda chance, number, _: chance.gauss(0, 1 if number // 4 == 2 else 0.01), "prompt", "concentrated in 1 of 4 prompts"),
    "step": (lambda chance, number, _: chance.gauss(0, 0.5 if number >= 8 else 0.01), "step", "do not reach the generator"),
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_what_the_error_follows(name: str) -> None:
    off, question, words = FOLLOWS[name]
    result = found(rows(off))
    assert question in followed(result)
    assert any(words in line and ("it points to" in line) for line in result.conclusion)
    assert result == found(rows(off))  # the same rows give the same answer


def test_a_step_is_not_taken_for_its_prompts() -> None:
    assert "prompt" not in followed(found(rows(FOLLOWS["step"][0])))


def test_length_truncation_masking_and_settings() -> None:
    given: list[TokenRow] = []
    for number in range(24):
        bad = number % 2 == 0
        error = 0.4 + 0.01 * number if bad else 0.01
        settings = (("temperature", "0.7" if bad else "1.0"), ("top_p", "1.0"))
        given.append(row([error] * (60 if bad else 20), number, truncated=bad, masked_out=bad, settings=settings, prompt=str(number % 6)))
    result = found(given)
    assert {"response length", "truncated", "masked out", "temperature"} <= followed(result)
    answers = {item.name: item for item in result.associations}
    assert answers["truncated"].value == 1.0
    assert "sequences taken out of the loss have the larger error" in answers["masked out"].sentence
    assert "(0.7, 1.0)" in answers["temperature"].sentence
    assert answers["top_p"].p is None
    assert "all sequences have 1.0" in answers["top_p"].sentence


def test_an_even_error_points_to_weights_or_precision() -> None:
    result = found(rows(lambda chance, _, __: chance.gauss(0, 0.4)))
    assert followed(result) == set()
    assert result.conclusion[-1].endswith("spread evenly, it points to the weights or to precision")


def test_too_few_rows_are_said() -> None:
    result = found(rows(lambda *_: 0.5, count=7))
    assert result.associations == ()
    assert result.conclusion[-1] == "7 sequences are too few to say what the error follows: at least 8 are needed"
    answers = {item.name: item for item in found([row([0.5] * 4, number, prompt="p") for number in range(9)]).associations}
    assert answers["prompt"].sentence.endswith("cannot be told: there is only one")
    assert answers["position"].p is None
    assert answers["first 16 tokens"].p is None
    assert "the loop does not say which are" in answers["truncated"].sentence
    assert answers["step"].sentence.endswith("there is only one")


def test_a_near_miss_is_not_called_even() -> None:
    result = found(rows(lambda chance, number, _: chance.gauss(0, 0.35 if number >= 8 else 0.3), seed=3))
    assert followed(result) == set()
    assert "evenly" not in result.conclusion[-1]
    assert "the nearest is step (p = 0.0" in result.conclusion[-1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([row([], mask=(False,) * 3)], "none of 1 sequences has a token in the loss"),
        ([row([0.0], training=(0.0,) * 4)], "log-probabilities are all 0"),
        ([row([0.0], training=(0.0,) * 3)], "4, 3 and 4 values for the tokens of one sequence"),
    ],
)
def test_rows_that_hold_nothing_to_compare(given: list[TokenRow], message: str) -> None:
    with pytest.raises(UserError, match=message):
        found(given)


def test_percentiles_are_near_enough_and_bounded() -> None:
    histogram = Histogram()
    for place in range(1, 1001):
        histogram.add(place / 1000)
    assert [histogram.percentile(share) for share in (0.5, 0.9, 0.99)] == pytest.approx([0.5, 0.9, 0.99], rel=0.012)
    assert histogram.percentile(1.0) == 1.0
    histogram.add(0.0)
    histogram.add(1e9)
    assert histogram.percentile(0.0005) == 0.0
    assert sum(count for _, count in histogram.bars()) == 1002
    histogram.add(math.inf)
    assert histogram.percentile(1.0) == math.inf


def test_nothing_but_a_few_numbers_is_kept_of_a_sequence() -> None:
    collected = collect(rows(lambda *_: 0.1, count=4, tokens=300))
    sequence = collected.sequences[0]
    kept = [getattr(sequence, name) for name in sequence.__slots__]
    assert all(value is None or isinstance(value, str | int | float) or value == () for value in kept)
    assert sum(collected.positions.counts.values()) == collected.tokens()
    assert sum(collected.parts.counts.values()) == collected.tokens()


def test_ranks_and_their_tests() -> None:
    assert token_errors.ranks([3.0, 1.0, 3.0, math.inf]) == [2.5, 1.0, 2.5, 4.0]
    rho, p = token_errors.spearman(range(10), [value**3 for value in range(10)])
    assert [rho, p] == pytest.approx([1.0, 1 / 2000])
    assert token_errors.spearman([1.0, 2.0], [5.0, 5.0]) == (None, None)
    assert token_errors.exceeds([3.0, 4.0], [1.0, 2.0]) == 1.0
    assert token_errors.exceeds([1.0, 2.0], [1.0, 2.0]) == 0.5
    assert token_errors.signs([0.0, 0.0]) is None
    assert (token_errors.signs([1.0] * 12) or 1) < 0.01
    assert (token_errors.signs([1.0, -1.0] * 6) or 0) > 0.5
    assert token_errors.between_groups([0, 0, 0], [1.0, 2.0, 3.0]) == (None, None)
    share, p = token_errors.between_groups([0, 0, 0, 1, 1, 1], [1.0, 1.1, 0.9, 5.0, 5.1, 4.9])
    assert share == pytest.approx(1.0, abs=0.01)
    assert p == pytest.approx(2 / 20, abs=0.02)  # two of the twenty ways to choose three of six


@pytest.mark.parametrize(("value", "freedom", "p"), [(3.841, 1, 0.05), (18.307, 10, 0.05), (37.566, 20, 0.01)])
def test_the_tail_for_many_values(value: float, freedom: int, p: float) -> None:
    assert token_errors._chi_square_p(value, freedom) == pytest.approx(p, rel=0.06)


def test_many_values_are_tested_without_permutations() -> None:
    chance = random.Random(2)
    one = [chance.random() for _ in range(1000)]
    rho, p = token_errors.spearman(one, [value + chance.random() for value in one])
    assert (rho or 0) > 0.5
    assert (p or 1) < 1e-6
    assert (token_errors.spearman(one, [chance.random() for _ in one])[1] or 0) > 0.001
    groups = [number % 5 for number in range(1000)]
    assert (token_errors.between_groups(groups, one)[1] or 0) > 0.001
    assert (token_errors.between_groups(groups, [value + group for value, group in zip(one, groups, strict=True)])[1] or 0) < 1e-6
    assert (token_errors.signs([value - 0.5 for value in one]) or 0) > 0.001


def test_chance_is_rarely_taken_for_an_answer() -> None:
    noise: Any = lambda chance, _, __: chance.gauss(0, 0.4)  # noqa: E731
    answers: list[Association] = [item for seed in range(12) for item in found(rows(noise, tokens=20, seed=seed)).associations]
    assert sum(item.follows for item in answers) <= 1
