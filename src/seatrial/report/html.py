"""report.html: one file that works offline, in light and dark, on paper and with a keyboard.

- Self-contained: styles, scripts and data are inlined, and the page's content security policy allows nothing else
  (scripts by their hash), so a hostile text in a log can neither run nor load anything.
- All data is in one JSON block; the plots are drawn from it, every other fact is in the markup already.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from seatrial.model.record import CheckResult, Report
from seatrial.model.series import Metrics
from seatrial.report.bits import bit_words
from seatrial.report.deliverables import level_directory
from seatrial.report.outcome import Outcome, outcomes
from seatrial.report.plots import Plot, plots
from seatrial.report.text import number, ranges, visible

_HERE = Path(__file__).parent
_SHOWN_PLOTS = 12
_GLYPHS = {"Pass": "✓", "Fail": "✕", "Blocked": "■", "Skipped": "–", "Not requested": "·"}


@dataclass(frozen=True, slots=True)
class _Section:
    """One level as the page shows it: what matters first, the rest on demand."""

    outcome: Outcome
    directory: str
    checks: tuple[CheckResult, ...]
    metrics: Metrics | None
    plots: tuple[Plot, ...]
    shown: int
    """How many plots are drawn at once; the others when they are asked for."""


def report_html(report: Report, metrics_by_level: Mapping[str, Metrics]) -> str:
    """The page; `metrics_by_level` has the metrics of each level under `<number>-<name>`."""
    sections = [_section(outcome, metrics_by_level.get(outcome.key)) for outcome in outcomes(report.trial)]
    script = "\n".join([f"/*!\n{asset('uPlot.LICENSE.txt')}\n*/", asset("uPlot.iife.min.js"), asset("report.js")])
    style = asset("uPlot.min.css") + "\n" + asset("report.css")
    page = environment().get_template("template.html.j2")
    text = page.render(
        report=report,
        trial=report.trial,
        sections=sections,
        bits=[f"level {one.level}: {bit_words(one)}" for one in (report.trial.baseline.bits if report.trial.baseline else ())],
        script=Markup(script),  # our own files: no recorded text is in them
        style=Markup(style),
        policy=f"default-src 'none'; img-src data:; script-src '{policy_hash(script)}'; style-src '{policy_hash(style)}'",
        data=_data(report, sections),
    )
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def _section(outcome: Outcome, metrics: Metrics | None) -> _Section:
    checks = sorted(outcome.result.checks if outcome.result else (), key=lambda check: check.passed)
    made = plots(metrics.series.values()) if metrics else ()
    important = sum(plot.important for plot in made)
    return _Section(outcome, level_directory(outcome), tuple(checks), metrics, made, max(important, min(_SHOWN_PLOTS, len(made))))


def _data(report: Report, sections: Sequence[_Section]) -> Markup:
    """The JSON block: every `<`, `>` and `&` is escaped, so no text in it can end the block."""
    drawn = {section.outcome.key: [_plot_data(plot) for plot in section.plots] for section in sections}
    text = json.dumps({"report": report.model_dump(mode="json"), "plots": drawn}, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _plot_data(plot: Plot) -> dict[str, Any]:
    gaps = [[gap.first, gap.last, gap.kind] for gap in plot.gaps]
    return {"tag": plot.tag, "steps": plot.steps, "values": plot.values, "gaps": gaps}


def environment() -> jinja2.Environment:
    """Where pages are rendered: everything recorded is escaped and made visible, an unknown name is an error."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    made.filters |= {"number": number, "ranges": ranges, "slug": lambda text: str(text).lower().replace(" ", "-")}
    made.globals["glyphs"] = _GLYPHS
    return made


def asset(name: str) -> str:
    """A file that is inlined."""
    return (_HERE / "assets" / name).read_text(encoding="utf-8").strip()


def policy_hash(text: str) -> str:
    """By which a content security policy allows one inlined text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
