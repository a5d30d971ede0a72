"""GitHub sees the verdict first, and recorded text stays text."""

from __future__ import annotations

from pathlib import Path

from seatrial.core.records import Report, Trial
from seatrial.core.verdict import Verdict
from seatrial.report import ci
from seatrial.report.build import build_report
from seatrial.report.ci import ANNOTATION_LIMIT, SUMMARY_LIMIT, publish, step_summary
from tests.report.trials import LADDER, TITLE, blocked_preflight, check, failed, level, passed, trial, write_run


def report(run_dir: Path, made: Trial) -> Report:
    write_run(run_dir, made)
    return build_report(made, TITLE, run_dir, LADDER)


def test_verdict_comes_first(tmp_path: Path) -> None:
    text = step_summary(report(tmp_path, failed()))
    assert text.startswith("## ❌ Seatrial: Fail - level 1 failed at optimizer")
    assert "measured NaN" in text
    assert text.index("Deliverable") < text.index("### Missed checks") < text.index("### Evidence")


def test_summary_is_cut_on_a_line_below_the_limit(tmp_path: Path) -> None:
    long = tuple(f"limit {number} " + "ü" * 2000 for number in range(600))
    text = step_summary(report(tmp_path, trial(level(limitations=long))))
    assert SUMMARY_LIMIT - 10_000 < len(text.encode()) < SUMMARY_LIMIT
    assert text.startswith("## ✅ Seatrial: Pass")
    assert text.endswith("report.html in the run directory has everything.\n")


def test_markup_in_recorded_text_is_escaped(tmp_path: Path) -> None:
    reason = "</td><img src=x onerror=alert(1)> | `code` [link](javascript:x)\n## Pass"
    text = step_summary(report(tmp_path, trial(level(verdict=Verdict.FAIL, reason=reason), verdict=Verdict.FAIL)))
    assert "<img" not in text
    assert "\\| `code` \\[link\\](javascript:x) ## Pass" in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == [text.splitlines()[0]]


def test_annotations_are_errors_for_fail_and_warnings_for_blocked(tmp_path: Path) -> None:
    assert ci.github_annotations(report(tmp_path, passed())) == []
    fail = ci.github_annotations(report(tmp_path / "f", failed()))
    assert fail[0].startswith("::error title=Seatrial%3A Fail::level 1 failed")
    assert all(line.startswith("::error ") for line in fail)
    blocked = ci.github_annotations(report(tmp_path / "b", blocked_preflight()))
    assert all(line.startswith("::warning ") for line in blocked)
    assert "not evidence against the change" in blocked[0]


def test_annotations_are_one_line_each_and_escaped(tmp_path: Path) -> None:
    miss = check("a, b: 100%", passed=False, message="first\n::set-output name=x::y\r\nlast 5%")
    lines = ci.github_annotations(report(tmp_path, trial(level(verdict=Verdict.FAIL, checks=(miss,)), verdict=Verdict.FAIL)))
    assert not [line for line in lines if "\n" in line or "\r" in line]
    assert any("%0A::set-output name=x::y%0Alast 5%25" in line for line in lines)
    assert all(line.startswith("::error title=") for line in lines)


def test_annotations_are_capped_and_say_so(tmp_path: Path) -> None:
    checks = tuple(check(f"check {number}", passed=False) for number in range(25))
    lines = ci.github_annotations(report(tmp_path, trial(level(verdict=Verdict.FAIL, checks=checks), verdict=Verdict.FAIL)))
    assert len(lines) == ANNOTATION_LIMIT
    assert lines[-1] == "::error title=Seatrial::18 more; see the step summary and report.html"


def test_publish_only_inside_github_actions(tmp_path: Path) -> None:
    target = tmp_path / "summary"
    built = report(tmp_path, failed())
    assert publish(built, {"GITHUB_STEP_SUMMARY": str(target)}) == []
    assert not target.exists()
    target.write_text("earlier\n")
    lines = publish(built, {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(target)})
    assert lines == ci.github_annotations(built)
    assert target.read_text() == "earlier\n" + step_summary(built)


def test_publish_keeps_the_whole_file_below_the_cap(tmp_path: Path) -> None:
    target = tmp_path / "summary"
    target.write_text("x" * (SUMMARY_LIMIT - 900))
    publish(report(tmp_path, failed()), {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(target)})
    assert SUMMARY_LIMIT - 900 < target.stat().st_size < SUMMARY_LIMIT
    target.write_text("x" * SUMMARY_LIMIT)
    publish(report(tmp_path, failed()), {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(target)})
    assert target.stat().st_size == SUMMARY_LIMIT


def test_publish_says_when_it_cannot_write(tmp_path: Path) -> None:
    built = report(tmp_path, passed())
    (line,) = publish(built, {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "no" / "file")})
    assert line.startswith("::warning title=Seatrial::")
    assert publish(built, {"GITHUB_ACTIONS": "true"}) == []
