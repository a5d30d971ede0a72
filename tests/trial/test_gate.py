"""A probe before the levels: what each way to end means, and that a Fail of it ends the trial before any level runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.files import read_model, read_text
from seatrial.core.loop import SideTests
from seatrial.core.records import Report, SideResult, Trial
from seatrial.core.verdict import Boundary, Verdict
from seatrial.runtime.process import Outcome
from seatrial.trial.pre_tests import judge_probe
from tests.trial.conftest import Bench, result

pytestmark = pytest.mark.slow

PASS, FAIL, SKIPPED = "Pass", "Fail", "Skipped"


def ended(code: int | None = 0, how: str = "exited") -> Outcome:
    return Outcome(code, None, how, 7.0)  # type: ignore[arg-type]


def probe(verdict: str, *rungs: str, reason: str = "because", uncounted: tuple[str, ...] = ()) -> dict[str, Any]:
    """A probe.json with one family."""
    rows: list[dict[str, Any]] = [{"rung": "r", "verdict": one, "checks": [{"name": "c", "passed": one != FAIL}]} for one in rungs]
    rows += [{"rung": "u", "verdict": one, "counted": False} for one in uncounted]
    return {"judged": {"verdict": verdict, "reason": reason, "families": [{"model": "qwen2", "rungs": rows}]}}


@pytest.mark.parametrize(
    ("outcome", "left", "verdict", "reason"),
    [
        (ended(0), probe(PASS, PASS, PASS), Verdict.PASS, "because"),
        (ended(0), probe(PASS, PASS, uncounted=(SKIPPED,)), Verdict.PASS, "because"),
        (ended(1), probe(FAIL, PASS, FAIL), Verdict.FAIL, "because"),
        (ended(77), probe(SKIPPED, SKIPPED), Verdict.SKIPPED, "because"),
        (ended(99), probe("Blocked"), Verdict.BLOCKED, "because"),
        (ended(0), probe(PASS), Verdict.BLOCKED, "vacuous"),
        (ended(0), probe(PASS, uncounted=(PASS,)), Verdict.BLOCKED, "vacuous"),
        (ended(0), probe(PASS, PASS, FAIL), Verdict.BLOCKED, "not every rung passed"),
        (ended(0), probe(PASS, PASS, SKIPPED), Verdict.BLOCKED, "not every rung passed"),
        (ended(0), probe(FAIL, FAIL), Verdict.BLOCKED, "exit code 0 says Pass, but probe.json says Fail: because"),
        (ended(1), probe(PASS, PASS), Verdict.BLOCKED, "exit code 1 says Fail, but probe.json says Pass"),
        (ended(1), None, Verdict.BLOCKED, "exit code 1, and no whole probe.json"),  # a crash of Python has this exit code, too
        (ended(0), None, Verdict.BLOCKED, "no whole probe.json"),
        (ended(0), {"judged": PASS}, Verdict.BLOCKED, "no whole probe.json"),
        (ended(0), {"judged": {"verdict": PASS}}, Verdict.BLOCKED, "no whole probe.json"),
        (ended(0), [], Verdict.BLOCKED, "no whole probe.json"),
        (ended(2), probe(PASS, PASS), Verdict.BLOCKED, "the probe itself failed (exit code 2)"),
        (ended(3), probe(FAIL, FAIL), Verdict.BLOCKED, "the probe itself failed (exit code 3)"),
        (ended(None, "deadline"), probe(PASS, PASS), Verdict.BLOCKED, "did not end before its deadline: 7 s"),
        (ended(None, "interrupted"), probe(PASS, PASS), Verdict.BLOCKED, "interrupted by a signal"),
    ],
)
def test_each_way_to_end(tmp_path: Path, outcome: Outcome, left: object, verdict: Verdict, reason: str) -> None:
    path = tmp_path / "probe.json"
    if left is not None:
        path.write_text(json.dumps(left))
    said = judge_probe(outcome, path)
    assert (said.verdict, reason in said.reason) == (verdict, True), said.reason


def test_a_torn_file_is_no_verdict(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(probe(PASS, PASS))[:-3])
    assert judge_probe(ended(0), path).verdict is Verdict.BLOCKED


def stub(code: int, left: dict[str, Any], gate: bool = True, **more: Any) -> SideTests:
    """A stand-in for `seatrial probe bridge`: it says where it was to write, writes, and exits."""
    script = (
        "import os, sys; words = sys.argv; place = words[words.index('--out') + 1]; os.makedirs(place)\n"
        f"open(place + '/probe.json', 'w').write({json.dumps(left)!r}); print('rung roundtrip', flush=True); sys.exit({code})"
    )
    argv = (sys.executable, "-S", "-c", script)
    return SideTests("conformance", "Bridge conformance", argv, Path(), minutes=1, kind="probe", gate=gate, **more)


def pytests(name: str = "own") -> SideTests:
    return SideTests(name, "Own tests", (sys.executable, "-S", "-c", "raise SystemExit(9)"), Path(), files=("test_x.py",), minutes=1)


def side(trial: Trial, key: str = "conformance") -> SideResult:
    return next(one for one in trial.sides if one.key == key)


def test_a_gate_that_fails_ends_the_trial_at_provider_and_runs_nothing_behind_it(bench: Bench) -> None:
    why = "qwen2 roundtrip: 4 tensors differ, first model.layers.0.self_attn.q_proj.weight"
    bench.sides = lambda _: (stub(1, probe(FAIL, PASS, FAIL, reason=why)), pytests())
    trial = bench.start(0, 1, 3)
    assert (trial.verdict, trial.status) == (Verdict.FAIL, "done")
    assert trial.reason == f"Bridge conformance at provider: {why}"
    found = side(trial)
    assert (found.boundary, found.gate, found.kind, found.passed, found.failed) == (Boundary.PROVIDER, True, "probe", 1, 1)
    assert found.command[-4:] == ("--deadline", "1", "--out", str(bench.out / "sides/conformance/probe"))
    assert (side(trial, "own").verdict, side(trial, "own").reason) == (Verdict.SKIPPED, "not run: Bridge conformance failed at provider")
    assert [level.verdict for level in trial.levels] == [Verdict.SKIPPED] * 3
    assert result(trial, 0).reason == "not run: Bridge conformance failed at provider"
    assert result(trial, 3).reason == "not part of this release"
    assert not list(bench.out.glob("levels/*/run.log"))
    assert not (bench.out / "sides/own").exists()
    report = read_model(bench.out / "report.json", Report)
    line = next(one for one in report.deliverables if one.name == "Bridge conformance")
    assert (report.result, line.verdict, "boundary: provider" in line.proof) == (Verdict.FAIL, Verdict.FAIL, True)
    summary = read_text(bench.out / "summary.md")
    assert why in summary
    assert "boundary: provider" in summary
    assert 'type="provider"' in read_text(bench.out / "junit.xml")
    assert bench.resume() == trial  # a Fail is final


def test_a_gate_that_passes_lets_the_levels_run(bench: Bench) -> None:
    bench.sides = lambda _: (stub(0, probe(PASS, PASS, PASS)),)
    trial = bench.start(0)
    assert (trial.verdict, side(trial).verdict, side(trial).passed, side(trial).boundary) == (Verdict.PASS, Verdict.PASS, 2, None)
    assert read_model(bench.out / "report.json", Report).result is Verdict.PASS
    assert "rung roundtrip" in (bench.out / "sides/conformance/run.log").read_text()


def test_a_pass_whose_evidence_is_gone_is_taken_back(bench: Bench) -> None:
    from seatrial.report.outcomes import side_verdict

    bench.sides = lambda _: (stub(0, probe(PASS, PASS)),)
    found = side(bench.start(0))
    (bench.out / "sides/conformance/probe/probe.json").unlink()
    assert side_verdict(found, bench.out) == (Verdict.FAIL, "recorded as Pass, but in sides/conformance probe/probe.json is missing")
    assert side_verdict(found.model_copy(update={"passed": 0}), bench.out)[1] == "recorded as Pass, but no rung passed"


@pytest.mark.parametrize(
    ("tests", "verdict", "reason"),
    [
        (stub(0, {}, blocked="the environment is not built: build it"), Verdict.BLOCKED, "is not built: build it"),
        (stub(1, probe(FAIL, FAIL), gate=False), Verdict.FAIL, "because"),
        (SideTests("conformance", "x", ("/no/such/seatrial",), Path("/"), kind="probe", gate=True), Verdict.BLOCKED, "cannot start"),
    ],
)
def test_anything_but_the_fail_of_a_gate_stops_no_level_and_is_no_pass(
    bench: Bench, tests: SideTests, verdict: Verdict, reason: str
) -> None:
    bench.sides = lambda _: (tests,)
    trial = bench.start(0)
    assert (side(trial).verdict, reason in side(trial).reason) == (verdict, True), side(trial).reason
    assert result(trial, 0).verdict is Verdict.PASS
    assert trial.verdict is verdict


def test_what_was_blocked_runs_again_and_may_then_fail(bench: Bench) -> None:
    bench.sides = lambda _: (stub(0, {}, blocked="not built"),)
    first = bench.start(0)
    bench.sides = lambda _: (stub(1, probe(FAIL, FAIL)),)
    second = bench.resume()
    assert (first.verdict, second.verdict) == (Verdict.BLOCKED, Verdict.FAIL)
    assert second.levels == first.levels  # what passed before is not taken back


def test_the_probe_runs_in_our_environment_not_in_the_loops(bench: Bench, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    script = "import os, sys; print(os.environ['PYTHONPATH'], 'PYTHONSAFEPATH' in os.environ); sys.exit(2)"
    bench.changes = (repo,)
    bench.sides = lambda _: (SideTests("conformance", "x", (sys.executable, "-S", "-c", script), repo, kind="probe", minutes=1),)
    bench.start(0)
    assert "/ours False" in (bench.out / "sides/conformance/run.log").read_text()


def test_a_plan_without_a_level_is_skipped_and_runs_nothing(bench: Bench) -> None:
    bench.sides = lambda _: (stub(0, probe(PASS, PASS)),)
    trial = bench.start()
    assert (trial.verdict, trial.status, trial.sides, trial.levels) == (Verdict.SKIPPED, "done", (), ())
    assert trial.reason == "nothing to run: the changed paths are known to need no level"
    assert read_model(bench.out / "report.json", Report).result is Verdict.SKIPPED
