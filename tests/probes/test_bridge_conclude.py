"""The verdict of a whole probe: own tests and edits only ever make it worse."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.records import RepoState
from seatrial.core.verdict import Boundary, Verdict
from seatrial.probes import bridge_run
from seatrial.probes.bridge_run import BridgeSetup
from seatrial.probes.bridge_verdict import BridgeRequest, JudgedBridgeProbe
from seatrial.probes.own_tests import OwnTests

PASS = JudgedBridgeProbe(verdict=Verdict.PASS, reason="all of it", limitations=("old",))
BRIDGE = RepoState(
    name="bridge", path="/b", commit="0" * 40, branch=None, packages=("megatron.bridge",), base="main", changed=("src/a.py",)
)


def setup(*changes: RepoState) -> BridgeSetup:
    return BridgeSetup(
        asked=BridgeRequest(models=("qwen2",), rungs=()), python=Path("python"), out=Path("out"), deadline_s=60, changes=changes
    )


def silent(_: str) -> None:
    """Nobody listens."""


@pytest.mark.parametrize(
    ("ladder", "tests", "both", "boundary"),
    [
        (Verdict.PASS, Verdict.PASS, Verdict.PASS, None),
        (Verdict.PASS, Verdict.FAIL, Verdict.FAIL, Boundary.PROVIDER),
        (Verdict.PASS, Verdict.BLOCKED, Verdict.BLOCKED, Boundary.ENVIRONMENT),
        (Verdict.FAIL, Verdict.PASS, Verdict.FAIL, None),
    ],
)
def test_the_worse_of_both_counts(ladder: Verdict, tests: Verdict, both: Verdict, boundary: Boundary | None) -> None:
    found = OwnTests(verdict=tests, reason="why", notes=("n",), dead=("a", "b", "c", "d"))
    judged = bridge_run.joined(PASS.model_copy(update={"verdict": ladder}), found)
    assert (judged.verdict, judged.boundary, judged.own_tests) == (both, boundary, found)
    assert judged.reason == ("all of it" if ladder is both else "the Bridge's own tests: why")
    assert judged.limitations == ("old", "own tests: n")
    assert judged.follow_ups == ("4 paths that upstream's skills name are dead: a; b; c; all in probe.json",)


def test_tests_run_only_for_a_change_of_a_bridge_and_in_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def ran(*words: object) -> OwnTests:
        given.extend(words)
        return OwnTests(verdict=Verdict.PASS, reason="")

    monkeypatch.setattr(bridge_run, "own_tests", ran)
    assert bridge_run.run_own_tests(setup(), PASS, 9, silent) == PASS
    unknown = bridge_run.run_own_tests(setup(BRIDGE.model_copy(update={"base": None})), PASS, 9, silent)
    assert (unknown.verdict, unknown.own_tests) == (Verdict.PASS, None)
    assert "no change against a base is known" in unknown.limitations[-1]
    late = bridge_run.run_own_tests(setup(BRIDGE), PASS, -1, silent)
    assert late.verdict is Verdict.BLOCKED
    assert "no time was left of the deadline" in late.reason
    assert not given
    assert bridge_run.run_own_tests(setup(BRIDGE), PASS, 9, silent).verdict is Verdict.PASS
    assert given[3:5] == [9, "main"]


def test_an_edit_takes_a_pass_back_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fail = PASS.model_copy(update={"verdict": Verdict.FAIL})
    monkeypatch.setattr(bridge_run, "differs", lambda *_: None)
    assert bridge_run.unless_edited(PASS, (BRIDGE,), tmp_path) == PASS
    monkeypatch.setattr(bridge_run, "differs", lambda *_: "a.py")
    assert bridge_run.unless_edited(fail, (BRIDGE,), tmp_path) == fail
    edited = bridge_run.unless_edited(PASS, (BRIDGE,), tmp_path)
    assert (edited.verdict, edited.reason) == (Verdict.BLOCKED, "/b was edited while it was probed: a.py")


def test_a_checkout_without_its_tests_is_no_worse_for_it() -> None:
    found = OwnTests(verdict=Verdict.SKIPPED, reason="none of the focused tests exists")
    judged = bridge_run.joined(JudgedBridgeProbe(verdict=Verdict.PASS, reason="all"), found)
    assert (judged.verdict, judged.reason) == (Verdict.PASS, "all")
    assert judged.limitations == ("own tests: none ran: none of the focused tests exists",)
