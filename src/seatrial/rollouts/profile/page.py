"""profile.html: plots and tables on one page that works offline and runs no script.

The plots are inline SVG, so that they print and scale; every number of them is in the markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from seatrial.report.html import asset, environment, policy_hash
from seatrial.rollouts.profile.model import AtK, Group, Histogram, Profile
from seatrial.rollouts.profile.tables import answer, share, tables

WIDTH, HEIGHT = 420, 150
_STYLE = """
.drawn { width: 100%; height: auto; display: block; }
.drawn text { font-size: 11px; fill: var(--soft); }
.drawn rect { fill: var(--series); }
.drawn line { stroke: var(--line); }
.drawn polyline { fill: none; stroke: var(--series); stroke-width: 2; }
.drawn circle { fill: var(--series); }
.drawn .second polyline { stroke: var(--blocked); } .drawn .second circle, .drawn .second text { fill: var(--blocked); }
"""


class Column(NamedTuple):
    """One bar as it is drawn."""

    x: float
    y: float
    width: float
    height: float
    label: str
    amount: int


class Chart(NamedTuple):
    """One histogram as it is drawn."""

    title: str
    note: str
    columns: tuple[Column, ...]


class Dot(NamedTuple):
    """One point of a curve."""

    x: float
    y: float
    k: int
    text: str


class Curve(NamedTuple):
    """pass@k or maj@k over k."""

    name: str
    dots: tuple[Dot, ...]

    @property
    def points(self) -> str:
        """As SVG wants them."""
        return " ".join(f"{dot.x},{dot.y}" for dot in self.dots)


def profile_html(profile: Profile) -> str:
    """The page."""
    style = asset("report.css") + _STYLE
    template = Path(__file__).with_name("profile.html.j2").read_text(encoding="utf-8")
    text = (
        environment()
        .from_string(template)
        .render(
            profile=profile,
            summary=profile.summary,
            answer=answer(profile),
            tables=tables(profile),
            curves=_curves(profile.overall),
            charts=[_chart(histogram) for histogram in profile.summary.histograms],
            size={"width": WIDTH, "height": HEIGHT},
            style=Markup(style),  # our own text: nothing recorded is in it
            policy=f"default-src 'none'; style-src '{policy_hash(style)}'",
            share=share,
        )
    )
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def _chart(histogram: Histogram) -> Chart:
    most = max(bar.count for bar in histogram.bars)
    step = WIDTH / len(histogram.bars)
    columns = []
    for place, bar in enumerate(histogram.bars):
        # A bar of one among thousands must still be seen.
        height = max(1.5, HEIGHT * bar.count / most) if bar.count else 0.0
        x, y = round(step * place + 1, 1), round(HEIGHT - height, 1)
        columns.append(Column(x, y, round(step - 2, 1), round(height, 1), bar.label, bar.count))
    total = sum(bar.count for bar in histogram.bars)
    return Chart(histogram.name.capitalize(), f"{total} {histogram.of}; the highest bar has {most}", tuple(columns))


def _curves(overall: Group) -> tuple[Curve, ...]:
    made = (_curve("pass@k", overall.pass_at), _curve("maj@k", overall.majority_at))
    return tuple(curve for curve in made if curve.dots)


def _curve(name: str, figures: Sequence[AtK]) -> Curve:
    """k in equal steps, as it is doubled; values from 0 below to 1 above."""
    step = WIDTH / (len(figures) + 1)
    dots = [
        Dot(round(step * place, 1), round(HEIGHT * (1 - min(1.0, max(0.0, found.value))), 1), found.k, f"{found.value:.4g}")
        for place, found in enumerate(figures, 1)
        if found.value is not None
    ]
    return Curve(name, tuple(dots))
