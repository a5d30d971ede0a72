"""How much a series scatters around its levels, told from differences of neighbours, so that steps and drifts hardly count.

- `scales`: one deviation per point. Where parts of the series scatter differently, each gets its own; where they do not, all get the
  same. Between the two: shrunk towards the common one by what chance alone would make of parts that scatter alike.
- A series without spread gets a floor that is tiny but no zero, relative to its values.
- `squeezed`: the same series with its gaps cut short, so that squares stay within what floats can tell apart.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

FLOOR = 1e-9
"""Least deviation, relative to the largest value: below it floats themselves scatter."""
BLOCK = 24
"""Points per part whose scatter is looked at by itself."""
CHANCE = 1.9
"""Variance of the logarithm of a part's deviation, times its points, when all scatter alike (normal noise, by simulation)."""
FEW = 3
"""So many differences that are not 0 are a step and an outlier, no spread."""
GAP = 100.0
"""Deviations beyond which it does not matter how far two values lie apart."""
_QUANTILES = ((0.5, 0.6745), (0.75, 1.1503), (0.9, 1.6449))


def deviation(differences: Sequence[float]) -> float:
    """The deviation of the values from their differences: by the median; where most are 0, by a higher quantile; 0 if nearly all are."""
    ordered = sorted(abs(step) for step in differences)
    if sum(step > 0 for step in ordered) <= FEW:
        return 0.0
    for quantile, normal in _QUANTILES:
        found = ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]
        if found > 0:
            return found / normal / math.sqrt(2)
    return 0.0


def scales(values: Sequence[float]) -> list[float]:
    """One deviation for each point."""
    differences = [after - before for before, after in itertools.pairwise(values)]
    floor = max(FLOOR * max(abs(value) for value in values), 1e-300)
    common = max(deviation(differences), floor)
    parts = len(differences) // BLOCK
    if parts < 3:
        return [common] * len(values)
    bounds = [len(differences) * part // parts for part in range(parts + 1)]
    own = [math.log(max(deviation(differences[low:high]), floor)) for low, high in itertools.pairwise(bounds)]
    seen = statistics.variance(own)
    chance = CHANCE * parts / len(differences)
    share = max(0.0, 1 - 2 * chance / seen) if seen > 0 else 0.0
    if share == 0.0:
        return [common] * len(values)
    centres = [(low + high) / 2 for low, high in itertools.pairwise(bounds)]
    middle = math.log(common)
    return [math.exp((1 - share) * middle + share * found) for found in _between(centres, own, len(values))]


def _between(centres: Sequence[float], own: Sequence[float], count: int) -> list[float]:
    """Linear between the centres of the parts, flat beyond the outer ones."""
    found, part = [], 0
    for index in range(count):
        while part < len(centres) - 2 and index > centres[part + 1]:
            part += 1
        share = min(max((index - centres[part]) / (centres[part + 1] - centres[part]), 0.0), 1.0)
        found.append(own[part] + share * (own[part + 1] - own[part]))
    return found


def squeezed(values: Sequence[float], gap: float) -> list[float]:
    """Order and small distances as they are, 0 in the middle, neighbours in size at most `gap` apart.

    A value that is a billion deviations off would leave no digits for the others in sums of squares.
    """
    ordered = sorted(set(values))
    places, at = {ordered[0]: 0.0}, 0.0
    for before, after in itertools.pairwise(ordered):
        at += min(after - before, gap)
        places[after] = at
    middle = places[statistics.median_low(values)]
    return [places[value] - middle for value in values]
