"""Whether the steps that a run shows are all of its steps, each taken once, and each a comparison of two computations.

A run that was resumed from somewhere, a metric that a logger skipped, a step that was written again and a generator that was
compared with itself all leave numbers that meet every threshold.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from seatrial.loops.claims import lookup
from seatrial.loops.nemo_rl.after.console import PLANS
from seatrial.loops.nemo_rl.after.training import SPREAD, supervised, updates
from seatrial.loops.proof import proof
from seatrial.model.guarded import parse_count
from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary

LOSS, ERROR = "train/loss", "train/token_mult_prob_error"
MOVING = tuple(f"train/{name}" for name in ("loss", "grad_norm", "token_mult_prob_error", "gen_kl_error", "approx_entropy"))
"""Sums over thousands of tokens: no two steps agree in all of them."""
AT_EVERY_STEP = (
    *(LOSS, ERROR, "train/grad_norm", "train/lr", "train/reward", "train/gen_kl_error", "train/approx_entropy", *SPREAD),
    *("train/probs_ratio_clamped_min", "train/probs_ratio_clamped_max", "train/num_masked_seqs_by_logprob_error"),
)
"""What NeMo-RL logs at each step, where it logs it at all."""
IMPOSSIBLE = re.compile(r"\[WARNING\]: (\d+)/(\d+) valid tokens have -inf in \w+")
MOST_IMPOSSIBLE = 0.01
AGREE = 1.1
FLOOR = 0.999
"""The largest error where neither script nor level has a threshold of its own: that of the maintained recipes."""

Configs = Sequence[Mapping[str, Any] | None]


def of_run(run: str) -> str:
    """Of which run a proof is, for its name."""
    return f" ({run.rstrip('/')})" if run else ""


def every_step(run: str, metrics: Metrics, printed: Configs) -> CheckResult:
    """All steps from the first to the planned one have a loss, and every metric that thresholds are about."""
    series = {tag: metrics.series[run + tag] for tag in AT_EVERY_STEP if run + tag in metrics.series}
    planned = max((steps for config in printed for key in PLANS if type(steps := lookup(config or {}, key)) is int), default=0)
    wanted = range(1, max((planned, *(found.steps[-1] for found in series.values() if found.steps))) + 1)
    absent = {tag: [step for step in wanted if found.get(step) is None] for tag, found in series.items()}
    holes = "; ".join(f"{tag}: none at step {', '.join(map(str, steps[:5]))}" for tag, steps in absent.items() if steps)
    whole = LOSS in series and not holes
    return proof(
        f"every step was logged{of_run(run)}", whole, f"{len(series)} metrics, {len(wanted)} steps", Boundary.METRICS, "all", holes
    )


def steps_differ(run: str, metrics: Metrics) -> CheckResult:
    """No step shows the very numbers of the one before it."""
    series = [metrics.series[run + tag] for tag in MOVING if run + tag in metrics.series]
    steps = series[0].steps if series else ()
    same = [
        after
        for before, after in pairwise(steps)
        if len(series) > 1 and all(found.get(before) is not None and found.get(before) == found.get(after) for found in series)
    ]
    message = f"all numbers of step {', '.join(map(str, same[:5]))} are those of the step before: nothing new was computed" if same else ""
    value = f"{len(same)} of {max(len(steps) - 1, 0)} steps repeat the one before"
    return proof(f"no step repeats another{of_run(run)}", not same, value, Boundary.METRICS, "0", message)


def trained_once(phase: str, printed: Configs, runs: Sequence[str]) -> CheckResult:
    """One training wrote the metrics of each run: of several, the log of one that failed is not that of the numbers."""
    value = f"{len(printed)} trainings, {len(runs)} runs with metrics"
    message = "" if len(printed) == len(runs) else "which of the trainings the metrics are of is not known"
    return proof(f"each run was trained once ({phase})", not message, value, Boundary.METRICS, "equal", message)


def moved(run: str, metrics: Metrics) -> CheckResult:
    """Weights changed, as far as metrics can show it: a gradient, and a learning rate to go with it at the same step. A step
    with something to learn, a learning rate and no gradient is missed."""
    gradient, rate = (metrics.series.get(f"{run}train/{name}") for name in ("grad_norm", "lr"))
    name = f"a gradient and a learning rate{of_run(run)}"
    if gradient is None or rate is None:
        absent = " and ".join(f"train/{tag}" for tag, series in (("grad_norm", gradient), ("lr", rate)) if series is None)
        return proof(name, False, f"no {absent}", Boundary.OPTIMIZER)
    ends = [series for tag in SPREAD if (series := metrics.series.get(run + tag))]
    idle = [
        step
        for step in gradient.steps
        if gradient.get(step) == 0 and (rate.get(step) or 0) > 0 and (supervised(metrics, run) or any(series.get(step) for series in ends))
    ]
    both = updates(metrics, run)
    value = f"both above 0 at {len(both)} of {len(gradient)} steps"
    message = "metrics show no weight: that weights changed follows from these two"
    if idle:
        message = f"no gradient at step {', '.join(map(str, idle[:5]))}, although there was something to learn"
    return proof(name, bool(both) and not idle, value, Boundary.OPTIMIZER, "> 0", message)


def two_computations(run: str, metrics: Metrics, printed: Configs) -> CheckResult | None:
    """Two engines never agree to the last bit: an error of exactly 1 at every step is a comparison with itself. None where
    one engine generates and trains."""
    if any(lookup(config or {}, "policy.generation.backend") == "megatron" for config in printed):
        return None
    series = metrics.series.get(run + ERROR)
    same = series is not None and bool(series.values) and all(value == 1 for value in series.values)
    value = f"largest error {max(series.values):.8g}" if series and series.values else "not logged"
    message = "the error is exactly 1 at every step: generator and trainer were not computed apart" if same else ""
    return proof(f"generator and trainer are two computations{of_run(run)}", not same, value, Boundary.CONFIG, "not all 1", message)


def finite(phase: str, texts: Iterable[str], printed: Configs) -> CheckResult:
    """No token left the loss because the trainer calls it impossible: that is the worst disagreement there is. Where the sampler
    filters, a token at its edge may."""
    counts = [(parse_count(match[1]), parse_count(match[2])) for text in texts if (match := IMPOSSIBLE.search(text))]
    share = sum(count for count, _ in counts) / max(sum(total for _, total in counts), 1)
    filtered = any(_filters(config or {}) for config in printed)
    most = MOST_IMPOSSIBLE if filtered else 0.0
    name = f"the trainer can sample what was generated ({phase})"
    message = "NeMo-RL takes these tokens out of the loss and of every metric" if share else ""
    return proof(name, share <= most, f"{share:.3g} of the tokens are impossible", Boundary.PROVIDER, f"<= {most:g}", message)


def _filters(config: Mapping[str, Any]) -> bool:
    top_k, top_p = (lookup(config, f"policy.generation.{name}") for name in ("top_k", "top_p"))
    return (type(top_k) is int and top_k > 0) or (isinstance(top_p, float) and top_p < 1)


def agreed(run: str, metrics: Metrics, asserted: Sequence[str]) -> CheckResult | None:
    """Generator and trainer agree; None where script or level have a threshold of their own, which is checked."""
    about = f'max(data["{run}{ERROR}"])'
    if any(about in text.replace("'", '"') for text in asserted):
        return None
    series = metrics.series.get(run + ERROR)
    most = max(series.values, default=float("nan")) if series else float("nan")
    return proof(f"token_mult_prob_error is small{of_run(run)}", most < AGREE, f"largest {most:.6g}", Boundary.REFIT, f"< {AGREE}")
