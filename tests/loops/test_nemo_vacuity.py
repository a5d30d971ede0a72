"""Runs that could not have shown anything, and metrics that do not show what a Pass claims."""

from __future__ import annotations

import pytest

from seatrial.core.series import Metrics, Series
from seatrial.core.verdict import Boundary
from seatrial.loops.nemo_rl.nemo_metrics import training_runs, unseen, vacuous

Points = dict[str, tuple[float, ...]]

GRPO: Points = {
    "train/loss": (0.1, 0.2),
    "train/reward": (0.5, 0.25),
    "train/grad_norm": (0.3, 0.0),
    "train/lr": (1e-6, 1e-6),
    "train/advantages/max": (1.5, 0.0),
    "train/advantages/min": (-1.5, 0.0),
    "train/token_mult_prob_error": (1.01, 1.02),
    "train/global_valid_toks": (100.0, 90.0),
    "timing/train/total_step_time": (3.0, 3.0),
}
SFT: Points = {"train/loss": (2.0, 1.9), "train/grad_norm": (1.0, 1.0), "train/lr": (1e-6, 1e-6), "train/global_valid_toks": (100.0, 90.0)}
HEAD_DELTA: Points = {"refit/delta/changed_elements": (0.0, 500.0)}
OLDER_DELTA: Points = {"timing/train/prepare_for_generation/weight_transfer/producer/sparse_encode": (0.0, 0.4)}


def metrics_of(*tables: Points, prefix: str = "") -> Metrics:
    made = {}
    for table in tables:
        for tag, points in table.items():
            made[prefix + tag] = Series(prefix + tag, tuple(range(1, len(points) + 1)), points)
    return Metrics(series=made)


def both(one: Metrics, two: Metrics) -> Metrics:
    return Metrics(series={**one.series, **two.series})


def test_runs_are_told_apart_by_their_prefixes() -> None:
    assert training_runs(metrics_of(GRPO)) == [""]
    assert training_runs(both(metrics_of(SFT, prefix="resume/mcore/"), metrics_of(GRPO, prefix="lora/"))) == ["lora/", "resume/mcore/"]
    assert training_runs(metrics_of({"timing/train/total_step_time": (1.0,), "retrain/loss": (1.0,)})) == []


@pytest.mark.parametrize("metrics", [metrics_of(GRPO), metrics_of(SFT), metrics_of(GRPO, HEAD_DELTA, prefix="delta/"), Metrics()])
def test_a_run_that_could_have_failed(metrics: Metrics) -> None:
    assert vacuous(metrics) is None


@pytest.mark.parametrize(
    ("change", "words", "boundary"),
    [
        ({"train/advantages/max": (0.0, 0.0), "train/advantages/min": (0.0, 0.0)}, "all advantages were zero", Boundary.REWARD),
        ({"train/lr": (0.0, 0.0)}, "the learning rate was 0 at every step", Boundary.OPTIMIZER),
        ({"train/global_valid_toks": (0.0, 0.0)}, "no token counted in the loss", Boundary.DATA),
    ],
)
def test_nothing_to_learn_from(change: Points, words: str, boundary: Boundary) -> None:
    found = vacuous(both(metrics_of(GRPO, prefix="full/"), metrics_of(GRPO, change, prefix="packed/")))
    assert found is not None
    assert found.reason.startswith("vacuous: ")
    assert words in found.reason
    assert " in packed" in found.reason
    assert found.boundary is boundary


def test_a_console_that_shows_neither_reward_nor_loss_is_vacuous() -> None:
    nothing: Points = {"train/loss": (0.0, 0.0), "train/reward": (0.0, 0.0)}
    found = vacuous(metrics_of(nothing))
    assert found is not None
    assert found.boundary is Boundary.REWARD
    assert vacuous(metrics_of(nothing, {"train/loss": (0.0, 0.1)})) is None
    assert vacuous(metrics_of(GRPO, nothing)) is None, "advantages say more"


def test_tokens_that_counted_and_were_masked_as_impossible_are_left_to_the_proofs() -> None:
    masked: Points = {"train/token_mult_prob_error": (0.0, 0.0)}
    assert vacuous(metrics_of(GRPO, masked)) is None
    unknown = {tag: points for tag, points in GRPO.items() if tag != "train/global_valid_toks"}
    assert vacuous(metrics_of(unknown, masked)) is not None


