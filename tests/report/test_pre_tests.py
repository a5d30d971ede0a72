"""Tests before the levels, the baseline and known issues in a report: said where they belong, and never a better result."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from seatrial.core.records import Baseline, Diagnosis, Report, SideResult, Trial
from seatrial.core.verdict import Verdict, worst
from seatrial.report.build import build_report
from seatrial.report.ci import junit_xml
from seatrial.report.html import report_html
from tests.report.trials import LADDER, REPO, SIDE, TITLE, against_baseline, check, level, trial, write_run


def side(verdict: Verdict = Verdict.PASS, **changes: object) -> SideResult:
    base = SIDE.model_copy(update={"verdict": verdict, "reason": "12 tests passed", "passed": 12, "failed": 0, "notes": ()})
    return base.model_copy(update=changes)


def report(run_dir: Path, made: Trial) -> Report:
    write_run(run_dir, made)
    return build_report(made, TITLE, run_dir, LADDER)


@pytest.mark.parametrize("verdict", Verdict)
def test_the_result_is_no_better_than_the_tests(tmp_path: Path, verdict: Verdict) -> None:
    built = report(tmp_path, trial(level(), sides=(side(verdict),)))
    assert built.result is worst([verdict, Verdict.PASS])
    line = built.deliverables[0]
    assert (line.name, line.verdict) == ("Bridge-side checks", verdict)
    assert ("not evidence against the change" in line.proof) == (verdict is Verdict.BLOCKED)
    assert any(text.startswith("Bridge-side checks: ") for text in built.follow_ups) == (verdict is not Verdict.PASS)
    assert "Change-side checks" not in {one.name for one in built.deliverables}


@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ({"failed": 2, "errors": 1}, Verdict.FAIL, "recorded as Pass, but 3 tests failed"),
        ({"passed": 0}, Verdict.BLOCKED, "recorded as Pass, but no test passed"),
    ],
)
def test_a_recorded_pass_without_its_numbers_is_taken_back(tmp_path: Path, changes: dict[str, int], verdict: Verdict, words: str) -> None:
    built = report(tmp_path, trial(level(), sides=(side(Verdict.PASS, **changes),)))
    assert (built.result, built.deliverables[0].verdict) == (verdict, verdict)
    assert words in built.deliverables[0].proof


@pytest.mark.parametrize(("file", "content"), [("run.log", None), ("junit.xml", None), ("junit.xml", "")])
def test_a_recorded_pass_without_its_files_is_taken_back(tmp_path: Path, file: str, content: str | None) -> None:
    made = trial(level(), sides=(side(),))
    write_run(tmp_path, made)
    (tmp_path / "sides/bridge" / file).unlink()
    if content is not None:
        (tmp_path / "sides/bridge" / file).write_text(content)
    built = build_report(made, TITLE, tmp_path, LADDER)
    assert built.result is Verdict.FAIL
    assert f"{file} is {'empty' if content == '' else 'missing'}" in built.deliverables[0].proof


def test_junit_is_no_greener_than_the_report(tmp_path: Path) -> None:
    """Also beside a level that fails, which alone would make the file red."""
    built = report(tmp_path, trial(level(verdict=Verdict.FAIL), sides=(side(Verdict.PASS, errors=1),)))
    (case,) = [case for case in ET.fromstring(junit_xml(built)).iter("testcase") if case.get("name") == "Bridge-side checks"]
    failure = case.find("failure")
    assert failure is not None
    assert "recorded as Pass, but 1 tests failed" in (failure.get("message") or "")


def test_tests_that_never_ended_are_not_called_unasked_for(tmp_path: Path) -> None:
    line = report(tmp_path, trial(status="planned", verdict=None)).deliverables[0]
    assert line.proof == "no test of the change came to its end before the trial was cut off (status: planned)"
    assert "run them in its repository" in report(tmp_path, trial(level())).deliverables[0].proof


def test_a_failure_that_is_not_quite_the_same_is_not_excused(tmp_path: Path) -> None:
    made = against_baseline()
    assert made.baseline is not None
    for excuses, words in ((False, "pre-existing ("), (True, "pre-existing: not evidence against the change (")):
        comparisons = tuple(one.model_copy(update={"excuses": excuses}) for one in made.baseline.comparisons)
        built = report(tmp_path, made.model_copy(update={"baseline": made.baseline.model_copy(update={"comparisons": comparisons})}))
        assert all(words in text for text in built.follow_ups if "pre-existing" in text)
        assert any("pre-existing" in text for text in built.follow_ups)


def test_a_comparison_of_another_verdict_is_not_shown(tmp_path: Path) -> None:
    made = against_baseline()
    other = made.model_copy(update={"levels": (made.levels[0].model_copy(update={"verdict": Verdict.BLOCKED}),)})
    built = report(tmp_path, other)
    assert not [text for text in built.follow_ups if "pre-existing" in text]
    assert "against the baseline" not in next(line.proof for line in built.deliverables if line.name == "Toy RL policy run")


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL])
def test_a_baseline_never_changes_the_result(tmp_path: Path, verdict: Verdict) -> None:
    made = trial(level(verdict=verdict), verdict=verdict)
    plain = report(tmp_path, made)
    compared = report(tmp_path, made.model_copy(update={"baseline": against_baseline().baseline}))
    assert (plain.result, compared.result) == (verdict, verdict)
    waiting = report(tmp_path, made.model_copy(update={"baseline": Baseline(source="main", changes=(REPO,))}))
    assert waiting.answer == plain.answer
    assert f"Baseline main (bridge {REPO.commit[:12]} (dirty)): not run yet" in waiting.evidence


def test_a_known_issue_is_found_by_its_expression_however_it_is_written(tmp_path: Path) -> None:
    made = trial(level(verdict=Verdict.FAIL, checks=(check('max(data["train/loss"]) < 1', passed=False),)))
    plan = made.plan.model_copy(update={"known_issues": {"max( data['train/loss'] )<1": "#9"}})
    built = report(tmp_path, made.model_copy(update={"plan": plan}))
    assert any(text.endswith('known issue max(data["train/loss"]) < 1: #9') for text in built.follow_ups)


def test_a_known_issue_is_found_by_signature_and_said_only_of_what_did_not_pass(tmp_path: Path) -> None:
    diagnosis = Diagnosis(signature="no-space", verdict=Verdict.BLOCKED, cause="x")
    for verdict in (Verdict.BLOCKED, Verdict.PASS):
        made = trial(level(verdict=verdict, diagnosis=diagnosis, checks=(check(), check("b > 1"))), verdict=verdict)
        plan = made.plan.model_copy(update={"known_issues": {"no-space": "#7", "other": "#8"}})
        built = report(tmp_path, made.model_copy(update={"plan": plan}))
        assert ("Known issue no-space: #7" in built.evidence) == (verdict is Verdict.BLOCKED)
        assert ("level 0: known issue no-space: #7" in built.follow_ups) == (verdict is Verdict.BLOCKED)
        assert "#8" not in built.model_dump_json(include={"evidence", "follow_ups"})


def test_the_page_shows_the_comparison(tmp_path: Path) -> None:
    page = report_html(report(tmp_path, against_baseline()), {})
    assert "<summary>Baseline origin/main</summary>" in page
    assert "fail (pre-existing)" in page
    assert "bit-identical value on the baseline (1.25)" in page


def test_a_part_that_is_left_out_is_skipped_and_no_pass(tmp_path: Path) -> None:
    made = trial(level(left_out=("LoRA is broken there",)))
    built = report(tmp_path, made)
    (line,) = [one for one in built.deliverables if one.name == "Requested variants, part of level 0"]
    assert (line.verdict, line.proof, built.result) == (Verdict.SKIPPED, "LoRA is broken there", Verdict.SKIPPED)
