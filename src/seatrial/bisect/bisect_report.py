"""summary.md, report.html, report.json and bisect.log of a bisect, and the JSON Schemas of its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from seatrial import __version__
from seatrial.bisect import git_bisect_log
from seatrial.bisect.bisect_records import VERSION, BisectAnswer, BisectPlan, BisectRun, History
from seatrial.bisect.bisect_view import BisectView, ReportLine, answer_lines, sections
from seatrial.bisect.commit_history import cleared_history
from seatrial.bisect.judge_run import threshold
from seatrial.core.files import number_to_json, write_json, write_text
from seatrial.core.records import Record, replace
from seatrial.core.text import number, one_line, visible
from seatrial.evidence.redact import Redactor
from seatrial.report import html
from seatrial.report.build import schema_text
from seatrial.report.markdown import code, prose

_TONES = {"found": "fail", "range": "blocked", "open": "skipped"}
_BADGES = {"good": "pass", "bad": "fail", "skip": "skipped", "mixed": "blocked", "none": "skipped"}
_GLYPHS = {"good": "✓", "bad": "✕", "skip": "–", "mixed": "≈", "none": "·"}
_NEAR = 12
"""Commits on either side of the suspects in the closer plot, which is there when it shows less than half of all."""


def page(view: BisectView) -> str:
    return html.page(
        "bisect.html.j2",
        script="bisect.js",
        data=_data(view),
        view=view,
        tone=_TONES[view.answer.state],
        badges=_BADGES,
        marks=_GLYPHS,
        answer=answer_lines(view),
        sections=sections(view),
        plots=list(_plots(view)),
        version=__version__,
    )


def _plots(view: BisectView) -> Iterator[tuple[str, int, int]]:
    last = view.history.last
    yield "All commits, from the good end to the bad end", 0, last
    if view.suspects and view.answer.state != "open":
        first, end = max(0, min(view.suspects) - _NEAR), min(last, max(view.suspects) + _NEAR)
        if (end - first) * 2 < last:
            yield "Around the answer", first, end


def _data(view: BisectView) -> dict[str, Any]:
    """What the script draws."""
    metric = any(isinstance(row.value, float) for rows in view.by_point.values() for row in rows)
    return {
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


def _ranges(indices: list[int]) -> list[list[int]]:
    """Neighbours as [first, last]."""
    starts = indices[:1] + [after for before, after in pairwise(indices) if after != before + 1]
    ends = [before for before, after in pairwise(indices) if after != before + 1] + indices[-1:]
    return [list(one) for one in zip(starts, ends, strict=True)]


_SUBJECT, _STATE, _REASON = 36, 64, 48
"""So wide is a column of the table; report.html has the whole text."""


class BisectReport(Record):
    """report.json."""

    version: int = VERSION
    headline: str
    plan: BisectPlan
    commits: int
    """That may be the first bad one, before anything was run."""
    answer: BisectAnswer
    reproduce: tuple[str, ...]
    runs: tuple[BisectRun, ...]


def write_reports(
    directory: Path, plan: BisectPlan, history: History, rows: Sequence[BisectRun], answer: BisectAnswer, redactor: Redactor
) -> None:
    history = cleared_history(history, redactor)
    clear = tuple(_cleared_run(row, redactor) for row in rows)
    # From the check as it is: one without its secrets may be no check any more.
    limit = threshold(plan.check) if plan.check else None
    view = BisectView(
        directory, _cleared_plan(plan, redactor), history, clear, _cleared_answer(answer, redactor), limit.limit if limit else None
    )
    write_text(directory / "bisect.log", git_bisect_log.write_git_log(history, view.rows, view.answer, redactor.text))
    write_text(directory / "summary.md", bisect_summary(view))
    write_text(directory / "report.html", page(view))
    report = BisectReport(
        headline=view.headline, plan=view.plan, commits=view.count, answer=view.answer, reproduce=view.reproduce, runs=view.rows
    )
    write_json(directory / "report.json", report)


def bisect_summary(view: BisectView) -> str:
    parts = [prose(view.headline), *([prose(view.why)] if view.why else []), _bullets("Answer", answer_lines(view))]
    if lines := view.reproduce:
        parts.append("\n".join(["## Reproduce", "", *_block(lines)]))
    parts.append(_steps(view))
    if view.others:
        parts.append(_others(view))
    parts += [_bullets(title, texts) for title, texts in sections(view)]
    return "\n\n".join(parts) + "\n"


def _block(lines: Sequence[str]) -> list[str]:
    """Shell lines as they are, also where a quoted word has lines of its own."""
    text = visible("\n".join(lines))
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{fence}sh", text, fence]


def _bullets(title: str, texts: Sequence[str]) -> str:
    return "\n".join([f"## {title}", "", *(f"- {prose(text)}" for text in texts)])


def _steps(view: BisectView) -> str:
    head = ["", "commit", "mark", "value", "runs", "subject", "why"]
    body: list[list[str]] = []
    for line in view.lines:
        if line.gap:
            body.append(["", f"… {line.gap} not run", *[""] * 5])
        body.append(_step(line, view))
    rest = view.history.last - (view.lines[-1].index if view.lines else -1)
    body += [["", f"… {rest} not run", *[""] * 5]] if rest else []
    arrow = {"found": "; → is the first bad one", "range": "; → may be the first bad one", "open": ""}[view.answer.state]
    return f"## Steps\n\nIn the order of the commits{arrow}.\n\n" + _table(head, body)


def _step(line: ReportLine, view: BisectView) -> list[str]:
    point = line.point
    commit = f"{point.repo} {point.commit[:12]}" if len(view.plan.repos) > 1 else point.commit[:12]
    arrow = "" if line.probability is None else "→"
    runs = str(len(line.rows)) if line.rows else ""
    return [
        arrow,
        code(commit),
        line.mark,
        prose(line.value),
        runs,
        code(_cut(point.subject, _SUBJECT)),
        code(_cut(view.told(line.reason), _REASON)),
    ]


def _others(view: BisectView) -> str:
    """Runs beside the history: other combinations of repositories, and inside a submodule."""
    body = [
        [
            str(row.number),
            code(view.submodule(row)),
            code(row.commit[:12]),
            str(row.mark),
            "" if row.value is None else prose(number(row.value)),
            code(_cut(view.subject(row), _STATE)),
            code(_cut(view.told(row.reason), _REASON)),
        ]
        for row in view.others
    ]
    taken = sum(not row.directory for row in view.others)
    known = f" Known without a run of its own: {taken}." if taken else ""
    title = f"## Further runs\n\nOf other combinations of the repositories, or inside a submodule.{known}\n\n"
    return title + _table(["run", "submodule", "commit", "mark", "value", "subject", "why"], body)


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table whose columns stand below each other in a terminal, too. Columns that are empty are left out."""
    kept = [place for place, title in enumerate(head) if any(row[place] for row in body)]
    rows = [[re.sub(r"(?<!\\)\|", r"\\|", text) for text in row] for row in (head, *body)]
    wide = [max(3, *(len(row[place]) for row in rows)) for place in range(len(head))]
    lines = ["| " + " | ".join(row[place].ljust(wide[place]) for place in kept) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (wide[place] + 2) for place in kept) + "|")
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    text = one_line(text)
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


