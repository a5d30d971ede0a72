"""What a conformance probe says to people: the table of families and rungs, and summary.md with the result in its first line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from seatrial.model.verdict import Verdict
from seatrial.proving.bridge.record import FamilyResult, Probe, RungResult
from seatrial.proving.text import check_line, columns, section
from seatrial.report.markdown import prose
from seatrial.report.text import one_line

WORDS = {Verdict.PASS: "ok", Verdict.FAIL: "FAIL", Verdict.SKIPPED: "skip", Verdict.BLOCKED: "BLOCKED"}
_LONGEST = 300


def table(families: Sequence[FamilyResult], rungs: Sequence[str]) -> str:
    """Families down, rungs across: the measured value of what passed, the verdict of the rest, - where a rung does not apply."""
    rows = [("family", *rungs)]
    for family in families:
        found = {rung.rung: rung for rung in family.rungs}
        rows.append((family.model, *(_cell(found.get(rung)) for rung in rungs)))
    return columns(rows)


def _cell(rung: RungResult | None) -> str:
    if rung is None:
        return "skip"
    if rung.verdict is Verdict.PASS:
        return one_line(rung.figure) or "ok"
    return WORDS[rung.verdict] if rung.applicable else "-"


def summary(probe: Probe, out: Path | None) -> str:
    """The summary in the fixed order; recorded texts are no markup, and stay on one line each, so that none can imitate a heading."""
    judged, asked = probe.judged, probe.asked
    state = [f"{repo.name} at {repo.commit[:12]}, {len(repo.dirty)} dirty files: {repo.path}" for repo in probe.changes]
    head = [
        f"Result: {judged.verdict} - {prose(judged.reason)}",
        f"Requested coverage: Bridge conformance on {asked.device}; {prose(', '.join(asked.rungs))}",
        f"Model: {prose(', '.join(asked.models))}",
    ]
    evidence = [f"Command: {' '.join(probe.command)}", *([f"Interpreter: {probe.python}"] if probe.python else [])]
    evidence += [f"Change: {text}" for text in state or ["none: the installed packages"]]
    evidence += [f"{package}: {text}" for package, text in judged.versions.items()]
    evidence += [f"Facts and logs: {out}"] if out else []
    sections = (
        ("Deliverables", list(_deliverables(probe))),
        ("Missed checks", list(_missed(judged.families))),
        ("Evidence", evidence),
        ("Limitations", judged.limitations),
        ("Follow-ups", judged.follow_ups),
    )
    return "\n\n".join(["\n".join(head), *(section(title, bullets) for title, bullets in sections)]) + "\n"


def _deliverables(probe: Probe) -> Iterator[str]:
    for family in probe.judged.families:
        yield f"{family.model}: {family.verdict}{'' if family.counted else ' (not counted)'} - {family.reason[:_LONGEST]}"
        for rung in family.rungs:
            figure = f" [{rung.figure}]" if rung.figure else ""
            at = f" (boundary {rung.boundary})" if rung.boundary else ""
            yield f"{family.model}: {rung.rung}, {rung.title}: {rung.verdict}{figure}{at} - {rung.reason[:_LONGEST]}"
    tests = probe.judged.own_tests
    if tests is not None:
        yield f"Bridge's own tests: {tests.verdict} - {tests.reason[:_LONGEST]}"


def _missed(families: Sequence[FamilyResult]) -> Iterator[str]:
    for family in families:
        for rung in family.rungs:
            yield from (f"{family.model}: {rung.rung}: {check_line(check)}" for check in rung.checks if not check.passed)
