"""Runs in which nothing could have been shown, and what a Pass would claim that metrics do not show.

Only causes that lie outside the trained code make a run vacuous: rewards without spread, a learning rate of zero, no token
in the loss, a delta transport that was never used. A gradient of zero although there were advantages and a learning
rate is a failure; so is a run whose sequences were all masked because generator and trainer disagreed.
"""

from __future__ import annotations

from seatrial.model.loop import Vacuity
from seatrial.model.series import Metrics, Series
from seatrial.model.verdict import Boundary

SHOWING = ("train/loss", "train/grad_norm", "train/reward")
"""Tags that every training run has at least one of."""
DELTA = "delta/"
"""The phase of the sparse transport."""
DELTA_TRACES = ("refit/delta/changed_elements", "timing/train/prepare_for_generation/weight_transfer/producer/sparse_encode")
"""What the sparse transports of HEAD and of the older generation leave behind."""


def runs(metrics: Metrics) -> list[str]:
    """The prefixes of all training runs."""
    found = {tag.removesuffix(name) for tag in metrics.series for name in SHOWING if tag.endswith(name)}
    return sorted(prefix for prefix in found if not prefix or prefix.endswith("/"))


def supervised(metrics: Metrics, run: str) -> bool:
    """Whether a run has no rewards."""
    return f"{run}train/reward" not in metrics.series


def vacuous(metrics: Metrics) -> Vacuity | None:
    """Why this run could not have shown anything, or None."""
    for run in runs(metrics):
        where = f" in {run.rstrip('/')}" if run else ""
        if not _moved(metrics, run):
            return Vacuity(f"vacuous: the learning rate was 0 at every step{where}, so no weight could change", Boundary.OPTIMIZER)
        if _nothing_in_loss(metrics, run):
            return Vacuity(f"vacuous: no token counted in the loss at any step{where}, so there was nothing to learn from", Boundary.DATA)
        if not supervised(metrics, run) and not _spread(metrics, run):
            return Vacuity(f"vacuous: all advantages were zero at every step{where}, so there was nothing to learn from")
        if run == DELTA and (reason := _no_delta(metrics)):
            return Vacuity(f"vacuous: {reason}", Boundary.REFIT)
    return None


def unseen(metrics: Metrics) -> str | None:
    """What a Pass would claim of any training run and these metrics do not show, or None."""
    for run in runs(metrics):
        where = f" in {run.rstrip('/')}" if run else ""
        if f"{run}train/grad_norm" not in metrics.series:
            return f"no train/grad_norm was logged{where}, so nothing shows that anything was trained"
        if supervised(metrics, run):
            continue
        if f"{run}train/advantages/max" not in metrics.series and f"{run}train/baseline_reward/pct_mixed" not in metrics.series:
            return f"no train/advantages were logged{where}, so nothing shows that there was something to learn"
        if f"{run}train/token_mult_prob_error" not in metrics.series:
            return f"no train/token_mult_prob_error was logged{where}, so nothing shows that generator and trainer agree"
    return None


def _values(metrics: Metrics, tag: str) -> tuple[float, ...]:
    series: Series | None = metrics.series.get(tag)
    return series.values if series else ()


def _moved(metrics: Metrics, run: str) -> bool:
    return any(_values(metrics, f"{run}train/lr") or (1.0,))


def _nothing_in_loss(metrics: Metrics, run: str) -> bool:
    """No token counted at any step, and not because sequences were masked for their errors."""
    if any(_values(metrics, f"{run}train/num_masked_seqs_by_logprob_error")):
        return False
    counted = _values(metrics, f"{run}train/global_valid_toks")
    errors = _values(metrics, f"{run}train/token_mult_prob_error")
    return (bool(counted) and not any(counted)) or (bool(errors) and not any(errors))


def _spread(metrics: Metrics, run: str) -> bool:
    """Whether any group was rewarded unevenly. Without advantages the share of mixed groups must do."""
    highest, lowest = (_values(metrics, f"{run}train/advantages/{end}") for end in ("max", "min"))
    if highest or lowest:
        return any(highest) or any(lowest)
    mixed = _values(metrics, f"{run}train/baseline_reward/pct_mixed")
    return not mixed or any(mixed)


def _no_delta(metrics: Metrics) -> str | None:
    """Why the sparse transport carried nothing."""
    traces = {name: _values(metrics, DELTA + name) for name in DELTA_TRACES}
    if not any(traces.values()):
        return "the delta transport left no trace: neither changed elements nor a sparse encoding was logged, so weights went another way"
    if not any(value for values in traces.values() for value in values):
        return "the delta transport found no changed element at any step, so it carried nothing"
    return None
