"""report.html of a bisect: one file that works offline, in light and dark, with every run plotted over the commits.

- Self-contained and inert like the report of a trial (see `report.html`): scripts and styles by their hash, recorded text escaped.
- The plot is drawn from one JSON block; the table below it says the same without a script.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import jinja2
from markupsafe import Markup, escape

from seatrial import __version__
from seatrial.regress.bisect.reports.sections import answer_lines, sections
from seatrial.regress.bisect.reports.view import View
from seatrial.report.html import asset, environment, policy_hash
from seatrial.report.markdown import pieces
from seatrial.report.text import one_line, visible

_TONES = {"found": "fail", "range": "blocked", "open": "skipped"}
_BADGES = {"good": "pass", "bad": "fail", "skip": "skipped", "mixed": "blocked", "none": "skipped"}
_GLYPHS = {"good": "✓", "bad": "✕", "skip": "–", "mixed": "≈", "none": "·"}
_NEAR = 12
"""Commits on either side of the suspects in the closer plot, which is there when it shows less than half of all."""


def page(view: View) -> str:
    """The page."""
    script = "\n".join([f"/*!\n{asset('uPlot.LICENSE.txt')}\n*/", asset("uPlot.iife.min.js"), asset("bisect.js")])
    style = "\n".join([asset("uPlot.min.css"), asset("report.css"), asset("bisect.css")])
    text = _template().render(
        view=view,
        tone=_TONES[view.answer.state],
        badges=_BADGES,
        marks=_GLYPHS,
        answer=answer_lines(view),
        sections=sections(view),
        plots=list(_plots(view)),
        version=__version__,
        script=Markup(script),  # our own files: no recorded text is in them
        style=Markup(style),
        policy=f"default-src 'none'; img-src data:; script-src '{policy_hash(script)}'; style-src '{policy_hash(style)}'",
        data=_data(view),
    )
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


@functools.cache
def _template() -> jinja2.Template:
    """Compiled once: the page is written after every round, and this takes longer than all the rest of it."""
    made = environment()
    made.filters["prose"] = _prose
    return made.get_template("bisect.html.j2")


def _prose(sentence: str) -> Markup:
    """A sentence, its code as code."""
    parts = (f"<code>{escape(visible(text))}</code>" if is_code else escape(visible(text)) for is_code, text in pieces(one_line(sentence)))
    return Markup("".join(map(str, parts)))


def _plots(view: View) -> Iterator[tuple[str, int, int]]:
    """Title, first and last point of each plot."""
    last = view.history.last
    yield "All commits, from the good end to the bad end", 0, last
    if view.suspects and view.answer.state != "open":
        first, end = max(0, min(view.suspects) - _NEAR), min(last, max(view.suspects) + _NEAR)
        if (end - first) * 2 < last:
            yield "Around the answer", first, end


def _data(view: View) -> Markup:
    """The JSON block: every `<`, `>` and `&` is escaped, so no text in it can end the block."""
    metric = any(isinstance(row.value, float) for rows in view.by_point.values() for row in rows)
    data: dict[str, Any] = {
        "metric": view.plan.check if metric else None,
        "limit": view.limit if metric else None,
        "points": [[point.commit, visible(point.subject), point.repo if len(view.plan.repos) > 1 else ""] for point in view.history.points],
        "runs": [
            [index, row.number, str(row.mark), row.value if isinstance(row.value, float) else None, visible(view.told(row.reason))]
            for index, rows in view.by_point.items()
            for row in rows
        ],
        "suspects": _ranges(sorted(view.suspects)) if view.answer.state != "open" else [],
    }
    text = json.dumps(data, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _ranges(indices: list[int]) -> list[list[int]]:
    """Neighbours as [first, last]."""
    starts = indices[:1] + [after for before, after in pairwise(indices) if after != before + 1]
    ends = [before for before, after in pairwise(indices) if after != before + 1] + indices[-1:]
    return [list(one) for one in zip(starts, ends, strict=True)]
