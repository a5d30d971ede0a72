"""The functions of the check language over one series.

- Strict: a point that is NaN or infinite makes the check miss, wherever it stands among the points that are used,
  and before anything is trimmed. So do a series without points and a window without points.
- Windows count steps, not points: `range_start <= step < range_end`; a negative start, and an end of zero or below,
  count back from the last step. The default window starts at step 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from seatrial.metrics.stats import t_pvalue
from seatrial.model.series import Series


class Miss(Exception):
    """The check misses: its value cannot be measured.

    Carries the steps that should have had a finite point, and the first non-finite value if that is the reason.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = (), value: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.missing = missing
        self.value = value


def apply(name: str, series: Series, arguments: Mapping[str, float]) -> tuple[float, tuple[int, ...]]:
    """The value of one function over a series, and the steps whose points it used."""
    if not series.steps:
        raise Miss(f"{series.tag} has no points")
    used = _window(series, arguments) if name in ("mean", "median") else series
    require_finite(used)
    try:
        return _value(name, used.values, arguments), used.steps
    except (ValueError, ArithmeticError) as error:
        raise Miss(f"{name} of {series.tag}: {error}") from error


def _window(series: Series, arguments: Mapping[str, float]) -> Series:
    """The points that `range_start` and `range_end` select."""
    start, end = int(arguments.get("range_start", 1)), int(arguments.get("range_end", 0))
    last = series.steps[-1]
    start += last + 1 if start < 0 else 0
    end += last + 1 if end <= 0 else 0
    chosen = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if start <= step < end]
    if not chosen:
        raise Miss(f"{series.tag} has no points with {start} <= step < {end}; it has steps {series.steps[0]} to {last}")
    return Series(series.tag, tuple(step for step, _ in chosen), tuple(value for _, value in chosen))


def require_finite(series: Series) -> None:
    """Refuse NaN and infinities, with the steps where they stand."""
    steps = series.non_finite()
    if steps:
        raise Miss(f"{series.tag} is not finite at {describe(steps)}", steps, series.get(steps[0]))


def describe(steps: tuple[int, ...]) -> str:
    """Steps for a message: the first few by number."""
    shown = ", ".join(map(str, steps[:8])) + (f", … ({len(steps)} in all)" if len(steps) > 8 else "")
    return f"step{'s' if len(steps) > 1 else ''} {shown}"


def _value(name: str, values: tuple[float, ...], arguments: Mapping[str, float]) -> float:
    match name:
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "len" | "all_finite":
            return float(len(values))
        case "mean":
            return statistics.mean(_without_top(values, arguments.get("ignore_top_p", 0.0)))
        case "median":
            return statistics.median(values)
        case "ratio_above":
            return sum(value >= arguments["threshold"] for value in values) / len(values)
        case "std":
            return statistics.stdev(values)
        case "t_pvalue":
            return t_pvalue(values)
    raise AssertionError(f"no function {name}")


def _without_top(values: tuple[float, ...], share: float) -> tuple[float, ...]:
    """The values without the highest `share` of them; at least one stays."""
    if share <= 0:
        return values
    return tuple(sorted(values)[: max(1, int(len(values) * (1.0 - share)))])
