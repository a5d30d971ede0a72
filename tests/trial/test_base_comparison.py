"""What the comparison with the base makes of a verdict; nothing makes a Pass."""

from __future__ import annotations

from typing import Any

import pytest

from seatrial.core.records import (
    Baseline,
    BitComparison,
    BitDifference,
    Comparison,
    Diagnosis,
    LevelResult,
    NoBase,
    Plan,
    RepoState,
    SideResult,
    Trial,
)
from seatrial.core.verdict import Boundary, Verdict
from seatrial.trial.baseline import own, settle

PASS, FAIL, BLOCKED, SKIPPED = Verdict.PASS, Verdict.FAIL, Verdict.BLOCKED, Verdict.SKIPPED
REPO = RepoState(name="pkg", path="/repo", commit="2" * 40, branch=None, changed=("pkg/a.py",), base="1" * 40)


def level(verdict: Verdict = FAIL, **more: Any) -> LevelResult:
    return LevelResult(number=0, name="smoke", title="Smoke", verdict=verdict, reason="why", boundary=Boundary.PROVIDER, **more)


def crash(exception: str, *frames: str) -> Diagnosis:
    return Diagnosis(verdict=FAIL, boundary=Boundary.PROVIDER, cause=f"{exception}: x", exception=exception, excerpt=frames)


def trial(*levels: LevelResult, sides: tuple[SideResult, ...] = ()) -> Trial:
    plan = Plan(loop="fake", levels=(), model="tiny", changes=(REPO,))
    return Trial(id="t", seatrial="0", created="", plan=plan, command=(), status="done", levels=levels, sides=sides)


def base(word: str = "", bits: BitComparison | None = None, **more: Any) -> Baseline:
    made = [Comparison(deliverable="level 0 (Smoke)", before=FAIL, after=FAIL, word=word, **_excuses(word))] if word else []  # type: ignore[arg-type]
    return Baseline(source="pkg 111", origin="base", comparisons=tuple(made), bits=(bits,) if bits else (), **more)


def _excuses(word: str) -> dict[str, bool]:
    return {"excuses": word == "fail (pre-existing)"}


def settled(one: LevelResult, beside: Baseline) -> LevelResult:
    (level,), _ = settle(trial(one), beside)
    restored = own(trial(level)).levels[0]
    assert restored.model_copy(update={"follow_ups": one.follow_ups}) == one, "its own verdict is kept"
    assert settle(trial(restored), beside)[0] == (level,), "twice is once"
    return level


def test_a_failure_that_the_base_has_too_is_blocked() -> None:
    found = settled(level(), base("fail (pre-existing)"))
    assert (found.verdict, found.reason) == (
        BLOCKED,
        "the base (pkg 111) fails in the same way, so this says nothing about the change: why",
    )


@pytest.mark.parametrize("word", ["newly broken", "not comparable"])
def test_another_failure_stays(word: str) -> None:
    assert settled(level(steps_reached=3), base(word)) == level(steps_reached=3)


@pytest.mark.parametrize("verdict", [PASS, BLOCKED, SKIPPED])
@pytest.mark.parametrize("absent", ["unknown", "same files", "switched off", "cluster", None])
def test_what_is_no_fail_stays(verdict: Verdict, absent: NoBase | None) -> None:
    assert settled(level(verdict), base(absent=absent)).verdict is verdict


