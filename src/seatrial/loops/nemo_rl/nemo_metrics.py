"""NeMo-RL's metrics: what each means, whether every step is there once, and when a run proves nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from seatrial.checks.probe_facts import lookup, proof
from seatrial.core.guarded import parse_count
from seatrial.core.loop import Vacuity
from seatrial.core.records import CheckResult
from seatrial.core.series import Metrics, Series
from seatrial.core.specs import Bound, Signals
from seatrial.core.verdict import Boundary
from seatrial.loops.nemo_rl.nemo_outputs import PLANS

SHOWING = ("train/loss", "train/grad_norm", "train/reward")
"""Tags that every training run has at least one of."""
SPREAD = ("train/advantages/min", "train/advantages/max")
"""What a step could learn from: both are 0 where every answer of a prompt was rewarded alike."""


def training_runs(metrics: Metrics) -> list[str]:
    found = {tag.removesuffix(name) for tag in metrics.series for name in SHOWING if tag.endswith(name)}
    return sorted(prefix for prefix in found if not prefix or prefix.endswith("/"))


def supervised(metrics: Metrics, run: str) -> bool:
    return f"{run}train/reward" not in metrics.series


def updates(metrics: Metrics, run: str) -> list[int]:
    """Steps with a gradient and a learning rate."""
    gradient, rate = (metrics.series.get(f"{run}train/{name}") for name in ("grad_norm", "lr"))
    return [step for step in gradient.steps if (gradient.get(step) or 0) > 0 and (rate.get(step) or 0) > 0] if gradient and rate else []


LOSS, ERROR = "train/loss", "train/token_mult_prob_error"
MOVING = tuple(f"train/{name}" for name in ("loss", "grad_norm", "token_mult_prob_error", "gen_kl_error", "approx_entropy"))
"""Sums over thousands of tokens: no two steps agree in all of them."""
AT_EVERY_STEP = (
    *(LOSS, ERROR, "train/grad_norm", "train/lr", "train/reward", "train/gen_kl_error", "train/approx_entropy", *SPREAD),
    *("train/probs_ratio_clamped_min", "train/probs_ratio_clamped_max", "train/num_masked_seqs_by_logprob_error"),
)
"""What NeMo-RL logs at each step, where it logs it at all."""
IMPOSSIBLE = re.compile(r"\[WARNING\]: ([0-9]+)/([0-9]+) valid tokens have -inf in \w+")
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


SIGNALS = Signals(
    loss=("train/loss", "train/critic/loss"),
    grad_norm=("train/(?:critic/)?grad_norm",),
    rate=("train/(?:critic/)?lr",),
    reward=("train/reward",),
    spreads=(("train/advantages/max", "train/advantages/min"),),
    lengths=("train/mean_gen_tokens_per_sample", "train/global_valid_toks"),
    entropy=("train/approx_entropy",),
    moving=(ERROR, "train/gen_kl_error"),
    counters=("train/total_num_tokens_seen",),
    not_negative=(
        "train/global_valid_(?:toks|seqs)",
        "train/num_(?:valid_samples|unmasked_tokens|masked_seqs_by_logprob_error)",
        "train/draft_loss",
    ),
    bounds=(
        Bound("(?:train|validation)/(?:val_|kl_)?loss", low=-1e6, high=1e6, floor=50, growth=100),
        Bound("train/critic/loss", high=1e6, floor=100, growth=100),
        Bound("train/grad_norm", high=1e6, floor=100, growth=300),
        # The maintained scripts allow 1500.
        Bound("train/critic/grad_norm", high=1e6, floor=1e4, growth=300),
        Bound("train/(?:critic/)?lr", high=10),
        # It is 1 at least, and 0 where every token is masked.
        Bound(ERROR, low=FLOOR, high=AGREE),
        Bound("train/max_seq_mult_prob_error", high=1e3),
        # The maintained scripts allow a median of 1.3 of asynchronous runs.
        Bound("train/(?:gen_kl_error|policy_kl_error|js_divergence_error|kl_penalty)", low=-5, high=100, floor=5, growth=100),
        Bound("train/approx_entropy", high=1e4, floor=20, growth=20),
        # A mean over all tokens: the clip of an update keeps it near 1.
        Bound("train/probs_ratio(?:_clamped)?", low=0.1, high=10),
        Bound("train/probs_ratio(?:_clamped)?_(?:min|max)", low=0, high=100),
        Bound("train/reward|train/advantages/.+", low=-1e9, high=1e9, floor=1e4, growth=1e3),
    ),
)


DELTA = "delta/"
"""The phase of the sparse transport."""
TRANSPORTS = ("full/", "packed/", "reshard/", DELTA)
"""Phases whose claim is that trained weights are transferred."""
DELTA_TRACES = ("refit/delta/changed_elements", "timing/train/prepare_for_generation/weight_transfer/producer/sparse_encode")
"""What the sparse transports of HEAD and of the older generation leave behind."""


def vacuous(metrics: Metrics) -> Vacuity | None:
    for run in training_runs(metrics):
        if found := _reason(metrics, run, f" in {run.rstrip('/')}" if run else ""):
            reason, boundary = found
            return Vacuity(f"vacuous: {reason}", boundary, run)
    return None


def _reason(metrics: Metrics, run: str, where: str) -> tuple[str, Boundary] | None:
    if not any(_values(metrics, f"{run}train/lr") or (1.0,)):
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
    for run in training_runs(metrics):
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
