"""summary.md, report.html, report.json and bisect.log of a bisect.

- summary.md answers in its first line, reads well in a terminal, and can be pasted into a comment on GitHub: recorded text is code there.
- All four are functions of plan, history, rows and answer, and are written anew after every round, each atomically.
- Secrets are taken out of what goes in, field by field where there is free text: a page has too many spellings of a text to search.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.files import number_to_json, write_json, write_text
from seatrial.model.record import Record
from seatrial.regress.bisect.judging.measured import threshold
from seatrial.regress.bisect.logs import gitlog
from seatrial.regress.bisect.record import VERSION, Answer, History, Plan, Run
from seatrial.regress.bisect.reports.page import page
from seatrial.regress.bisect.reports.sections import answer_lines, sections
from seatrial.regress.bisect.reports.view import Line, View
from seatrial.report.markdown import code, prose
from seatrial.report.text import number, one_line, visible

_SUBJECT, _STATE, _REASON = 36, 64, 48
"""So wide is a column of the table; report.html has the whole text."""


class BisectReport(Record):
    """report.json."""

    version: int = VERSION
    headline: str
    plan: Plan
    commits: int
    """That may be the first bad one, before anything was run."""
    answer: Answer
    reproduce: tuple[str, ...]
    runs: tuple[Run, ...]


def write_reports(directory: Path, plan: Plan, history: History, rows: Sequence[Run], answer: Answer, redactor: Redactor) -> None:
    """Write all four."""
    history = cleared_history(history, redactor)
    clear = tuple(cleared_run(row, redactor) for row in rows)
    # From the check as it is: one without its secrets may be no check any more.
    limit = threshold(plan.check) if plan.check else None
    view = View(directory, cleared_plan(plan, redactor), history, clear, cleared_answer(answer, redactor), limit.limit if limit else None)
    write_text(directory / "bisect.log", gitlog.write(history, view.rows, view.answer, redactor.text))
    write_text(directory / "summary.md", summary(view))
    write_text(directory / "report.html", page(view))
    report = BisectReport(
        headline=view.headline,
        plan=view.plan,
        commits=view.count,
        answer=view.answer,
        reproduce=view.reproduce,
        runs=view.rows,
    )
    write_json(directory / "report.json", report)


def summary(view: View) -> str:
    """summary.md."""
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


def _steps(view: View) -> str:
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


def _step(line: Line, view: View) -> list[str]:
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


def _others(view: View) -> str:
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


def cleared_plan(plan: Plan, redactor: Redactor) -> Plan:
    """Without secrets."""
    edits = tuple(edit.model_copy(update={"clauses": redactor.text(edit.clauses)}) for edit in plan.edits)
    free = {name: redactor.value(getattr(plan, name)) for name in ("command", "extra", "variables", "notes")}
    words = {name: redactor.text(getattr(plan, name)) for name in ("check", "failure") if getattr(plan, name)}
    build = plan.environment.model_copy(update={"build": redactor.value(plan.environment.build)})
    return plan.model_copy(update={**free, **words, "edits": edits, "environment": build})


def cleared_history(history: History, redactor: Redactor) -> History:
    """Without secrets."""
    return History(tuple(point.model_copy(update={"subject": redactor.text(point.subject)}) for point in history.points))


def cleared_run(row: Run, redactor: Redactor) -> Run:
    """Without secrets."""
    failure = row.failure
    if failure is not None:
        failure = failure.model_copy(update={"cause": redactor.text(failure.cause), "shown": redactor.text(failure.shown)})
    value = number_to_json(row.value) if isinstance(row.value, float) else row.value
    value = redactor.text(value) if isinstance(value, str) else value
    free = {name: redactor.text(getattr(row, name)) for name in ("subject", "reason")}
    return row.model_copy(update={**free, "notes": redactor.value(row.notes), "failure": failure, "value": value})


def cleared_answer(answer: Answer, redactor: Redactor) -> Answer:
    """Without secrets."""
    suspects = tuple(one.model_copy(update={"subject": redactor.text(one.subject)}) for one in answer.suspects)
    standings = tuple(
        one.model_copy(update={"subject": redactor.text(one.subject), "why": redactor.text(one.why)}) for one in answer.standings
    )
    notes = redactor.value(answer.notes)
    return answer.model_copy(update={"suspects": suspects, "standings": standings, "why": redactor.text(answer.why), "notes": notes})
