"""The rules of the judge, their order, and the promise: Pass only if everything holds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any, Literal

import pytest

from seatrial.core.loop import Vacuity
from seatrial.core.records import CheckResult, Diagnosis, PhaseOutcome
from seatrial.core.series import Damage, Metrics, Series
from seatrial.core.specs import Milestone
from seatrial.core.verdict import Boundary, Verdict
from seatrial.trial.judge import Evidence, Judgement, judge

MILESTONES = (
    Milestone(id="imports", pattern="i", boundary=Boundary.CONFIG, verdict=Verdict.BLOCKED),
    Milestone(id="model", pattern="m", boundary=Boundary.PROVIDER),
    Milestone(id="done", pattern="d", boundary=Boundary.CHECKPOINT),
)
Ended = Literal["exited", "deadline", "stalled", "interrupted", "lost"]


def phase(code: int | None = 0, ended: Ended = "exited", name: str = "run") -> PhaseOutcome:
    return PhaseOutcome(name=name, exit_code=code, ended=ended, seconds=3)


def series(*values: float) -> Metrics:
    return Metrics(series={"train/loss": Series("train/loss", tuple(range(1, len(values) + 1)), values)})


DAMAGED = dataclasses.replace(series(0.1), damage=(Damage("metrics.jsonl", "line 2", 1, "the last line is torn"),))
MET = CheckResult(name="a", passed=True)
FALLEN = CheckResult(name="in force", kind="proof", passed=False, message="fell back", boundary=Boundary.CONFIG)
MISSED = CheckResult(name="b", passed=False, value=0.0, message="no gradient", boundary=Boundary.OPTIMIZER)
GOOD = Evidence(metrics=series(0.1, 0.2), checks=(MET,), diagnosis=Diagnosis(), phases=(phase(),), steps_expected=2, steps_reached=2)
CRASH = Diagnosis(boundary=Boundary.ROLLOUT, verdict=Verdict.FAIL, cause="RuntimeError: x", milestone="model")
BLOCK = Diagnosis(
    boundary=Boundary.DATA, verdict=Verdict.BLOCKED, cause="KeyError: 'prompt'", excerpt=('  File "/site/datasets/a.py", line 1, in f',)
)


def decide(**changes: Any) -> Judgement:
    return judge(dataclasses.replace(GOOD, **changes), MILESTONES)


def test_everything_holds() -> None:
    assert decide() == Judgement(Verdict.PASS, "1 checks met, 2 of 2 steps reached")


RULES: list[tuple[dict[str, Any], Verdict, Boundary, str]] = [
    ({"wrong_imports": ("driver: imported x from y",)}, Verdict.BLOCKED, Boundary.ENVIRONMENT, "wrong import: driver: imported x from y"),
    ({"phases": (phase(None, "interrupted"),)}, Verdict.BLOCKED, Boundary.ENVIRONMENT, "interrupted by a signal after 3 s"),
    ({"phases": (phase(None, "lost"),)}, Verdict.BLOCKED, Boundary.ENVIRONMENT, "Seatrial was killed while it ran"),
    ({"phases": (phase(None, "deadline"),)}, Verdict.BLOCKED, Boundary.ENVIRONMENT, "before any milestone"),
    (
        {"phases": (phase(1),), "diagnosis": None},
        Verdict.BLOCKED,
        Boundary.ENVIRONMENT,
        "exit code 1 after all 2 steps (1 of 1 checks met), before any milestone, w",
    ),
    (
        {"phases": (phase(1),), "diagnosis": CRASH},
        Verdict.FAIL,
        Boundary.ROLLOUT,
        "run: exit code 1 after all 2 steps (1 of 1 checks met): RuntimeError: x",
    ),
    ({"phases": (phase(1),), "diagnosis": BLOCK}, Verdict.BLOCKED, Boundary.DATA, "KeyError: 'prompt'"),
    ({"phases": (phase(137),), "diagnosis": Diagnosis(milestone="done")}, Verdict.FAIL, Boundary.CHECKPOINT, "after the milestone 'done'"),
    ({"diagnosis": CRASH}, Verdict.FAIL, Boundary.ROLLOUT, "exit code 0, yet: RuntimeError: x"),
    ({"steps_reached": None}, Verdict.FAIL, Boundary.METRICS, "no training step is shown"),
    ({"steps_reached": 1}, Verdict.FAIL, Boundary.METRICS, "reached step 1 of 2"),
    ({"metrics": DAMAGED}, Verdict.FAIL, Boundary.METRICS, "metrics are damaged: metrics.jsonl: line 2: the last line is torn"),
    ({"metrics": series(0.1, math.nan)}, Verdict.FAIL, Boundary.METRICS, "train/loss is not finite at step 2"),
    ({"metrics": series(math.inf, 0.1)}, Verdict.FAIL, Boundary.METRICS, "train/loss is not finite at step 1"),
    ({"vacuous": Vacuity("vacuous: no reward variance")}, Verdict.BLOCKED, Boundary.REWARD, "vacuous: no reward variance"),
    (
        {"checks": (FALLEN,)},
        Verdict.BLOCKED,
        Boundary.CONFIG,
        "vacuous: the run was not the one that the level claims: in force: fell back",
    ),
    ({"checks": (FALLEN,), "loop_under_test": True}, Verdict.FAIL, Boundary.CONFIG, "missed: in force: fell back"),
    ({"checks": (MET, MISSED)}, Verdict.FAIL, Boundary.OPTIMIZER, "missed: b (measured 0.0): no gradient"),
    ({"checks": ()}, Verdict.BLOCKED, Boundary.METRICS, "nothing was asserted"),
]


@pytest.mark.parametrize(("changes", "verdict", "boundary", "reason"), RULES)
def test_each_rule_alone(changes: dict[str, Any], verdict: Verdict, boundary: Boundary, reason: str) -> None:
    found = decide(**changes)
    assert (found.verdict, found.boundary) == (verdict, boundary)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("ended", "milestone", "verdict", "boundary"),
    [
        ("deadline", None, Verdict.BLOCKED, Boundary.ENVIRONMENT),
        ("stalled", "imports", Verdict.BLOCKED, Boundary.CONFIG),
        ("deadline", "model", Verdict.FAIL, Boundary.PROVIDER),
        ("stalled", "done", Verdict.FAIL, Boundary.CHECKPOINT),
        ("stalled", "one that the loop does not know", Verdict.BLOCKED, Boundary.ENVIRONMENT),
    ],
)
def test_a_run_that_seatrial_ended_is_placed_by_its_last_milestone(
    ended: Ended, milestone: str | None, verdict: Verdict, boundary: Boundary
) -> None:
    found = decide(phases=(phase(None, ended),), diagnosis=Diagnosis(milestone=milestone))
    assert (found.verdict, found.boundary) == (verdict, boundary)
    assert ("stalled" if ended == "stalled" else "deadline") in found.reason


# Each item violates one rule; an earlier one in this list must decide over every later one.
PRIORITY: list[dict[str, Any]] = [
    {"wrong_imports": ("w",)},
    {"phases": (phase(None, "interrupted"),)},
    {"phases": (phase(1),)},
    {"diagnosis": CRASH},
    {"steps_reached": 1},
    {"metrics": DAMAGED},
    {"metrics": series(math.nan, math.nan)},
    {"vacuous": Vacuity("vacuous: v")},
    {"checks": (MISSED,)},
]


PAIRS = [(a, b) for a, b in itertools.combinations(range(len(PRIORITY)), 2) if PRIORITY[a].keys() != PRIORITY[b].keys()]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_order_of_the_rules(first: int, second: int) -> None:
    alone, both = decide(**PRIORITY[first]), decide(**PRIORITY[second], **PRIORITY[first])
    if (first, second) == (2, 3):  # the log explains the exit code
        assert (both.verdict, both.boundary) == (Verdict.FAIL, Boundary.ROLLOUT)
        return
    reasons = [re.sub(r" after all \d+ steps \(.*? met\)", "", judgement.reason) for judgement in (both, alone)]
    assert (both.verdict, both.boundary, reasons[0]) == (alone.verdict, alone.boundary, reasons[1])


@pytest.mark.parametrize(
    ("run", "verdict"), [("full", Verdict.FAIL), ("full/1", Verdict.FAIL), ("delta", Verdict.BLOCKED), ("actor", Verdict.BLOCKED)]
)
def test_a_vacuous_run_does_not_excuse_another_one(run: str, verdict: Verdict) -> None:
    missed = CheckResult(name="masked", kind="proof", passed=False, boundary=Boundary.ROLLOUT, run=run)
    phases = tuple(phase(0).model_copy(update={"name": run}) for run in ("full", "delta"))
    found = decide(vacuous=Vacuity("vacuous: v", Boundary.REFIT, "delta/"), checks=(missed,), phases=phases)
    assert (found.verdict, found.boundary) == (verdict, Boundary.ROLLOUT if verdict is Verdict.FAIL else Boundary.REFIT)


def test_settings_of_one_run_do_not_excuse_another_one() -> None:
    fallen = FALLEN.model_copy(update={"run": "lora"})
    expression = CheckResult(name='max(data["resume/train/loss"]) < 1', passed=False, boundary=Boundary.CHECKPOINT, run="resume")
    phases = tuple(phase(0).model_copy(update={"name": run}) for run in ("lora", "resume"))
    assert decide(checks=(fallen, expression), phases=phases).boundary is Boundary.CHECKPOINT
    alone = CheckResult(name='max(data["train/loss"]) < 1', passed=False, boundary=Boundary.METRICS)
    assert decide(checks=(fallen, alone), phases=phases).boundary is Boundary.CONFIG


def test_damage_comes_before_a_value_that_is_not_finite() -> None:
    both = Metrics(series=series(math.nan).series, damage=DAMAGED.damage)
    assert "damaged" in decide(metrics=both).reason


def test_an_earlier_phase_that_failed_decides() -> None:
    found = decide(phases=(phase(0, name="one"), phase(3, name="two")), diagnosis=CRASH)
    assert "two: exit code 3" in found.reason


@pytest.mark.parametrize(
    ("frame", "verdict"),
    [
        ('  File "/src/checkout/pkg/a.py", line 3, in f', Verdict.FAIL),
        ('  File "/src/checkout-2/pkg/a.py", line 3, in f', Verdict.BLOCKED),
        ("    text that says /src/checkout/pkg/a.py", Verdict.BLOCKED),
    ],
)
def test_an_exception_in_a_file_of_the_change_is_never_beside_it(frame: str, verdict: Verdict) -> None:
    diagnosis = BLOCK.model_copy(update={"excerpt": (frame, "KeyError: 'prompt'")})
    found = decide(phases=(phase(1),), diagnosis=diagnosis, change_roots=("/src/checkout",))
    assert (found.verdict, found.boundary) == (verdict, Boundary.PROVIDER if verdict is Verdict.FAIL else Boundary.DATA)


def test_files_of_an_unknown_run_stop_where_their_log_stops() -> None:
    before = decide(phases=(), steps_reached=None)
    assert (before.verdict, before.boundary) == (Verdict.BLOCKED, Boundary.ENVIRONMENT)
    after = decide(phases=(), steps_reached=None, diagnosis=Diagnosis(milestone="model"))
    assert (after.verdict, after.boundary) == (Verdict.FAIL, Boundary.PROVIDER)
    finished = decide(phases=(), steps_reached=None, diagnosis=Diagnosis(milestone="done"))
    assert (finished.verdict, finished.boundary) == (Verdict.FAIL, Boundary.METRICS)
    assert "damaged" in decide(steps_reached=None, metrics=DAMAGED).reason
    assert decide(phases=(), diagnosis=CRASH).reason == "the log shows a failure: RuntimeError: x"


def test_many_steps_that_are_not_finite_are_cut_short() -> None:
    assert decide(metrics=series(*[math.nan] * 9)).reason.endswith("at step 1, 2, 3, 4, 5 …")


def test_several_missed_checks_are_counted() -> None:
    assert decide(checks=(MISSED, MET, MISSED, MISSED)).reason.endswith(", and 2 more")


def test_steps_that_nobody_planned_are_reported_as_they_are() -> None:
    assert decide(steps_expected=None).reason == "1 checks met, 2 steps reached"
    assert decide(steps_reached=5).verdict is Verdict.PASS


def test_pass_only_if_everything_holds() -> None:
    """All combinations of good and bad inputs: Pass exactly where every input is good."""
    good: dict[str, list[Any]] = {
        "wrong_imports": [(), ("w",)],
        "phases": [(phase(),), (phase(1),), (phase(None, "deadline"),), (phase(), phase(None, "interrupted")), ()],
        "diagnosis": [Diagnosis(), None, CRASH, BLOCK],
        "steps_reached": [2, None, 1],
        "metrics": [series(0.1, 0.2), DAMAGED, series(0.1, math.nan)],
        "vacuous": [None, Vacuity("vacuous: v")],
        "checks": [(MET,), (), (MISSED,), (MET, MISSED)],
    }
    allowed: dict[str, list[Any]] = {"phases": [(phase(),), ()], "diagnosis": [Diagnosis(), None]}
    passed = 0
    for values in itertools.product(*good.values()):
        inputs = dict(zip(good, values, strict=True))
        found = decide(**inputs)
        holds = all(value in allowed.get(key, [good[key][0]]) for key, value in inputs.items())
        assert (found.verdict is Verdict.PASS) == holds, (inputs, found)
        assert found.boundary is not None or holds
        passed += holds
    assert passed == 4


def test_a_stall_that_triage_knows_is_named() -> None:
    known = Diagnosis(boundary=Boundary.CLUSTER, verdict=Verdict.BLOCKED, cause="units: 8", signature="waits-for-cpus", milestone="imports")
    found = decide(phases=(phase(None, "stalled"),), diagnosis=known)
    assert (found.verdict, found.boundary) == (Verdict.BLOCKED, Boundary.CONFIG)
    assert found.reason.endswith("after the milestone 'imports'; waits-for-cpus: units: 8")


def test_a_process_that_ran_is_never_skipped() -> None:
    nothing = Diagnosis(boundary=Boundary.CONFIG, verdict=Verdict.SKIPPED, cause="+ A=1", signature="dry-run")
    assert decide(diagnosis=nothing).verdict is Verdict.BLOCKED
    assert decide(diagnosis=nothing, phases=(phase(1),)).verdict is Verdict.BLOCKED
    found = decide(diagnosis=nothing, phases=())
    assert (found.verdict, found.boundary, found.reason) == (Verdict.SKIPPED, Boundary.CONFIG, "nothing was run: + A=1")
