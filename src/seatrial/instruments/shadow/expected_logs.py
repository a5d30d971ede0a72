"""What a trainer should log for a step, from the shadow's own values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from seatrial.instruments.shadow import formulas
from seatrial.instruments.shadow.interface import Diverged, ShadowSettings
from seatrial.instruments.shadow.rounds import MicroBatch, Round

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
ALWAYS = ("loss", "grad_norm", "learning_rate", "reward")
LATEST = ("grad_norm", "learning_rate", "epoch", "num_tokens")  # metrics of which the last value is logged, not the mean since the last log
ROUGH = {"kl": 2e-3, "loss": 2e-3, "grad_norm": 1e-3, **dict.fromkeys(("kl_loss", "ppo_kl", "pg_loss", "vf_loss"), 2e-3)}
"""Relative deviation that rounding may cause, where it is more than usual."""

SLACK = {"vf_explained_var": 1e-4}  # deviation that is always allowed, where it is more than usual: of a difference of nearly equal numbers


def of_step(batch: Sequence[MicroBatch], norm: float, rate: float, s: ShadowSettings, exercised: Counter[str]) -> dict[str, float]:
    passes = [[part.terms for part in batch[start : start + s.world] if part.terms is not None] for start in range(0, len(batch), s.world)]
    """Micro-batches that all ranks computed together."""

    def mean(values: list[float]) -> float:
        known = [value for value in values if not math.isnan(value)]
        return sum(known) / len(known) if known else math.nan

    def logged_mean(of: Callable[[formulas.Terms], Any]) -> float:
        return mean([formulas.masked_mean([(of(each), each.mask) for each in together]) for together in passes])

    terms = [each for together in passes for each in together]
    expected = {"grad_norm": norm, "learning_rate": rate, "loss": sum(part.own_loss for part in batch) / s.world}
    if s.entropy_coef:
        expected |= {"entropy_coef": s.entropy_coef, "policy_loss": mean([part.own_policy for part in batch])}
    if not math.isnan(batch[0].own_router):
        expected["aux_loss"] = mean([part.own_router for part in batch])
    with torch.no_grad():
        expected["entropy"] = logged_mean(lambda each: each.entropies)
        far = [((each.ratio - 1).abs() > 1e-4) & (each.mask > 0) for each in terms]
        exercised["off_policy_positive"] += sum(bool((off & (each.advantage > 0)).any()) for off, each in zip(far, terms, strict=True))
        exercised["off_policy_negative"] += sum(bool((off & (each.kept < 0)).any()) for off, each in zip(far, terms, strict=True))
        exercised["left_out"] += sum(bool((each.kept != each.advantage).any()) for each in terms)
        if s.delta is not None:
            exercised["two_sided"] += sum(bool(((each.ratio > s.delta) & (each.advantage < 0) & (each.mask > 0)).any()) for each in terms)
        exercised["off_policy"] += sum(bool(((each.ratio - 1).abs() > 1e-4).any()) for each in terms)
        if s.beta:
            exercised["kl"] += sum(bool((each.kl * each.mask > 1e-9).any()) for each in terms)
            expected["kl"] = logged_mean(lambda each: each.kl)
        if s.loss_type in CLIPPED:
            exercised["clipped_low"] += sum([int(low(each, s).sum()) for each in terms])
            exercised["clipped_high"] += sum([int(high(each, s).sum()) for each in terms])
            expected["clip_ratio/low_mean"] = logged_mean(lambda each: low(each, s))
            expected["clip_ratio/high_mean"] = logged_mean(lambda each: high(each, s))
            expected["clip_ratio/region_mean"] = logged_mean(lambda each: low(each, s) + high(each, s))
            for name, clipped, extreme in (("low_min", low, min), ("high_max", high, max)):
                rows = [[float(share) for each in some for share in each.per_row(clipped(each, s))] for some in passes]
                expected[f"clip_ratio/{name}"] = mean([extreme(shares, default=math.nan) for shares in rows])
        elif s.loss_type == "cispo":
            expected["cispo_clip_ratio"] = logged_mean(lambda each: ((each.ratio > s.epsilon_high) & (each.advantage > 0)).double())
        elif s.loss_type == "vespo":
            expected["vespo/phi_seq_mean"] = logged_mean(lambda each: each.phi)
    return expected


def low(terms: formulas.Terms, s: ShadowSettings) -> Any:
    return ((_counted(terms, s) < 1 - s.epsilon_low) & (terms.advantage < 0)).double()


def high(terms: formulas.Terms, s: ShadowSettings) -> Any:
    return ((_counted(terms, s) > 1 + s.epsilon_high) & (terms.advantage > 0)).double()


def _counted(terms: formulas.Terms, s: ShadowSettings) -> Any:
    """The ratio that is counted: a two-sided clip comes first, as in the loss."""
    return terms.ratio.clamp(max=s.delta) if s.delta is not None else terms.ratio


def of_round(made: Round, names: Sequence[str], ends: Sequence[int], s: ShadowSettings) -> dict[str, float]:
    total = formulas.total_rewards(made.table, s)
    expected = {"reward": float(torch.nanmean(total)), "reward_std": float(formulas.nan_std(total))}
    expected["frac_reward_zero_std"] = float(formulas.zero_std(made.table, s).double().mean())
    for index, name in enumerate(names):
        column = made.table[:, index]
        expected[f"rewards/{name}/mean"] = float(torch.nanmean(column))
        expected[f"rewards/{name}/std"] = float(formulas.nan_std(column))
    lengths = torch.tensor([len(ids) for ids in made.completions], dtype=torch.float64)
    ended = torch.tensor([bool(ids) and ids[-1] in ends for ids in made.completions])
    expected |= {"completions/mean_length": float(lengths.mean()), "completions/min_length": float(lengths.min())}
    expected |= {"completions/max_length": float(lengths.max()), "completions/clipped_ratio": float((~ended).double().mean())}
    whole = lengths[ended] if bool(ended.any()) else torch.zeros(1)
    for name, value in (("mean", whole.mean()), ("min", whole.min()), ("max", whole.max())):
        expected[f"completions/{name}_terminated_length"] = float(value)
    if made.correction is not None:
        expected |= _corrected(made, s)
    return expected


def _corrected(made: Round, s: ShadowSettings) -> dict[str, float]:
    """How far another generator's log-probabilities are from the policy's, and the correction for it: of each rank, then of all."""
    gaps, ratios = [], []
    for rows in torch.arange(len(made.prompts)).chunk(s.world):
        mask = made.mask[rows].bool()
        ratio, gap = made.correction[rows], (made.old - made.said).abs()[rows][mask]
        gaps.append(gap[~gap.isnan()])
        ratios.append(ratio.flatten() if ratio.shape[1] == 1 else ratio[mask])
    named = {"sampling_logp_difference/mean": [part.mean() for part in gaps], "sampling_logp_difference/max": [torch.cat(gaps).max()]}
    named |= {f"importance_sampling_ratio/{name}": [getattr(torch.cat(ratios), name)()] for name in ("min", "max")}
    named["importance_sampling_ratio/mean"] = [part.mean() for part in ratios]
    return {f"sampling/{name}": float(torch.stack(values).mean()) for name, values in named.items()}


def over(window: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What is logged for several steps at once: the mean of each metric, or its last value."""
    made = {}
    for name in dict.fromkeys(name for step in window for name in step):
        values = [step[name] for step in window if name in step]
        known = [value for value in values if not math.isnan(value)]
        made[name] = values[-1] if name in LATEST or not known else sum(known) / len(known)
    return made


