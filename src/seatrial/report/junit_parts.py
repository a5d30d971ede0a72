"""JUnit's elements, as every report of ours uses them.

- Pass is empty, Fail a `<failure type=boundary>`, Blocked an `<error type="blocked.boundary">`, Skipped a `<skipped>`.
- Characters that XML forbids are written out (`\\x00`), so any log text gives a valid file.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable

from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary, Verdict
from seatrial.report.deliverables import check_words
from seatrial.report.text import one_line, ranges, visible


def new_suite(name: str, timestamp: str, seconds: float) -> ET.Element:
    """An empty testsuite."""
    return ET.Element("testsuite", {"name": visible(name), "timestamp": visible(timestamp), "time": f"{seconds:.3f}"})


def add_properties(suite: ET.Element, pairs: Iterable[tuple[str, str]]) -> None:
    """What is true of the whole suite."""
    node = ET.SubElement(suite, "properties")
    for name, value in pairs:
        ET.SubElement(node, "property", {"name": one_line(name), "value": one_line(value)})


def add_case(suite: ET.Element, classname: str, name: str, seconds: float) -> ET.Element:
    """A testcase, which passes until a verdict is put on it."""
    return ET.SubElement(suite, "testcase", {"classname": classname, "name": one_line(name), "time": f"{seconds:.3f}"})


def put_verdict(case: ET.Element, verdict: Verdict, boundary: Boundary | None, message: str, detail: str) -> None:
    """Add the element that carries a verdict other than Pass."""
    place = str(boundary) if boundary else "unattributed"
    if verdict is Verdict.SKIPPED:
        ET.SubElement(case, "skipped", {"message": one_line(message)})
    elif verdict is Verdict.FAIL:
        ET.SubElement(case, "failure", {"type": place, "message": one_line(message)}).text = visible(detail)
    elif verdict is Verdict.BLOCKED:
        ET.SubElement(case, "error", {"type": f"blocked.{place}", "message": one_line(message)}).text = visible(detail)


def put_output(case: ET.Element, text: str) -> None:
    """What a reader of a testcase that passed should know."""
    ET.SubElement(case, "system-out").text = visible(text)


def add_checks(suite: ET.Element, classname: str, checks: Iterable[CheckResult], verdict: Verdict) -> None:
    """A testcase for each check. A missed one of something Blocked is an error: it is no evidence against the change."""
    for check in checks:
        case = add_case(suite, classname, check.name, 0)
        if not check.passed:
            missed = Verdict.BLOCKED if verdict is Verdict.BLOCKED else Verdict.FAIL
            put_verdict(case, missed, check.boundary, check.message or check_words(check), check_detail(check))


def check_detail(check: CheckResult) -> str:
    """All that a check says."""
    lines = [check_words(check), check.message]
    lines += [f"steps used: {ranges(check.steps)}"] if check.steps else []
    lines += [f"steps without a finite point: {ranges(check.missing)}"] if check.missing else []
    return "\n".join(line for line in lines if line)


def document(suite: ET.Element, seconds: float) -> str:
    """The whole file, with its counts."""
    counts = {
        "tests": len(suite.findall("testcase")),
        "failures": len(suite.findall("testcase/failure")),
        "errors": len(suite.findall("testcase/error")),
        "skipped": len(suite.findall("testcase/skipped")),
    }
    for name, count in counts.items():
        suite.set(name, str(count))
    root = ET.Element("testsuites", {"name": "seatrial", "time": f"{seconds:.3f}"} | {name: str(count) for name, count in counts.items()})
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
