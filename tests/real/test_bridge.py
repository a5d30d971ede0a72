"""The conformance ladder over families that run here, with the real Bridge: what passes, what upstream does not do, what is left out.

Four families of different shape run by default, SEATRIAL_ALL_LEVELS=1 runs all, also those that upstream breaks.
One ladder for all families, as `seatrial probe bridge --all` runs it, and one for closed loops.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from seatrial.core.verdict import Boundary, Verdict
from seatrial.instruments.bridge.rungs import FAMILIES, STOPPED
from seatrial.probes.bridge_run import BridgeSetup, probe_bridge
from seatrial.probes.bridge_verdict import BridgeRequest, FamilyResult, JudgedBridgeProbe, RungResult
from seatrial.runtime.command import run_command
from tests.real.bridge_expected import ALL, DENSE, FAILS, LOOPS, RUNGS, TRIED, whole
from tests.real.bridge_ladder import MINUTES, STEPS, missed, python
from tests.real.inside import ROOT

pytestmark = pytest.mark.real

SUPPORTED = """
import json
from seatrial.instruments.megatron import shims
shims.install()
from megatron.bridge import AutoBridge
print("supported: " + json.dumps(sorted(AutoBridge.list_supported_models())))
"""


def ladder(out: Path, asked: BridgeRequest) -> JudgedBridgeProbe:
    """One ladder, from the plan to the verdict."""
    return probe_bridge(
        BridgeSetup(asked=asked, python=python(), out=out, deadline_s=60 * MINUTES, options={"steps": STEPS}), lambda _: None
    )


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> JudgedBridgeProbe:
    """Every family, every rung but the closed loop."""
    return ladder(tmp_path_factory.mktemp("all"), BridgeRequest(models=(*TRIED, *STOPPED), rungs=RUNGS, models_named=False))


@pytest.fixture(scope="module")
def families(everything: JudgedBridgeProbe) -> dict[str, FamilyResult]:
    """The results by name."""
    return {family.model: family for family in everything.families}


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RungResult]:
    """Closed loops."""
    judged = ladder(tmp_path_factory.mktemp("loops"), BridgeRequest(models=LOOPS, rungs=("loop",)))
    return {family.model: family.rungs[0] for family in judged.families}


def found(families: dict[str, FamilyResult], model: str, rung: str) -> RungResult:
    """One cell of the table."""
    return next(result for result in families[model].rungs if result.rung == rung)


def value(result: RungResult, name: str) -> float:
    """The measured number of one check."""
    (check,) = [check for check in result.checks if check.name == name]
    return float(str(check.value))


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("model", TRIED)
def test_a_family_does_what_it_is_known_to_do(model: str, rung: str, families: dict[str, FamilyResult]) -> None:
    result = found(families, model, rung)
    if known := FAILS.get((model, rung)):
        assert result.verdict is Verdict.FAIL, f"upstream mended it ({known.why}): take the line out"
        assert known.names in missed(result)
        assert result.boundary is not None
    elif rung == "ep" and model in DENSE:
        assert (result.verdict, result.counted) == (Verdict.SKIPPED, False)
        assert not result.applicable
    elif rung == "cp":
        assert (result.verdict, result.counted) == (Verdict.SKIPPED, False), "upstream runs it without Transformer Engine now"
        assert "Context parallelism is only supported by TEDotProductAttention" in result.reason
    else:
        assert result.verdict is Verdict.PASS, missed(result)
        assert result.checks


@pytest.mark.parametrize("model", [name for name in TRIED if (name, "parity") not in FAILS])
def test_weights_come_back_bit_for_bit_and_logits_within_the_bar(model: str, families: dict[str, FamilyResult]) -> None:
    parity, back = found(families, model, "parity"), found(families, model, "roundtrip")
    assert 0 <= value(parity, "logits (float32): largest difference from transformers") <= 1e-5
    for dtype in ("float32", "bfloat16"):
        assert value(back, f"export in {dtype}: every bit is the checkpoint's") == 0
        (compared,) = [check.value for check in back.checks if check.name == f"export in {dtype}: every tensor was compared"]
        done, _, of = str(compared).partition("/")
        assert int(done) == int(of) > 0


def test_families_pass_every_rung_that_applies(families: dict[str, FamilyResult]) -> None:
    passed = [name for name in TRIED if families[name].verdict is Verdict.PASS]
    assert passed == [name for name in TRIED if whole(name)]
    assert {"qwen2", "qwen3-moe", "llama"} <= set(passed)
    assert len(passed) >= 8 or not ALL


def test_families_that_cannot_run_are_skipped_with_the_part_they_lack(families: dict[str, FamilyResult]) -> None:
    for name, family in STOPPED.items():
        result = families[name]
        assert (result.verdict, result.counted, result.rungs) == (Verdict.SKIPPED, False, ()), name
        assert result.reason == f"cannot run here: {family.needs}"


def test_the_whole_run_fails_for_what_upstream_does_not_do(everything: JudgedBridgeProbe) -> None:
    assert (everything.verdict, everything.boundary) == (Verdict.FAIL, Boundary.PROVIDER)
    assert everything.reason.startswith("qwen2-odd: tp: "), "the first family that fails"
    used = {use.id for use in everything.shims if use.state == "used"}
    assert "cuda-device" in used
    assert {text.split(":")[0].removeprefix("shim ") for text in everything.limitations if text.startswith("shim ")} >= used


def test_nothing_that_the_installed_bridge_supports_is_left_out() -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    done = run_command([python(), "-c", SUPPORTED], 120, cwd=ROOT, env=environ)
    lines = [line.removeprefix("supported: ") for line in done.out.splitlines() if line.startswith("supported: ")]
    assert len(lines) == 1, done.error[-2000:]
    supported = set(json.loads(lines[0]))
    assert len(supported) > 30
    assert supported - {family.architecture for family in FAMILIES.values()} == set()


@pytest.mark.parametrize("model", LOOPS)
def test_a_closed_loop_learns(model: str, loops: dict[str, RungResult]) -> None:
    result = loops[model]
    assert result.verdict is Verdict.PASS, missed(result)
    assert {"reward rises", "weights after each refit: bit-equal", "reward ends above that without refits"} <= {
        c.name for c in result.checks
    }


def test_the_ladder_of_qwen2_takes_less_than_four_minutes_of_cpu(families: dict[str, FamilyResult], loops: dict[str, RungResult]) -> None:
    spent = [result.cpu_seconds for result in (*families["qwen2"].rungs, loops["qwen2"])]
    assert all(seconds > 0 for seconds in spent), "each was measured"
    assert sum(spent) < 240
