"""Pages: one file each that works offline, in light and dark, on paper and with a keyboard. Those of a trial and of a localization.

- Self-contained: styles, scripts and data are inlined, and the content security policy allows nothing else.
- `page` renders a template that fills the blocks of `base.html.j2`; `parts.html.j2` has what pages share: tables, badges, lists.
- Long series are thinned to the minimum and maximum of each bucket, so no spike disappears. A non-finite point is a gap with its steps,
  kind and count.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from seatrial.core.files import number_to_json
from seatrial.core.records import Bar, CheckResult, Localization, Report
from seatrial.core.series import Metrics, Series
from seatrial.core.text import number, one_line, ranges, visible
from seatrial.report.markdown import pieces
from seatrial.report.outcomes import LevelOutcome, bit_words, level_directory, outcomes

POINTS = 2000
_FIRST = ("reward", "loss", "kl", "grad_norm")


@dataclass(frozen=True, slots=True)
class Gap:
    """Consecutive points that are not finite in the same way."""

    first: int
    last: int
    kind: str
    count: int

    def __str__(self) -> str:
        several = f"{self.kind} at {self.count} steps from {self.first} to {self.last}"
        return several if self.count > 1 else f"{self.kind} at step {self.first}"


@dataclass(frozen=True, slots=True)
class Plot:
    """One metric, thinned; `values` holds None where the line must break."""

    tag: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    gaps: tuple[Gap, ...]
    points: int
    """How many points the series has; more than `steps` when it was thinned."""
    important: bool
    """One of the metrics that a reader looks at first, or one with non-finite points."""

    def finite(self) -> list[float]:
        """The finite values that are plotted; their minimum and maximum are those of the whole series."""
        return [value for value in self.values if value is not None]


def plots(series: Iterable[Series]) -> tuple[Plot, ...]:
    """One plot per series that has points, in reading order."""
    made = [_plot(one) for one in series if len(one)]
    return tuple(sorted(made, key=lambda plot: (not plot.gaps, _rank(plot.tag), plot.tag)))


def _plot(series: Series) -> Plot:
    gaps, breaks = _gaps(series)
    kept = range(len(series)) if len(series) <= POINTS else sorted(_extremes(series) | breaks)
    values = tuple(value if math.isfinite(value := series.values[index]) else None for index in kept)
    steps = tuple(series.steps[index] for index in kept)
    return Plot(series.tag, steps, values, gaps, len(series), bool(gaps) or _rank(series.tag)[0] == 0)


def _gaps(series: Series) -> tuple[tuple[Gap, ...], set[int]]:
    """Runs of non-finite points, and the indices of their first and last points."""
    gaps: list[Gap] = []
    breaks: set[int] = set()
    previous = -2
    for index, (step, value) in enumerate(zip(series.steps, series.values, strict=True)):
        if math.isfinite(value):
            continue
        kind = str(number_to_json(value))
        if previous == index - 1 and gaps[-1].kind == kind:
            breaks.discard(previous if gaps[-1].count > 1 else -1)
            gaps[-1] = Gap(gaps[-1].first, step, kind, gaps[-1].count + 1)
        else:
            gaps.append(Gap(step, step, kind, 1))
        breaks.add(index)
        previous = index
    return tuple(gaps), breaks


def _extremes(series: Series) -> set[int]:
    """Indices of the first and last finite points, and of the smallest and largest of each bucket."""
    finite = [index for index, value in enumerate(series.values) if math.isfinite(value)]
    size = max(1, math.ceil(len(finite) * 2 / POINTS))
    kept = {finite[0], finite[-1]} if finite else set()
    for start in range(0, len(finite), size):
        bucket = finite[start : start + size]
        kept |= {min(bucket, key=series.values.__getitem__), max(bucket, key=series.values.__getitem__)}
    return kept


def _rank(tag: str) -> tuple[int, int]:
    """(0, n) for a metric named like the n-th of the first ones, (1, n) for one that contains it, (2, 0) for others."""
    name = tag.lower().removesuffix("/mean").rsplit("/", 1)[-1]
    named = [(0, place) for place, word in enumerate(_FIRST) if name in (word, word + "s")]
    contained = [(1, place) for place, word in enumerate(_FIRST) if word in name]
    return next(iter((*named, *contained)), (2, 0))


_HERE = Path(__file__).parent
_SHOWN_PLOTS = 12
_GLYPHS = {"Pass": "✓", "Fail": "✕", "Blocked": "■", "Skipped": "–", "Not requested": "·"}


@dataclass(frozen=True, slots=True)
class _Section:
    """One level as the page shows it: what matters first, the rest on demand."""

    outcome: LevelOutcome
    directory: str
    checks: tuple[CheckResult, ...]
    metrics: Metrics | None
    plots: tuple[Plot, ...]
    shown: int
    """How many plots are drawn at once; the others when they are asked for."""


def report_html(report: Report, metrics_by_level: Mapping[str, Metrics]) -> str:
    """The page of a trial; `metrics_by_level` has the metrics of each level under `<number>-<name>`."""
    sections = [_section(outcome, metrics_by_level.get(outcome.key)) for outcome in outcomes(report.trial)]
    drawn = {section.outcome.key: [_plot_data(plot) for plot in section.plots] for section in sections}
    return page(
        "trial.html.j2",
        script="report.js",
        data={"report": report.model_dump(mode="json"), "plots": drawn},
        report=report,
        trial=report.trial,
        sections=sections,
        bits=[f"level {one.level}: {bit_words(one)}" for one in (report.trial.baseline.bits if report.trial.baseline else ())],
    )


def _section(outcome: LevelOutcome, metrics: Metrics | None) -> _Section:
    checks = sorted(outcome.result.checks if outcome.result else (), key=lambda check: check.passed)
    made = plots(metrics.series.values()) if metrics else ()
    important = sum(plot.important for plot in made)
    return _Section(outcome, level_directory(outcome), tuple(checks), metrics, made, max(important, min(_SHOWN_PLOTS, len(made))))


def _plot_data(plot: Plot) -> dict[str, Any]:
    gaps = [[gap.first, gap.last, gap.kind] for gap in plot.gaps]
    return {"tag": plot.tag, "steps": plot.steps, "values": plot.values, "gaps": gaps}


def page(template: str, *, script: str = "", data: object = None, **values: object) -> str:
    """A page by one of our templates, with its script (a file of `assets`, which draws by uPlot) and the data of that.

    - Everything recorded is escaped and made visible; an unknown name in a template is an error.
    - The policy allows our own style and script alone. Every `<`, `>` and `&` of the data is escaped, so no text in it can end its block.
    """
    drawing = [f"/*!\n{_asset('uPlot.LICENSE.txt')}\n*/", *map(_asset, ("uPlot.iife.min.js", "plots.js", script))] if script else []
    scripts = "\n".join(drawing)
    style = f"{_asset('uPlot.min.css')}\n{_asset('report.css')}" if script else _asset("report.css")
    allowed = f"img-src data:; script-src '{_policy_hash(scripts)}'; " if script else ""
    encoded = json.dumps(data, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    values |= {"policy": f"default-src 'none'; {allowed}style-src '{_policy_hash(style)}'"}
    values |= {"style": Markup(style), "script": Markup(scripts), "data": Markup(encoded)}  # nothing recorded is in them as it is
    text = _environment().get_template(template).render(values)
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    """Made once: a bisect writes its page after every round, and compiling a template takes longer than all the rest of it."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    made.filters |= {"number": number, "ranges": ranges, "prose": _prose, "slug": lambda text: str(text).lower().replace(" ", "-")}
    made.globals["glyphs"] = _GLYPHS
    return made


def _prose(sentence: str) -> Markup:
    """A sentence, its code as code."""
    parts = (f"<code>{escape(visible(text))}</code>" if is_code else escape(visible(text)) for is_code, text in pieces(one_line(sentence)))
    return Markup("".join(map(str, parts)))


@functools.cache
def _asset(name: str) -> str:
    return (_HERE / "assets" / name).read_text(encoding="utf-8").strip()


def _policy_hash(text: str) -> str:
    """By which a content security policy allows one inlined text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


WIDTH, ROW, LEFT = 680, 22, 190


class _Drawn(NamedTuple):
    """One bar as it is drawn."""

    label: str
    y: int
    width: float
    text: str
    bad: bool


class _Chart(NamedTuple):
    """One plot."""

    title: str
    note: str
    bars: tuple[_Drawn, ...]

    @property
    def height(self) -> int:
        return ROW * len(self.bars) + 4


def localize_html(found: Localization) -> str:
    """The page of a localization, which runs no script."""
    percentiles = [key if key == "max" else f"{key} %" for key in found.percentiles]
    size = {"width": WIDTH, "row": ROW, "left": LEFT}
    return page("localize.html.j2", found=found, charts=_charts(found), percentiles=percentiles, size=size)


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
