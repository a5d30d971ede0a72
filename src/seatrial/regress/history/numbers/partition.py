"""Cut a series into segments of one level each, so that the sum of bounded squares and a price per cut is least.

- The loss of a point is ((y - level) / scale)², at most BOUND²: a single wild point costs the same however far away it lies, so it can
  never pay for the two cuts that would make it a segment.
- The answer is the exact optimum, by functional pruning (Maidstone et al. 2017; Fearnhead and Rigaill 2019 for the bounded loss): the
  cost of the best partition so far is kept as a function of the last level, in pieces that are quadratics. In practice some tens of
  pieces, so the time is linear in the number of points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

BOUND = 3.0
"""Deviations at which the loss of a point stops growing."""

Piece = tuple[float, float, float, float, float, int]
"""From, to, then a, b, c of a x² + b x + c, and where the segment began."""


def cuts(values: Sequence[float], scales: Sequence[float], price: float) -> list[int]:
    """First indices of the segments but the first, in order."""
    lowest, highest = min(values), max(values)
    pieces: list[Piece] = [(lowest, highest, 0.0, 0.0, 0.0, 0)]
    began: list[int] = []
    best = 0.0
    for index, (value, scale) in enumerate(zip(values, scales, strict=True)):
        if index:
            pieces = _capped(pieces, best + price, index)
        pieces = _added(pieces, value, scale)
        best, start = _least(pieces)
        began.append(start)
    found, end = [], len(values)
    while end and began[end - 1]:
        end = began[end - 1]
        found.append(end)
    return found[::-1]


def _least(pieces: list[Piece]) -> tuple[float, int]:
    """The least value of the function, and where the last segment began there."""
    best, start = math.inf, 0
    for low, high, a, b, c, began in pieces:
        if a > 0:
            at = -b / (2 * a)
            at = low if at < low else high if at > high else at
            found = (a * at + b) * at + c
        else:
            found = c
        if found < best:
            best, start = found, began
    return best, start


def _capped(pieces: list[Piece], cap: float, index: int) -> list[Piece]:
    """The lower of the function and a new segment's cost, which does not depend on its level."""
    found: list[Piece] = []

    def new(low: float, high: float) -> None:
        if found and found[-1][5] == index:
            low = found.pop()[0]
        found.append((low, high, 0.0, 0.0, cap, index))

    for piece in pieces:
        low, high, a, b, c, _ = piece
        if a <= 0:
            if c > cap:
                new(low, high)
            else:
                found.append(piece)
            continue
        inside = b * b - 4 * a * (c - cap)
        if inside <= 0:
            new(low, high)
            continue
        root = math.sqrt(inside)
        left, right = (-b - root) / (2 * a), (-b + root) / (2 * a)
        if left <= low and right >= high:
            found.append(piece)
            continue
        if right <= low or left >= high:
            new(low, high)
            continue
        if left > low:
            new(low, left)
        found.append((max(left, low), min(right, high), *piece[2:]))
        if right < high:
            new(right, high)
    return found


def _added(pieces: list[Piece], value: float, scale: float) -> list[Piece]:
    """The function plus the loss of one more point."""
    weight = 1 / (scale * scale)
    near, far = value - BOUND * scale, value + BOUND * scale
    a, b, c, most = weight, -2 * weight * value, weight * value * value, BOUND * BOUND
    found: list[Piece] = []
    for piece in pieces:
        low, high, pa, pb, pc, began = piece
        if high <= near or low >= far:
            found.append((low, high, pa, pb, pc + most, began))
            continue
        if low < near:
            found.append((low, near, pa, pb, pc + most, began))
            low = near
        if high > far:
            found.append((low, far, pa + a, pb + b, pc + c, began))
            found.append((far, high, pa, pb, pc + most, began))
        else:
            found.append((low, high, pa + a, pb + b, pc + c, began))
    return found