def unexpected(expected: Mapping[str, float], got: Mapping[str, Any], names: Sequence[str]) -> None:
    """Diverged at a metric of a generation that was logged at a step without one."""
    stray = next((name for name in got if name in names and name not in expected and got[name] is not None), None)
    if stray is not None:
        raise Diverged("logging", f"{stray} was logged at a step that generated nothing", "nothing", got[stray])


def history(
    logs: Sequence[tuple[int, Mapping[str, Any]]], rows: Sequence[Mapping[str, Any]], losses: Sequence[float], steps: int, every: bool
) -> int:
    """How many values of a trainer's own history were compared with what it logged; Diverged at the first that is another.

    The row that closes a run says the mean loss of all steps.
    """
    compared, kept = 0, {int(row["step"]): row for row in rows if "train_loss" not in row and "step" in row}
    for step, values in logs:
        row = kept.get(step)
        if row is None:
            raise Diverged("logging", "the trainer's history of a logged step", f"step {step}", "nothing")
        for name, value in values.items():
            if value is not None and not same_number(row.get(name), value):
                raise Diverged("logging", f"{name} of step {step} in the trainer's history", value, row.get(name))
            compared += 1
    closing = next((row for row in rows if "train_loss" in row), None)
    if every and closing is not None and len(losses) == steps and steps:
        own, got = sum(losses) / steps, float(closing["train_loss"])
        if not math.isclose(own, got, rel_tol=2e-3, abs_tol=1e-5):
            raise Diverged("logging", "train_loss at the end", own, got)
        compared += 1
    return compared


def same_number(one: Any, two: Any) -> bool:
    return bool(one == two or (isinstance(one, float) and isinstance(two, float) and math.isnan(one) and math.isnan(two)))


def blurred(table: Any, s: ShadowSettings) -> float:
    """The share of rows whose group has no spread, while rounding in fp32 may see one: equal rewards that are no short binary fractions."""
    flat = formulas.zero_std(table, s)
    exact = formulas.exact(table) if s.aggregation == "sum_then_normalize" else torch.zeros_like(flat)
    return float((flat & ~exact).double().mean())


def compare(
    expected: Mapping[str, float],
    got: Mapping[str, Any],
    tokens: int,
    every: bool,
    always: Sequence[str] = ALWAYS,
    slacks: Mapping[str, float] | None = None,
) -> int:
    """How many metrics were compared; Diverged at the first that is not ours, or that is missing though `every` one is known.

    One token at an edge may count on either side; `slacks` says what else may.
    """
    compared = 0
    for name, own in expected.items():
        value = got.get(name)
        if value is None or math.isnan(own):
            if (every or name in always) and not math.isnan(own):
                raise Diverged("logging", f"{name} was not logged", own, "nothing")
            continue
        slack = 1.5 / max(1, tokens) if name.startswith("clip_ratio") or "clipfrac" in name else SLACK.get(name.rpartition("/")[2], 1e-6)
        slack = (slacks or {}).get(name, slack)
        if not math.isclose(float(value), own, rel_tol=ROUGH.get(name.rpartition("/")[2], 1e-4), abs_tol=slack):
            raise Diverged("logging", f"logged {name}", own, float(value))
        compared += 1
    return compared
