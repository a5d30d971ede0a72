"""Runs in which nothing could have been shown, and what a Pass would claim that metrics do not show.

Only causes that lie outside the trained code make a run vacuous: rewards without spread, a learning rate of zero, no token
in the loss, a delta transport that was never used, transfers that had nothing to carry. A gradient of zero although there
were advantages and a learning rate is a failure; so is a run whose sequences were all masked because generator and trainer
disagreed.
"""

from __future__ import annotations

import math

from seatrial.loops.nemo_rl.after.steps import every_step, moved, steps_differ, two_computations
from seatrial.loops.nemo_rl.after.training import SPREAD, runs, supervised
from seatrial.model.loop import Vacuity
from seatrial.model.series import Metrics, Series
from seatrial.model.verdict import Boundary

DELTA = "delta/"
"""The phase of the sparse transport."""
TRANSPORTS = ("full/", "packed/", "reshard/", DELTA)
"""Phases whose claim is that trained weights are transferred."""
DELTA_TRACES = ("refit/delta/changed_elements", "timing/train/prepare_for_generation/weight_transfer/producer/sparse_encode")
"""What the sparse transports of HEAD and of the older generation leave behind."""


def vacuous(metrics: Metrics) -> Vacuity | None:
    """Why this run could not have shown anything, or None."""
    for run in runs(metrics):
        if found := _reason(metrics, run, f" in {run.rstrip('/')}" if run else ""):
            reason, boundary = found
            return Vacuity(f"vacuous: {reason}", boundary, run)
    return None


def _reason(metrics: Metrics, run: str, where: str) -> tuple[str, Boundary] | None:
    if not _moved(metrics, run):
        return f"the learning rate was 0 at every step{where}, so no weight could change", Boundary.OPTIMIZER
    if _nothing_in_loss(metrics, run):
        return f"no token counted in the loss at any step{where}, so there was nothing to learn from", Boundary.DATA
    if not supervised(metrics, run) and not _spread(metrics, run):
        return f"all advantages were zero at every step{where}, so there was nothing to learn from", Boundary.REWARD
    if _nothing_earned(metrics, run):
        return f"every reward and every loss was 0{where}, so there was nothing to learn from", Boundary.REWARD
    if run in TRANSPORTS and _nothing_to_carry(metrics, run):
        return f"no transfer{where} carried trained weights: there was nothing to learn from before the last step", Boundary.REWARD
    if run == DELTA and (reason := _no_delta(metrics)):
        return reason, Boundary.REFIT
    return None


def unseen(metrics: Metrics) -> str | None:
    """What a Pass would claim of any training run and these metrics do not show, or None."""
    for run in runs(metrics):
        where = f" in {run.rstrip('/')}" if run else ""
        if f"{run}train/grad_norm" not in metrics.series:
            return f"no train/grad_norm was logged{where}, so nothing shows that anything was trained"
        doubtful = [every_step(run, metrics, ()), steps_differ(run, metrics), moved(run, metrics)]
        if not supervised(metrics, run) and (apart := two_computations(run, metrics, ())):
            doubtful.append(apart)
        if missed := next((check for check in doubtful if not check.passed), None):
            return f"{missed.name} is not shown: {missed.message or missed.value}"
        if supervised(metrics, run):
            continue
        if any(_values(metrics, f"{run}train/num_masked_seqs_by_logprob_error")):
            return f"sequences were masked for their error{where}, so nothing shows that generator and trainer agree on all of them"
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
    return not any(counted) if counted else bool(errors) and not any(errors)


def _spread(metrics: Metrics, run: str) -> bool:
    """Whether any group was rewarded unevenly. Without advantages the share of mixed groups must do."""
    highest, lowest = (_values(metrics, f"{run}train/advantages/{end}") for end in ("max", "min"))
    if highest or lowest:
        return any(highest) or any(lowest)
    mixed = _values(metrics, f"{run}train/baseline_reward/pct_mixed")
    return not mixed or any(mixed)


def _nothing_earned(metrics: Metrics, run: str) -> bool:
    """All that a console shows of a run without advantages: no reward and no loss at any step."""
    shown = [_values(metrics, f"{run}train/{name}") for name in ("reward", "loss")]
    logged = any(_values(metrics, f"{run}{tag}") for tag in (*SPREAD, "train/grad_norm"))
    return all(shown) and not logged and not any(value for values in shown for value in values)


def _nothing_to_carry(metrics: Metrics, run: str) -> bool:
    """The update of a step is carried by the transfer of the next one: at no step but the last was there anything to learn."""
    rate, *ends = (metrics.series.get(run + tag) for tag in ("train/lr", *SPREAD))
    if rate is None or len(rate) < 2 or None in ends:
        return False
    return not any(rate.get(step) and any(end.get(step) for end in ends if end) for step in rate.steps[:-1])


def _no_delta(metrics: Metrics) -> str | None:
    """Why the sparse transport carried nothing."""
    traces = {name: _values(metrics, DELTA + name) for name in DELTA_TRACES}
    if not any(traces.values()):
        return "the delta transport left no trace: neither changed elements nor a sparse encoding was logged, so weights went another way"
    if not any(value for values in traces.values() for value in values):
        return "the delta transport found no changed element at any step, so it carried nothing"
    changed, total = (metrics.series.get(DELTA + name) for name in (DELTA_TRACES[0], "refit/delta/total_elements"))
    late = [step for step in changed.steps if step > 1] if changed and total else []  # the first transfer may be a whole one
    if changed and total and late and all((changed.get(step) or 0) >= (total.get(step) or math.inf) for step in late):
        return "the delta transport sent every element at every step: it found nothing unchanged, so it was a full transfer"
    return None
