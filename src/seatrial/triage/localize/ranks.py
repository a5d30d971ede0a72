"""Small statistics, most of them of ranks: seeded, deterministic, standard library only.

- Few values (`FEW`) are tested by random permutations, more by the usual approximation: no test takes long.
- Where ranks are taken, infinite values have the largest; elsewhere values are finite.
- A statistic that cannot be had (all values are equal) is None, and so is its p.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

FEW = 300
PERMUTATIONS = 1999


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    made = [0.0] * len(values)
    before = 0
    for _, group in groupby(sorted(range(len(values)), key=values.__getitem__), key=values.__getitem__):
        tied = list(group)
        for index in tied:
            made[index] = before + (len(tied) + 1) / 2
        before += len(tied)
    return made


def correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Pearson's; None when either is constant."""
    if len(one) < 2:
        return None
    mean_one, mean_other = math.fsum(one) / len(one), math.fsum(other) / len(other)
    left, right = [value - mean_one for value in one], [value - mean_other for value in other]
    scale = math.sqrt(math.fsum(a * a for a in left) * math.fsum(b * b for b in right))
    return math.fsum(a * b for a, b in zip(left, right, strict=True)) / scale if scale else None


def spearman(one: Sequence[float], other: Sequence[float]) -> tuple[float | None, float | None]:
    """Rank correlation and its two-sided p."""
    first, second = ranks(one), ranks(other)
    rho = correlation(first, second)
    if rho is None:
        return None, None
    if len(first) > FEW:
        return rho, math.erfc(abs(rho) * math.sqrt((len(first) - 1) / 2))
    # Ranks keep mean and spread when they are permuted: the sum of products alone decides.
    middle = (len(first) + 1) / 2
    centred = [value - middle for value in first]
    observed = abs(_products(centred, second))
    return rho, _permuted(second, lambda order: abs(_products(centred, order)) >= observed - 1e-9)


def between_groups(groups: Sequence[int], values: Sequence[float]) -> tuple[float | None, float | None]:
    """Share of the variance that lies between the groups, less what chance puts there; and p of the groups being alike.

    Values are finite; their scale counts, so that one group far from all others is seen among few.
    """
    sizes = Counter(groups)
    count, kinds = len(values), len(sizes)
    mean = math.fsum(values) / count
    total = math.fsum((value - mean) ** 2 for value in values)
    if kinds < 2 or kinds == count or not total:
        return None, None
    centred = [value - mean for value in values]
    between = _spread(groups, centred, sizes)
    share = max(0.0, 1 - ((total - between) / (count - kinds)) / (total / (count - 1)))
    if count > FEW:
        return share, _chi_square_p((count - 1) * between / total, kinds - 1)
    return share, _permuted(centred, lambda order: _spread(groups, order, sizes) >= between * (1 - 1e-9))


def exceeds(inside: Sequence[float], outside: Sequence[float]) -> float:
    """How often a value of the one group is larger than one of the other; one half when they are alike."""
    order = ranks([*inside, *outside])
    total = math.fsum(order[: len(inside)]) - len(inside) * (len(inside) + 1) / 2
    return total / (len(inside) * len(outside))


def signs(values: Sequence[float]) -> float | None:
    """p of the two-sided sign-flip test: is the mean of paired differences zero?"""
    total = math.fsum(values)
    square = math.fsum(value * value for value in values)
    if not square:
        return None
    if len(values) > FEW:
        return math.erfc(abs(total) / math.sqrt(2 * square))
    chance = random.Random(0)
    hits = sum(
        abs(math.fsum(value if chance.getrandbits(1) else -value for value in values)) >= abs(total) - 1e-12 for _ in range(PERMUTATIONS)
    )
    return (hits + 1) / (PERMUTATIONS + 1)


def _products(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def _permuted(values: Sequence[float], is_hit: Callable[[list[float]], bool]) -> float:
    """p by random permutations; the observed order counts as one of them."""
    chance, order, hits = random.Random(0), list(values), 0
    for _ in range(PERMUTATIONS):
        chance.shuffle(order)
        hits += is_hit(order)
    return (hits + 1) / (PERMUTATIONS + 1)


def _spread(groups: Sequence[int], centred: Sequence[float], sizes: Mapping[int, int]) -> float:
    """Sum of squares between the groups."""
    sums = dict.fromkeys(sizes, 0.0)
    for group, value in zip(groups, centred, strict=True):
        sums[group] += value
    return math.fsum(total * total / sizes[group] for group, total in sums.items())


def _chi_square_p(value: float, freedom: int) -> float:
    """Upper tail, by Wilson and Hilferty."""
    if value <= 0:
        return 1.0
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))