def test_sequences_masked_for_their_errors_are_a_failure_and_no_vacuity() -> None:
    masked: Points = {"train/token_mult_prob_error": (0.0, 0.0), "train/num_masked_seqs_by_logprob_error": (8.0, 8.0)}
    assert vacuous(metrics_of(GRPO, masked)) is None


def test_without_advantages_the_mixed_groups_must_do() -> None:
    plain = {tag: points for tag, points in GRPO.items() if "advantages" not in tag}
    assert vacuous(metrics_of(plain, {"train/baseline_reward/pct_mixed": (0.0, 25.0)})) is None
    assert vacuous(metrics_of(plain, {"train/baseline_reward/pct_mixed": (0.0, 0.0)})) is not None
    # With two samples and a baseline that leaves one out no group looks mixed although all were.
    assert vacuous(metrics_of(GRPO, {"train/baseline_reward/pct_mixed": (0.0, 0.0)})) is None


@pytest.mark.parametrize("trace", [HEAD_DELTA, OLDER_DELTA])
def test_a_delta_transport_that_carried_nothing(trace: Points) -> None:
    assert vacuous(metrics_of(GRPO, trace, prefix="delta/")) is None
    idle: Points = dict.fromkeys(trace, (0.0, 0.0))
    for tables, words in (((GRPO,), "left no trace"), ((GRPO, idle), "no changed element")):
        found = vacuous(metrics_of(*tables, prefix="delta/"))
        assert found is not None
        assert words in found.reason
        assert found.boundary is Boundary.REFIT
    assert vacuous(metrics_of(GRPO, prefix="full/")) is None


@pytest.mark.parametrize(
    "change",
    [
        {"train/lr": (0.0, 1e-6)},
        {"train/advantages/max": (0.0, 1.5), "train/advantages/min": (0.0, -1.5)},
        {"train/lr": (0.0, 1e-6, 1e-6), "train/advantages/max": (1.0, 0.0, 1.0), "train/advantages/min": (-1.0, 0.0, -1.0)},
    ],
)
@pytest.mark.parametrize("transport", ["full", "packed", "reshard", "delta"])
def test_transfers_that_had_nothing_to_carry(change: Points, transport: str) -> None:
    """The update of the last step is never transferred."""
    found = vacuous(metrics_of(GRPO, HEAD_DELTA, change, prefix=f"{transport}/"))
    assert found is not None
    assert f"no transfer in {transport} carried trained weights" in found.reason
    assert vacuous(metrics_of(GRPO, change)) is None  # where weights are not transferred, any step will do


def test_a_delta_transport_that_sent_everything() -> None:
    total: Points = {"refit/delta/total_elements": (9000.0, 500.0)}
    found = vacuous(metrics_of(GRPO, HEAD_DELTA, total, prefix="delta/"))
    assert found is not None
    assert "sent every element at every step" in found.reason
    assert vacuous(metrics_of(GRPO, HEAD_DELTA, {"refit/delta/total_elements": (9000.0, 9000.0)}, prefix="delta/")) is None


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("train/grad_norm", "nothing shows that anything was trained"),
        ("train/advantages/max", "nothing shows that there was something to learn"),
        ("train/token_mult_prob_error", "nothing shows that generator and trainer agree"),
    ],
)
def test_what_is_not_shown(absent: str, words: str) -> None:
    assert unseen(metrics_of(GRPO)) is None
    assert unseen(metrics_of(SFT)) is None
    table = {tag: points for tag, points in GRPO.items() if tag != absent}
    assert words in (unseen(metrics_of(table, prefix="delta/")) or "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train/token_mult_prob_error": (1.01,)}, "every step was logged is not shown"),
        ({"train/loss": (0.1, 0.1), "train/grad_norm": (0.3, 0.3), "train/token_mult_prob_error": (1.01, 1.01)}, "no step repeats another"),
        ({"train/advantages/max": (1.0, 1.0)}, "no gradient at step 2"),
        ({"train/token_mult_prob_error": (1.0, 1.0)}, "generator and trainer are two computations is not shown"),
        ({"train/num_masked_seqs_by_logprob_error": (0.0, 1.0)}, "sequences were masked for their error"),
    ],
)
def test_numbers_that_meet_every_threshold_and_show_nothing(change: Points, words: str) -> None:
    assert words in (unseen(metrics_of(GRPO, change)) or "")
