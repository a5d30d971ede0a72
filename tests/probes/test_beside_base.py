"""A ladder that failed, beside the base: what it has too is Blocked, what nobody compared is held against no one without a measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError
from seatrial.core.records import CheckResult
from seatrial.core.verdict import Boundary, Verdict
from seatrial.evidence.repos import repo_state
from seatrial.probes import bridge_run as module
from seatrial.probes.bridge_run import BridgeSetup
from seatrial.probes.bridge_verdict import BridgeRequest, FamilyResult, JudgedBridgeProbe, RungResult
from tests.trial.conftest import commit, git

FAIL = Verdict.FAIL


def judged(*missed: str, raised: str = "", verdict: Verdict = FAIL) -> JudgedBridgeProbe:
    """A ladder with one rung, which measured or raised."""
    checks = tuple(CheckResult(name=name, passed=False, value=1.0, threshold="< 0.5") for name in missed)
    rung = RungResult(rung="parity", title="t", verdict=verdict, reason=raised or "missed", checks=checks)
    return JudgedBridgeProbe(
        verdict=verdict,
        reason="because",
        boundary=Boundary.PROVIDER,
        families=(FamilyResult(model="qwen2", verdict=verdict, reason="r", rungs=(rung,)),),
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "bridge"
    place.mkdir()
    git(place, "init", "-q")
    commit(place, {"src/megatron/bridge/__init__.py": "a = 1\n"})
    return place


def setup_of(root: Path, base: str | None) -> BridgeSetup:
    state = repo_state(root, "bridge").model_copy(update={"base": base})
    asked = BridgeRequest(models=("qwen2",), rungs=("parity",))
    return BridgeSetup(asked=asked, python=root, out=root.parent / "out", deadline_s=60, changes=(state,))


def beside(
    root: Path, now: JudgedBridgeProbe, before: JudgedBridgeProbe | Exception, monkeypatch: pytest.MonkeyPatch, **more: Any
) -> tuple[JudgedBridgeProbe, list[BridgeSetup]]:
    """The verdict of a dirty checkout beside its base."""
    (root / "src/megatron/bridge/__init__.py").write_text("a = 2\n")
    seen: list[BridgeSetup] = []

    def prove(setup: BridgeSetup, _: object) -> JudgedBridgeProbe:
        seen.append(setup)
        if isinstance(before, Exception):
            raise before
        return before

    monkeypatch.setattr(module, "probe_bridge", prove)
    given = setup_of(root, more.get("base", git(root, "rev-parse", "HEAD")))
    return module.beside_base(given, now, more.get("left", 600.0), lambda _: None), seen


@pytest.mark.parametrize(
    ("now", "before", "verdict", "words"),
    [
        (judged("a"), judged("a"), Verdict.BLOCKED, "fails in the same way"),
        (judged("a"), judged("b"), FAIL, "this is new: qwen2: parity: a"),
        (judged("a"), judged(verdict=Verdict.PASS), FAIL, "this is new: qwen2: parity: a"),
        (judged(raised="ImportError: x"), judged(raised="ImportError: x"), Verdict.BLOCKED, "fails in the same way"),
        (judged(raised="ImportError: y"), judged(raised="ImportError: x"), FAIL, "this is new: qwen2: parity"),
        (judged("a"), judged(verdict=Verdict.BLOCKED), FAIL, "not compared with the state before the change: the base is Blocked"),
        (judged(raised="x"), judged(verdict=Verdict.BLOCKED), Verdict.BLOCKED, "nothing was compared: the base is Blocked"),
        (judged(raised="x"), BlockedError(Boundary.ENVIRONMENT, "no disk", ""), Verdict.BLOCKED, "cannot be run: no disk"),
    ],
)
def test_the_base_decides(
    root: Path, monkeypatch: pytest.MonkeyPatch, now: JudgedBridgeProbe, before: JudgedBridgeProbe | Exception, verdict: Verdict, words: str
) -> None:
    found, seen = beside(root, now, before, monkeypatch)
    assert (found.verdict, words in (found.reason if found.own else found.limitations[-1])) == (verdict, True), found
    assert (found.own is not None) is (verdict is Verdict.BLOCKED)
    (there,) = seen
    assert (there.changes[0].dirty, Path(there.changes[0].path).parent.name) == ((), "before-src")
    assert git(root, "worktree", "list").count("\n") == 0


@pytest.mark.parametrize(("now", "verdict"), [(judged("a"), FAIL), (judged(raised="x"), Verdict.BLOCKED), (judged("a", raised="x"), FAIL)])
@pytest.mark.parametrize("more", [{"base": None}, {"left": 1.0}])
def test_without_a_base_only_what_was_measured_is_a_fail(
    root: Path, monkeypatch: pytest.MonkeyPatch, now: JudgedBridgeProbe, verdict: Verdict, more: dict[str, Any]
) -> None:
    found, seen = beside(root, now, judged(), monkeypatch, **more)
    assert (found.verdict, seen) == (verdict, [])


def test_a_checkout_that_is_its_base_has_no_change_to_blame(root: Path) -> None:
    found = module.beside_base(setup_of(root, git(root, "rev-parse", "HEAD")), judged("a"), 600, lambda _: None)
    assert (found.verdict, found.reason.startswith("nothing differs from the base (bridge ")) == (Verdict.BLOCKED, True)


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.BLOCKED, Verdict.SKIPPED])
def test_what_did_not_fail_is_not_compared(root: Path, verdict: Verdict) -> None:
    now = judged(verdict=verdict)
    assert module.beside_base(setup_of(root, None), now, 600, lambda _: None) is now
