"""What a refit probe says to people: the table at the end of a run, and summary.md with the result in its first line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from seatrial.model.record import CheckResult
from seatrial.model.verdict import Verdict
from seatrial.proving.judge import describe
from seatrial.proving.record import Judged, Probe, RefitLine
from seatrial.report.markdown import prose
from seatrial.report.text import number, one_line

SHOWN = 10


def summary(probe: Probe, out: Path | None) -> str:
    """The summary; recorded texts are no markup, and stay on one line each, so that none can imitate a heading."""
    judged, wanted = probe.judged, probe.wanted
    what = {
        "driver": f"policy -> {wanted.engine}, {wanted.steps} steps",
        "attach": f"a server that runs: {wanted.engine}",
        "facts": "facts of another run",
    }
    asked = [
        what[wanted.source],
        f"transports {', '.join(wanted.transports)}" if wanted.transports else "",
        f"fault {wanted.fault}" if wanted.fault else "",
    ]
    head = [
        f"Result: {judged.verdict} - {prose(judged.reason)}",
        f"Requested coverage: refit proof; {prose('; '.join(filter(None, asked)))}",
        f"Model: {prose(wanted.model or 'as in the facts')}",
    ]
    evidence = [f"Command: {' '.join(probe.command)}"]
    evidence += [f"Interpreter: {probe.python}"] if probe.python else []
    evidence += [f"Refits: {len(judged.refits)}, {sum(row.bytes for row in judged.refits)} bytes"] if wanted.source != "attach" else []
    evidence += [_spread(judged)] if judged.mismatch else []
    evidence += [f"Facts and logs: {out}"] if out else []
    sections = (
        ("Checks", (check_line(check) for check in judged.checks)),
        ("Wrong tensors", [*map(describe, judged.wrong[:SHOWN]), *_more(len(judged.wrong))]),
        ("Evidence", evidence),
        ("Limitations", judged.limitations),
        ("Follow-ups", _follow_ups(judged, wanted.source)),
    )
    return "\n\n".join(["\n".join(head), *(section(title, bullets) for title, bullets in sections)]) + "\n"


def section(title: str, bullets: Iterable[str]) -> str:
    """A heading with its bullets, or with none."""
    return "\n".join([f"{title}:", *([f"- {prose(bullet)}" for bullet in bullets] or ["- none"])])


def check_line(check: CheckResult) -> str:
    """One check with what it measured."""
    wanted = f" (wanted: {check.threshold})" if check.threshold else ""
    said = f": {check.message}" if check.message else ""
    return f"{check.name}: {'met' if check.passed else 'MISSED'} - {number(check.value)}{wanted}{said}"


def _more(count: int) -> list[str]:
    return [f"and {count - SHOWN} more, in probe.json"] if count > SHOWN else []


def _spread(judged: Judged) -> str:
    last = judged.mismatch[-1]
    figures = ", ".join(f"{key} {number(getattr(last, key))}" for key in ("p50", "p90", "p99", "max_sequence", "outlier_share"))
    return f"token_mult_prob_error after the last refit (weak, never a proof alone): {number(last.value)}; {figures}; {last.tokens} tokens"


def _follow_ups(judged: Judged, source: str) -> list[str]:
    if judged.verdict is Verdict.FAIL and judged.wrong and source == "driver":
        return ["the same run with --transport full separates the transport from the loader: a tensor that is still wrong is the loader's"]
    if judged.verdict is Verdict.BLOCKED and judged.vacuous:
        return ["let the weights move and the transport be used (more --steps, --transport), then prove again"]
    return []


def table(refits: Iterable[RefitLine]) -> str:
    """One line per refit, in columns."""
    head = ("refit", "step", "version", "replica", "transport", "MB", "changed", "stale before", "wrong after", "proven by")
    return columns([head, *(_cells(row) for row in refits)])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, each column as wide as its widest cell."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _cells(row: RefitLine) -> tuple[str, ...]:
    changed = f"{row.changed / row.elements:.2%}" if row.changed is not None and row.elements else "-"
    proven = ", ".join(f"{method} {count}" for method, count in row.methods.items() if count) or "-"
    after = f"refused: {row.refused}" if row.refused else f"{row.wrong} of {row.names}"
    transport = f"{row.transport} ({row.kind})" if row.kind else row.transport
    figures = (str(row.index), str(row.step), str(row.version), row.replica, transport, f"{row.bytes / 1e6:.2f}", changed)
    return tuple(one_line(cell) for cell in (*figures, str(row.stale), after, proven))