@pytest.mark.parametrize(
    ("absent", "one", "verdict"),
    [
        ("unknown", level(), BLOCKED),
        ("unknown", level(steps_reached=0, diagnosis=crash("RuntimeError")), BLOCKED),
        ("unknown", level(steps_reached=3), FAIL),
        ("unknown", level(steps_reached=3, diagnosis=crash("ModuleNotFoundError")), BLOCKED),
        ("same files", level(steps_reached=3), BLOCKED),
        ("switched off", level(diagnosis=crash("ImportError")), FAIL),
        ("fault", level(diagnosis=crash("ImportError")), FAIL),
        ("cluster", level(diagnosis=crash("ImportError", 'File "/env/x.py"')), BLOCKED),
        ("cluster", level(diagnosis=crash("ImportError", 'File "/repo/pkg/a.py", line 3')), FAIL),
        ("cluster", level(diagnosis=crash("ImportError", 'File "/repo/pkg/b.py", line 3')), BLOCKED),
        ("cluster", level(diagnosis=crash("RuntimeError")), FAIL),
        ("cluster", level(), FAIL),
        (None, level(diagnosis=crash("ImportError")), BLOCKED),
        (None, level(steps_reached=1, diagnosis=crash("ImportError")), FAIL),
    ],
)
def test_without_a_comparison_only_what_cannot_be_the_changes_is_blocked(absent: NoBase | None, one: LevelResult, verdict: Verdict) -> None:
    found = settled(one, base("" if absent else "not comparable", absent=absent))
    assert found.verdict is verdict, found.reason
    if absent == "unknown" and verdict is BLOCKED:
        assert "name the state before the change, so that it is run beside it: --base REV" in found.follow_ups


SAME = BitComparison(level=0, outcome="identical", compared=3)
DIFFERENCE = BitDifference(phase="run", source="record", step=2, stage="reward", name="r", expected="1", found="2")
OTHER = BitComparison(level=0, outcome="differs", difference=DIFFERENCE)
NONE = BitComparison(level=0, outcome="not comparable", reason="torn")


@pytest.mark.parametrize(
    ("one", "beside", "verdict", "boundary", "reason"),
    [
        (level(PASS), base("pass", SAME), PASS, Boundary.PROVIDER, "why"),
        (level(PASS), base("pass", OTHER), FAIL, Boundary.REWARD, "first differs at step 2, stage reward, in r: 2, on the base 1"),
        (level(PASS), base("fixed", OTHER), BLOCKED, Boundary.ENVIRONMENT, "the base itself fails"),
        (level(PASS), base("pass", NONE), BLOCKED, Boundary.ENVIRONMENT, "no comparison with the base was possible: torn"),
        (level(PASS), base(absent="unknown", notes=("n",)), BLOCKED, Boundary.ENVIRONMENT, "was possible: n"),
        (level(), base("fail (pre-existing)", SAME), BLOCKED, Boundary.PROVIDER, "fails in the same way"),
        (level(), base("fail (pre-existing)", OTHER), FAIL, Boundary.REWARD, "not identical"),
        (level(steps_reached=1), base("newly broken", NONE), FAIL, Boundary.PROVIDER, "why"),
        (level(BLOCKED), base(), BLOCKED, Boundary.PROVIDER, "why"),
        (level(SKIPPED), base(), SKIPPED, Boundary.PROVIDER, "why"),
    ],
)
def test_what_is_expected_to_be_identical(one: LevelResult, beside: Baseline, verdict: Verdict, boundary: Boundary, reason: str) -> None:
    found = settled(one, beside.model_copy(update={"expect": "identical"}))
    assert (found.verdict, found.boundary) == (verdict, boundary), found.reason
    assert reason in found.reason


def test_a_difference_alone_changes_nothing() -> None:
    assert settled(level(PASS), base("pass", OTHER)) == level(PASS)


def side(**more: Any) -> SideResult:
    return SideResult(key="own", name="Own", verdict=FAIL, reason="2 failed", **more)


@pytest.mark.parametrize(
    ("one", "beside", "verdict"),
    [
        (side(passed=3), base(absent="unknown"), FAIL),
        (side(), base(absent="unknown"), BLOCKED),
        (side(passed=3), base(absent="same files"), BLOCKED),
        (side(gate=True), base(absent="same files"), FAIL),
        (side(), base(absent="switched off"), FAIL),
        (side(), base(), FAIL),
    ],
)
def test_tests_before_the_levels(one: SideResult, beside: Baseline, verdict: Verdict) -> None:
    _, (found,) = settle(trial(sides=(one,)), beside)
    assert found.verdict is verdict
    assert own(trial(sides=(found,))).sides == (one,)


def test_tests_that_fail_on_the_base_too_are_blocked() -> None:
    word = Comparison(deliverable="Own", before=FAIL, after=FAIL, word="fail (pre-existing)", excuses=True)
    _, (found,) = settle(trial(sides=(side(passed=1),)), Baseline(source="x", comparisons=(word,)))
    assert found.verdict is BLOCKED
