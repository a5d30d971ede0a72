"""junit.xml carries the verdicts and is valid whatever a log says."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from seatrial.core.records import Trial
from seatrial.core.verdict import Boundary, Verdict
from seatrial.report.build import build_report
from seatrial.report.ci import junit_xml
from tests.report.trials import LADDER, LOSS, TITLE, TRIALS, blocked_preflight, check, failed, level, passed, skipped_mix, trial, write_run


def suite_of(run_dir: Path, made: Trial, files: bool = True) -> ET.Element:
    """The parsed testsuite of a trial."""
    if files:
        write_run(run_dir, made)
    (suite,) = ET.fromstring(junit_xml(build_report(made, TITLE, run_dir, LADDER)))
    return suite


@pytest.mark.parametrize("name", TRIALS)
def test_green_exactly_when_the_report_is_pass(tmp_path: Path, name: str) -> None:
    suite = suite_of(tmp_path, TRIALS[name]())
    bad = sum(int(suite.attrib[key]) for key in ("failures", "errors", "skipped"))
    assert (bad == 0) == (name == "passed")
    assert int(suite.attrib["tests"]) == len(suite.findall("testcase"))


def test_one_testcase_per_level_and_check(tmp_path: Path) -> None:
    names = [(case.attrib["classname"], case.attrib["name"]) for case in suite_of(tmp_path, passed()).findall("testcase")]
    assert len(names) == 6
    assert names[0] == ("seatrial.toy", "level 0: GRPO smoke")
    assert names[1] == ("seatrial.toy.level0", LOSS)


def test_fail_has_the_boundary_as_type(tmp_path: Path) -> None:
    failures = suite_of(tmp_path, failed()).findall("testcase/failure")
    assert [failure.attrib["type"] for failure in failures] == ["optimizer", "metrics"]
    assert "steps without a finite point: 13" in (failures[1].text or "")


def test_blocked_and_skipped(tmp_path: Path) -> None:
    errors = suite_of(tmp_path, blocked_preflight()).findall("testcase/error")
    assert {error.attrib["type"] for error in errors} == {"blocked.environment"}
    skipped = suite_of(tmp_path, skipped_mix()).findall("testcase/skipped")
    assert [node.attrib["message"] for node in skipped] == ["needs 1 GPU, this machine has none"]


def test_missed_check_of_a_blocked_level_is_no_failure(tmp_path: Path) -> None:
    zero = level(verdict=Verdict.BLOCKED, boundary=Boundary.ROLLOUT, checks=(check(passed=False, value=None),))
    suite = suite_of(tmp_path, trial(zero, verdict=Verdict.BLOCKED))
    assert suite.attrib["failures"] == "0"
    assert [error.attrib["type"] for error in suite.findall("testcase/error")] == ["blocked.rollout", "blocked.metrics"]


def test_result_that_no_level_carries_is_not_lost(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, passed(), files=False)
    (case,) = [case for case in suite.findall("testcase") if case.attrib["name"] == "result"]
    failure = case.find("failure")
    assert failure is not None
    assert "run.log is missing" in failure.attrib["message"]


def test_commits_are_properties(tmp_path: Path) -> None:
    properties = {node.attrib["name"]: node.attrib["value"] for node in suite_of(tmp_path, passed()).iter("property")}
    assert properties["bridge.commit"] == "0123456789abcdef0123456789abcdef01234567"
    assert properties["bridge.dirty"] == "src/bridge/provider.py, notes.txt"
    assert properties["verdict"] == "Pass"


def test_forbidden_characters_are_visible(tmp_path: Path) -> None:
    reason = "boom \x00\x0b\x1b[2J\ufffe ]]> <a & \"b'"
    suite = suite_of(tmp_path, trial(level(verdict=Verdict.FAIL, reason=reason), verdict=Verdict.FAIL, reason=reason))
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.attrib["message"] == "boom \\x00 \\x1b[2J\\ufffe ]]> <a & \"b'"
    assert "\\x0b" in (failure.text or "")
