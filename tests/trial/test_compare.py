"""What is said of a deliverable with the change and without it; above all, when a failure is called pre-existing."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.records import CheckResult, Comparison, Diagnosis, LevelResult, PhaseOutcome, Plan, RepoState, SideResult, Trial
from seatrial.core.verdict import Boundary, Verdict
from seatrial.report.outcomes import DOUBT
from seatrial.trial.compare import contrast

PASS, FAIL, BLOCKED, SKIPPED = Verdict.PASS, Verdict.FAIL, Verdict.BLOCKED, Verdict.SKIPPED


def trial(*levels: LevelResult, sides: tuple[SideResult, ...] = (), root: str = "/new") -> Trial:
    change = RepoState(name="x", path=root, commit="0" * 40, branch=None)
    plan = Plan(loop="toy", levels=(), model="m", changes=(change,))
    return Trial(id="t", seatrial="0", created="now", plan=plan, command=(), status="done", levels=levels, sides=sides)


def check(name: str, passed: bool = False, value: float | str | None = None) -> CheckResult:
    return CheckResult(name=name, passed=passed, value=value)


def level(verdict: Verdict = FAIL, **fields: object) -> LevelResult:
    base = LevelResult(number=0, name="smoke", title="Smoke", verdict=verdict, reason="why", boundary=Boundary.METRICS)
    return LevelResult.model_validate(base.model_dump() | fields)


def one(before: LevelResult, after: LevelResult) -> Comparison:
    (found,) = contrast(trial(before, root="/old"), Path("/a"), trial(after), Path("/b"))
    return found


@pytest.mark.parametrize(
    ("before", "after", "word", "note"),
    [
        (PASS, PASS, "pass", ""),
        (FAIL, PASS, "fixed", "failed on the baseline: why"),
        (PASS, FAIL, "newly broken", ""),
        (BLOCKED, FAIL, "not comparable", "Blocked on the baseline: why"),
        (PASS, BLOCKED, "not comparable", "Blocked here"),
        (SKIPPED, SKIPPED, "not comparable", "Skipped here; Skipped on the baseline: why"),
    ],
)
def test_the_word_for_each_pair(before: Verdict, after: Verdict, word: str, note: str) -> None:
    found = one(level(before), level(after))
    assert (found.word, found.note, found.before, found.after) == (word, note, before, after)


def test_without_a_counterpart_nothing_is_comparable() -> None:
    for old in (trial(level(PASS, number=1)), None):
        (found,) = contrast(old, Path("/a"), trial(level(FAIL)), Path("/b"))
        assert (found.word, found.before, found.note) == ("not comparable", None, "the baseline has no such deliverable")


def crash(cause: str, signature: str | None = None) -> Diagnosis:
    return Diagnosis(boundary=Boundary.REFIT, verdict=FAIL, cause=cause, signature=signature, milestone="model")


def cut(how: str) -> tuple[PhaseOutcome, ...]:
    return (PhaseOutcome.model_validate({"name": "run", "exit_code": None, "ended": how, "seconds": 3}),)


def bound(value: float | str) -> CheckResult:
    return CheckResult(name="a", passed=False, value=value, threshold="< 1.05")


SAME = [
    (level(checks=(bound(1.07),)), level(checks=(bound(1.08),)), "a: measured 1.08, on the baseline 1.07"),
    (level(checks=(bound("NaN"),)), level(checks=(bound(1.08),)), f"a: measured 1.08, on the baseline 'NaN': {DOUBT}"),
    (
        level(checks=(check("a < 1", value=1.25),)),
        level(checks=(check("a < 1", value=1.25),)),
        "bit-identical value on the baseline (1.25)",
    ),
    (level(checks=(check("a < 1", value=1.2),)), level(checks=(check("a < 1", value=9.0),)), "a < 1: measured 9.0, on the baseline 1.2"),
    (level(checks=(check("a < 1", value="NaN"),)), level(checks=(check("a < 1", value="NaN"),)), "a < 1, as on the baseline"),
    (level(checks=(check("a < 1"), check("b"))), level(checks=(check("a < 1"), check("b", True))), "a < 1, as on the baseline"),
    (level(diagnosis=crash("x", "known")), level(diagnosis=crash("x", "known")), "known, as on the baseline"),
    (level(diagnosis=crash("x", "known")), level(diagnosis=crash("y", "known")), f"known: y, on the baseline x: {DOUBT}"),
    (
        level(checks=(check("a", value="2 of 9"),)),
        level(checks=(check("a", value="3 of 9"),)),
        f"measured '3 of 9', on the baseline '2 of 9': {DOUBT}",
    ),
    (
        level(diagnosis=crash("E: /old/a.py at 0x7f1")),
        level(diagnosis=crash("E: /new/a.py at 0x9e2")),
        "E: CHECKOUT/a.py at 0x, as on the baseline",
    ),
    (level(phases=cut("stalled"), reason="3 s"), level(phases=cut("stalled"), reason="4 s"), "run stalled after the milestone None"),
    (level(reason="same"), level(reason="same"), "same, as on the baseline"),
    (
        level(diagnosis=crash("TimeoutError: no answer from /run/baseline/x after 30.2 s")),
        level(diagnosis=crash("TimeoutError: no answer from /run/x after 30.4 s")),
        "no answer from /run/x after 30.4 s, on the baseline TimeoutError",
    ),
    (
        level(diagnosis=crash("x after 3 s", "known")),
        level(diagnosis=crash("x after 4 s", "known")),
        "x after 4 s, on the baseline x after 3 s",
    ),
]


@pytest.mark.parametrize(("before", "after", "note"), SAME)
def test_the_same_failure_is_pre_existing(before: LevelResult, after: LevelResult, note: str) -> None:
    found = one(before, after)
    assert (found.word, note in found.note) == ("fail (pre-existing)", True), found.note
    assert found.excuses is (DOUBT not in found.note)


def test_a_failure_behind_that_of_the_baseline_is_not_comparable() -> None:
    found = one(level(steps_reached=None, reason="no import"), level(steps_reached=2, reason="other"))
    assert (found.word, found.excuses) == ("not comparable", False)
    assert "what fails at step 2 was never reached there: the baseline failed before that, at step 0" in found.note


OTHER = [
    (level(checks=(check("a"),)), level(checks=(check("b"),)), "on the baseline at metrics: a, now at metrics: b"),
    (level(checks=(check("a"),)), level(checks=(check("a"),), boundary=Boundary.REFIT), "now at refit: a"),
    (level(checks=(check("a"), check("b", True))), level(checks=(check("a"), check("b"))), "missed now and not on the baseline: b"),
    (
        level(diagnosis=crash("x", "known")),
        level(diagnosis=crash("x", "known"), checks=(check("b"),)),
        "missed now and not on the baseline: b",
    ),
    (level(diagnosis=crash("x", "one")), level(diagnosis=crash("x", "two")), "one, now at metrics: two"),
    (level(diagnosis=crash("x")), level(diagnosis=crash("y")), "x, now at metrics: y"),
    (level(phases=cut("stalled")), level(phases=cut("deadline")), "run stalled after"),
    (
        level(checks=(check("a"),), steps_reached=2, steps_expected=3),
        level(checks=(check("a"),), steps_reached=1, steps_expected=3),
        "came to step 1, on the baseline to step 2",
    ),
    (level(reason="one"), level(reason="two"), "one, now at metrics: two"),
    (level(checks=(bound(1.06),)), level(checks=(bound(1.09),)), "by more than on the baseline: a: measured 1.09, on the baseline 1.06"),
    (
        level(diagnosis=crash("x", "known"), steps_reached=9),
        level(diagnosis=crash("x", "known"), steps_reached=1),
        "came to step 1, on the baseline to step 9",
    ),
    (level(checks=(bound(1.06),)), level(checks=(bound("NaN"),)), "a: measured 'NaN', on the baseline 1.06"),
    (level(checks=(check("x"), bound(1.06))), level(checks=(check("x"), bound(9.0))), "a: measured 9.0, on the baseline 1.06"),
]


@pytest.mark.parametrize(("before", "after", "note"), OTHER)
def test_another_failure_excuses_nothing(before: LevelResult, after: LevelResult, note: str) -> None:
    found = one(before, after)
    assert (found.word, note in found.note) == ("newly broken", True), found.note
    assert found.note.startswith("fails differently: ")


def side(verdict: Verdict) -> SideResult:
    return SideResult(key="own", name="Own tests", verdict=verdict, reason="why", directory="sides/own")


def failing(directory: Path, *names: str, message: str = "x") -> Path:
    place = directory / "sides" / "own"
    place.mkdir(parents=True)
    rows = "".join(f"<testcase classname='t' name='{name}'><failure message='{message}'/></testcase>" for name in names)
    (place / "junit.xml").write_text(f"<testsuite>{rows}<testcase name='good'/></testsuite>")
    return directory


@pytest.mark.parametrize(
    ("before", "after", "word", "note"),
    [
        ("ab", "a", "fail (pre-existing)", "the same tests fail on the baseline: t::a"),
        ("a", "abcde", "newly broken", "do not fail on the baseline: t::b, t::c, t::d and 1 more"),
        ("", "a", "newly broken", "which tests failed is not known"),
    ],
)
def test_tests_are_compared_by_name(tmp_path: Path, before: str, after: str, word: str, note: str) -> None:
    old, new = failing(tmp_path / "old", *before), failing(tmp_path / "new", *after)
    (found,) = contrast(trial(sides=(side(FAIL),)), old, trial(sides=(side(FAIL),)), new)
    assert (found.deliverable, found.word, note in found.note) == ("Own tests", word, True), found.note


@pytest.mark.parametrize(
    ("before", "after", "word", "note"),
    [
        ("E: at 0x1f", "E: at 0x2e", "fail (pre-existing)", "the same tests fail on the baseline: t::a"),
        ("E: 1", "E: 2", "fail (pre-existing)", "with other messages: t::a: E: 2, on the baseline E: 1"),
        ("assert 0", "ImportError: x", "newly broken", "fails differently: t::a: ImportError: x, on the baseline assert 0"),
        ("assert 1 == 2", "AssertionError: y", "fail (pre-existing)", DOUBT),
    ],
)
def test_a_test_that_fails_by_another_exception_is_newly_broken(tmp_path: Path, before: str, after: str, word: str, note: str) -> None:
    old, new = failing(tmp_path / "old", "a", message=before), failing(tmp_path / "new", "a", message=after)
    (found,) = contrast(trial(sides=(side(FAIL),)), old, trial(sides=(side(FAIL),)), new)
    assert (found.word, note in found.note) == (word, True), found.note


def test_tests_that_left_no_names_are_not_excused(tmp_path: Path) -> None:
    (found,) = contrast(trial(sides=(side(FAIL),)), tmp_path, trial(sides=(side(FAIL),)), failing(tmp_path / "new", "a"))
    assert found.word == "newly broken"
    (found,) = contrast(trial(sides=(side(PASS),)), tmp_path, trial(sides=(side(PASS),)), tmp_path)
    assert found.word == "pass"
