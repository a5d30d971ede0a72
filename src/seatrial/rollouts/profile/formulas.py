"""The statistics of a profile, as pure functions of a task's rewards.

- pass@k is unbiased: the chance that k of the n rollouts, drawn without replacement, hold a correct one. best@k likewise is the
  expected largest reward of k drawn.
- maj@k is the vote of the first k rollouts, as NeMo Gym and Skills count it: pairs of answer and reward vote, no answer is no vote,
  winners that tie are averaged, and nobody voting scores 0.
- Intervals are of 95 %. A pass rate has Wilson's. A mean over tasks has Student's over the tasks, which are the clusters: rollouts of
  one task are not independent, tasks are. Where tasks do not differ, or there is only one, nothing can be estimated: no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache

Z = 1.959963984540054
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The 97.5 % quantile of Student's distribution with 1, 2, … degrees of freedom."""

Interval = tuple[float, float]


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float | None:
    """The sample's standard deviation (n - 1); None for one value, of which none can be known."""
    if len(values) < 2:
        return None
    return math.dist(values, [mean(values)] * len(values)) / math.sqrt(len(values) - 1)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, between neighbours by a straight line; 0.5 is the median."""
    place = (len(ordered) - 1) * share
    low = int(place)
    if low + 1 == len(ordered):
        return ordered[low]
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (place - low)


@cache
def pass_at(n: int, correct: int, k: int) -> float:
    """Of `n` rollouts `correct` are right: the chance that `k` of them hold a right one."""
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {correct} correct of {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def best_at(ordered: Sequence[float], k: int) -> float:
    """The expected largest of `k` of these sorted rewards."""
    return math.fsum([weight * reward for weight, reward in zip(_chances(len(ordered), k), ordered[k - 1 :], strict=True)])


@cache
def _chances(n: int, k: int) -> tuple[float, ...]:
    """With which chance each of the sorted values from the k-th on is the largest of `k` drawn."""
    if not 1 <= k <= n:
        raise ValueError(f"best@{k} of {n}")
    return tuple(math.comb(below, k - 1) / math.comb(n, k) for below in range(k - 1, n))


def majorities(answers: Sequence[int], rewards: Sequence[float], ks: Iterable[int]) -> list[float]:
    """maj@k for each of the ascending `ks`, none above the number of rollouts; equal answers have equal numbers, 0 is no answer."""
    votes: dict[tuple[int, float], int] = {}
    found: list[float] = []
    counted = 0
    for k in ks:
        for vote in zip(answers[counted:k], rewards[counted:k], strict=True):
            if vote[0]:
                votes[vote] = votes.get(vote, 0) + 1
        counted = k
        most = max(votes.values(), default=0)
        tied = [reward for (_, reward), count in votes.items() if count == most]
        found.append(mean(tied) if tied else 0.0)
    return found


def wilson(correct: int, n: int) -> Interval:
    """Where the true pass rate lies, of `correct` among `n` rollouts."""
    rate, square = correct / n, Z * Z
    middle = (rate + square / (2 * n)) / (1 + square / n)
    half = Z * math.sqrt(rate * (1 - rate) / n + square / (4 * n * n)) / (1 + square / n)
    # At the ends the formula gives 0 and 1 but for rounding.
    return (middle - half if correct else 0.0), (middle + half if correct < n else 1.0)


def interval(values: Sequence[float]) -> Interval | None:
    """Where the true mean over tasks lies, by one value per task."""
    spread = std(values)
    if not spread:
        return None
    half = _student(len(values) - 1) * spread / math.sqrt(len(values))
    middle = mean(values)
    return middle - half, middle + half


@cache
def _student(freedom: int) -> float:
    """The 97.5 % quantile; from ten degrees on by its series, good to four digits."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    first, second = (Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3


def default_ks(n: int) -> tuple[int, ...]:
    """1, 2, 4, … below `n`, and `n`."""
    return (*(2**power for power in range(max(0, n - 1).bit_length())), n) if n else ()
