"""localize.html: where generator and trainer disagree, on one page that works offline and runs no script.

The plots are inline SVG of plain bars, so that they print, scale and can be read aloud; every number is in the markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from seatrial.model.localization import Bar, Localization
from seatrial.report.html import asset, environment, policy_hash
from seatrial.report.text import number, one_line

WIDTH, ROW, LEFT = 680, 22, 190
_STYLE = """
.bars { width: 100%; max-width: 44rem; height: auto; display: block; }
.bars text { font-size: 12px; fill: var(--ink); }
.bars rect { fill: var(--series); }
.bars .bad { fill: var(--fail); }
"""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One bar as it is drawn."""

    label: str
    y: int
    width: float
    text: str
    bad: bool


@dataclass(frozen=True, slots=True)
class _Chart:
    """One plot."""

    title: str
    note: str
    bars: tuple[_Drawn, ...]

    @property
    def height(self) -> int:
        return ROW * len(self.bars) + 4


def localize_html(found: Localization) -> str:
    """The page."""
    style = asset("report.css") + _STYLE
    text = (
        environment()
        .get_template("localize.html.j2")
        .render(
            found=found,
            charts=_charts(found),
            style=Markup(style),  # our own text: nothing recorded is in it
            policy=f"default-src 'none'; style-src '{policy_hash(style)}'",
            size={"width": WIDTH, "row": ROW, "left": LEFT},
        )
    )
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def localize_text(found: Localization, shown: int = 5) -> str:
    """The short answer for a terminal."""
    share = ", ".join(f"{value:.2%} above {key}" for key, value in found.above.items())
    marks = ", ".join(f"{key}: {number(value)}" for key, value in found.percentiles.items())
    lines = [
        f"level {found.level} ({found.name}): {found.sequences} sequences of {found.prompts} prompts, {found.tokens} tokens in the loss, "
        f"{found.masked_out} sequences masked out",
        f"error per token, percentiles: {marks}; {share}",
        f"sequences with a mult error above 1.05: {found.sequences_above:.1%}",
    ]
    for step in found.steps:
        logged = "no metric" if step.metric is None else f"metric {number(step.metric)}{'' if step.agrees else ': they do not agree'}"
        lines.append(f"step {step.step} of {step.run}: {number(step.error)} from its tokens, {logged}")
    lines += ["", *(f"- {one_line(text)}" for text in found.conclusion), "", "worst sequences:"]
    for worst in found.worst[:shown]:
        lines.append(
            f"  {one_line(worst.source)}: step {worst.step}, mult error {number(worst.error)}, {worst.tokens} tokens, "
            f"worst at position {worst.position} ({number(worst.position_error)})"
        )
    return "\n".join(lines)


def _charts(found: Localization) -> tuple[_Chart, ...]:
    worst = [Bar(label=f"{item.source}", value=item.error, count=item.tokens) for item in found.worst]
    made = (
        ("Tokens by error", "length of a bar: logarithm of the count", found.histogram, lambda value: math.log10(value + 1), "tokens"),
        ("Error by position in the response", "mean error per token", found.by_position, float, "tokens"),
        ("Error by part of the response", "mean error per token; sequences of ten tokens and more", found.by_part, float, "tokens"),
        ("Error by response length", "length of a bar: mult error less 1", found.by_length, lambda value: value - 1, "sequences"),
        ("Worst sequences", "length of a bar: mult error less 1", worst, lambda value: value - 1, "tokens"),
    )
    return tuple(_chart(title, note, bars, scale, unit) for title, note, bars, scale, unit in made if bars)


def _chart(title: str, note: str, bars: Sequence[Bar], scale: Callable[[float], float], unit: str) -> _Chart:
    lengths = [None if isinstance(bar.value, str) else max(0.0, scale(bar.value)) for bar in bars]
    longest = max((length for length in lengths if length is not None), default=0.0) or 1.0
    room = WIDTH - LEFT - 190
    drawn = []
    for place, (bar, length) in enumerate(zip(bars, lengths, strict=True)):
        width = room if length is None else room * length / longest
        counted = f"{bar.count} {unit}"
        text = counted if bar.value == bar.count else f"{number(bar.value)} ({counted})"
        label = bar.label if len(bar.label) <= 24 else "…" + bar.label[-23:]
        drawn.append(_Drawn(label, ROW * place, round(width, 1), text, length is None or bar.label == "not finite"))
    return _Chart(title, note, tuple(drawn))