R = TypeVar("R", bound=Record)


def _cleared(record: R, redactor: Redactor, *names: str, **more: Any) -> R:
    """The record with the secrets of these fields redacted, and further fields as they are given."""
    return replace(record, **{name: redactor.value(getattr(record, name)) for name in names}, **more)


def _cleared_plan(plan: BisectPlan, redactor: Redactor) -> BisectPlan:
    edits = tuple(_cleared(edit, redactor, "clauses") for edit in plan.edits)
    environment = _cleared(plan.environment, redactor, "build")
    texts = [name for name in ("check", "failure") if getattr(plan, name)]
    return _cleared(plan, redactor, "command", "extra", "variables", "notes", *texts, edits=edits, environment=environment)


def _cleared_run(row: BisectRun, redactor: Redactor) -> BisectRun:
    failure = row.failure and _cleared(row.failure, redactor, "cause", "shown")
    value = number_to_json(row.value) if isinstance(row.value, float) else row.value
    value = redactor.text(value) if isinstance(value, str) else value
    return _cleared(row, redactor, "subject", "reason", "notes", failure=failure, value=value)


def _cleared_answer(answer: BisectAnswer, redactor: Redactor) -> BisectAnswer:
    suspects = tuple(_cleared(one, redactor, "subject") for one in answer.suspects)
    standings = tuple(_cleared(one, redactor, "subject", "why") for one in answer.standings)
    return _cleared(answer, redactor, "why", "notes", suspects=suspects, standings=standings)


DIRECTORY = Path(__file__).parent / "schemas"


def schemas() -> dict[str, str]:
    kinds: dict[str, type[Record]] = {"bisect": BisectPlan, "bisect-run": BisectRun, "bisect-report": BisectReport}
    return {f"{name}.schema.json": schema_text(name, kind) for name, kind in kinds.items()}
