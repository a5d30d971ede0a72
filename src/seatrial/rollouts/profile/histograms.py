"""Distributions as bars: pass rates over tasks; rewards, tokens, turns and latency over rollouts."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from seatrial.rollouts.profile.columns import Columns
from seatrial.rollouts.profile.formulas import quantile
from seatrial.rollouts.profile.model import Bar, Histogram, Task

BARS = 20
_TITLES = {"output_tokens": "output tokens", "input_tokens": "input tokens", "turns": "turns", "latency_s": "latency in seconds"}


def make_histograms(tasks: Sequence[Task], columns: Columns) -> tuple[Histogram, ...]:
    """Only of what there is; of quantities that differ."""
    quantities = [Histogram(name=title, of="rollouts", bars=bars(columns.ordered(getattr(columns, key)))) for key, title in _TITLES.items()]
    made = [
        Histogram(name="pass rate", of="tasks", bars=pass_rates([task.pass_rate for task in tasks if task.pass_rate is not None])),
        Histogram(name="reward", of="rollouts", bars=bars(columns.ordered(columns.reward))),
        *(one for one in quantities if len(one.bars) > 1),
    ]
    return tuple(one for one in made if one.bars)


def pass_rates(rates: Sequence[float]) -> tuple[Bar, ...]:
    """0 and 1 have bars of their own: such tasks teach nothing."""
    if not rates:
        return ()
    edges = [step / 10 for step in range(11)]
    labels = ["0", *(f"to {edge:.1f}" for edge in edges[1:-1]), "below 1", "1"]
    counts = [0] * len(labels)
    for rate in rates:
        counts[11 if rate == 1 else bisect_left(edges, rate)] += 1
    return tuple(Bar(label=label, count=count) for label, count in zip(labels, counts, strict=True))


def bars(ordered: Sequence[float]) -> tuple[Bar, ...]:
    """A bar per value where there are few of them, else equal steps up to the 99th percentile and one bar for the rest."""
    few: list[Bar] = []
    place = 0
    while place < len(ordered) and len(few) <= BARS:
        end = bisect_right(ordered, ordered[place], place)
        few.append(Bar(label=f"{ordered[place]:.6g}", count=end - place))
        place = end
    return tuple(few) if len(few) <= BARS else _steps(ordered)


def _steps(ordered: Sequence[float]) -> tuple[Bar, ...]:
    """Many different values, in order."""
    low, high = ordered[0], quantile(ordered, 0.99)
    if high == low:
        high = ordered[-1]
    step = (high - low) / BARS
    edges = [*(low + step * place for place in range(1, BARS)), high]
    ends = [bisect_right(ordered, edge) for edge in edges]
    made = [
        Bar(label=f"{edge - step:.4g} to {edge:.4g}", count=end - start)
        for start, end, edge in zip([0, *ends[:-1]], ends, edges, strict=True)
    ]
    rest = len(ordered) - ends[-1]
    return (*made, Bar(label=f"above {high:.4g}", count=rest)) if rest else tuple(made)
