"""How far the log-probabilities of generator and policy are apart: token_mult_prob_error, with its distribution over sequences.

- The value is the mean over all tokens of exp|difference|; one sequence that is far off hides in it, so the means of the single
  sequences are summarised, too.
- This is the weak last check: numerical noise is about 1.01, and a stale tensor may add less. It can fail a refit, never prove one.
- A difference that is not finite makes the value NaN and is counted; nothing is left out of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

OUTLIER = 1.05
"""The mean of a sequence above which it counts as an outlier; upstream's usual bound for the mean of all tokens."""


@dataclass(frozen=True)
class Mismatch:
    """One comparison."""

    value: float
    """The mean of exp|difference| over all tokens."""
    tokens: int
    sequences: int
    p50: float
    """Percentiles of the sequences' own means, by nearest rank."""
    p90: float
    p99: float
    max_sequence: float
    outlier_share: float
    """Share of the sequences with tokens whose mean is above the bound, or not a number."""
    nonfinite: int
    """Tokens whose difference is not finite."""
    max_abs: float
    """The largest |difference|."""


def token_mult_prob_error(generator: Sequence[Sequence[float]], policy: Sequence[Sequence[float]], outlier: float = OUTLIER) -> Mismatch:
    """Compare the log-probabilities of the same tokens, sequence by sequence; other lengths are a ValueError."""
    if len(generator) != len(policy):
        raise ValueError(f"mismatch: {len(generator)} sequences of the generator, {len(policy)} of the policy")
    gaps = [_gaps(index, left, right) for index, (left, right) in enumerate(zip(generator, policy, strict=True))]
    every = [gap for row in gaps for gap in row]
    bad = sum(not math.isfinite(gap) for gap in every)
    means = sorted(_mean(row) for row in gaps if row) if not bad else []
    # Written so that a NaN counts as an outlier.
    outliers = sum(not _mean(row) <= outlier for row in gaps if row)
    return Mismatch(
        value=_mean(every),
        tokens=len(every),
        sequences=len(gaps),
        p50=_percentile(means, 50),
        p90=_percentile(means, 90),
        p99=_percentile(means, 99),
        max_sequence=_percentile(means, 100),
        outlier_share=outliers / sum(map(bool, gaps)) if every else math.nan,
        nonfinite=bad,
        max_abs=max(every) if every and not bad else math.nan,
    )


def _gaps(index: int, left: Sequence[float], right: Sequence[float]) -> list[float]:
    if len(left) != len(right):
        raise ValueError(f"mismatch: sequence {index} has {len(left)} tokens at the generator and {len(right)} at the policy")
    return [abs(a - b) for a, b in zip(left, right, strict=True)]


def _mean(gaps: Sequence[float]) -> float:
    """The mean of exp(gap); NaN without tokens or with one that is not finite."""
    if not gaps or not all(map(math.isfinite, gaps)):
        return math.nan
    return math.fsum(map(_exp, gaps)) / len(gaps)


def _exp(gap: float) -> float:
    try:
        return math.exp(gap)
    except OverflowError:
        return math.inf


def _percentile(ascending: Sequence[float], percent: int) -> float:
    """By nearest rank: a value that occurred, not one between two."""
    return ascending[math.ceil(percent / 100 * len(ascending)) - 1] if ascending else math.nan
