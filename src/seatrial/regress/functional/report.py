"""summary.md and junit.xml of a functional run: functions of its record."""

from __future__ import annotations

from collections import Counter

from seatrial.model.verdict import Verdict
from seatrial.model.words import counted as numbered
from seatrial.regress.functional.record import FunctionalRun, ScriptResult
from seatrial.report.deliverables import check_words
from seatrial.report.junit_parts import add_case, add_checks, add_properties, document, new_suite, put_output, put_verdict
from seatrial.report.markdown import cell, code, prose
from seatrial.report.text import visible

PREFIX = "seatrial.functional"


def counted(whole: FunctionalRun) -> str:
    """`3 scripts: 2 Pass, 1 Fail`."""
    counts = Counter(result.verdict for result in whole.results)
    return f"{numbered(len(whole.results), 'script')}: " + ", ".join(f"{counts[kind]} {kind}" for kind in Verdict if counts[kind])


def summary_md(whole: FunctionalRun) -> str:
    """The verdicts, then what each script was judged by."""
    lines = [f"# {whole.verdict}: {counted(whole)}", "", f"{whole.id}, {whole.created}, Seatrial {whole.seatrial}", ""]
    lines += ["| script | verdict | steps | time | GPU hours | reason |", "|---|---|---|---|---|---|"]
    lines += [_row(result) for result in whole.results]
    for result in whole.results:
        lines += ["", f"## {prose(result.name)}: {result.verdict}", "", f"{code(str(result.script))}: {prose(result.reason)}"]
        if result.boundary is not None:
            lines.append(f"- boundary: {result.boundary}")
        lines += [
            f"- {'met' if check.passed else 'MISSED'}: {prose(_told(check.name, check_words(check), check.message))}"
            for check in result.checks
        ]
        lines += [f"- note: {prose(note)}" for note in result.notes]
        if result.diagnosis and result.diagnosis.advice:
            lines.append(f"- advice: {prose(result.diagnosis.advice)}")
    return "\n".join(lines) + "\n"


def _told(name: str, words: str, message: str) -> str:
    return f"{name}: {message}" if message else words


def steps_told(result: ScriptResult) -> str:
    """`2 of 3`."""
    if result.steps is None:
        return "-"
    return f"{result.reached if result.reached is not None else 'none'} of {result.steps}"


def _row(result: ScriptResult) -> str:
    hours = "-" if result.gpu_hours is None else f"{result.gpu_hours:.3g}"
    cells = (result.name, str(result.verdict), steps_told(result), f"{result.seconds:.1f} s", hours, result.reason)
    return f"| {' | '.join(cell(text) for text in cells)} |"


def junit_xml(whole: FunctionalRun) -> str:
    """One testcase per script, and one per check."""
    seconds = sum(result.seconds for result in whole.results)
    suite = new_suite(whole.id, whole.created, seconds)
    add_properties(suite, [("verdict", str(whole.verdict)), ("seatrial", whole.seatrial)])
    for result in whole.results:
        case = add_case(suite, PREFIX, result.name, result.seconds)
        detail = [result.reason, *result.notes]
        if result.diagnosis is not None:
            detail += [result.diagnosis.cause, *result.diagnosis.excerpt, result.diagnosis.advice]
        put_verdict(case, result.verdict, result.boundary, result.reason, "\n".join(line for line in detail if line))
        if result.verdict is Verdict.PASS and result.notes:
            put_output(case, "\n".join(detail))
        if result.verdict is not Verdict.SKIPPED:
            add_checks(suite, f"{PREFIX}.{visible(result.name)}", result.checks, result.verdict)
    return document(suite, seconds)
