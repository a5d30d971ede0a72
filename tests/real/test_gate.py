"""The conformance of a Bridge before a verl trial: a broken mapping ends the trial at its gate, before any level runs.

The Bridge is a copy of the one in the environment megatron-cpu. That a gate which passes lets the levels run is shown with
stand-ins (tests/trial/test_gate.py): a level takes minutes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from seatrial.core.files import read_text
from seatrial.core.verdict import Boundary, ExitCode, Verdict
from seatrial.loops import MEGATRON_CPU, environments
from seatrial.runtime.environments import Environments
from tests.real.conftest import git
from tests.real.drive import processes_of, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

BRIDGE = "src/megatron/bridge"
GATE, UP = "model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"


@pytest.fixture
def bridge(tmp_path: Path) -> Path:
    """A repository with the Bridge as released, and a commit that swaps gate and up of Llama: import and export alike."""
    cache = Environments()
    found = cache.find(MEGATRON_CPU, environments()[MEGATRON_CPU])
    if found is None:
        pytest.fail(f"the environment {MEGATRON_CPU} is not built in {cache.root}: run `seatrial env build {MEGATRON_CPU}` first", False)
    root = tmp_path / "bridge under test"
    installed = next(found.path.glob("lib/python*/site-packages/megatron/bridge"))
    shutil.copytree(installed, root / BRIDGE, ignore=shutil.ignore_patterns("__pycache__"))
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "add", "--all", "--force")
    git(root, "commit", "--quiet", "--message", "as released")
    source = root / BRIDGE / "models/llama/llama_bridge.py"
    text = source.read_text(encoding="utf-8")
    swapped = text.replace(f'gate="{GATE}"', f'gate="{UP}"').replace(f'up="{UP}"', f'up="{GATE}"')
    assert swapped != text
    source.write_text(swapped, encoding="utf-8")
    git(root, "commit", "--quiet", "--all", "--message", "swap")
    return root


def test_a_broken_mapping_ends_the_trial_at_provider_before_any_level(bridge: Path, tmp_path: Path) -> None:
    ran = run(tmp_path, "verl", "--device", "cpu", "--change", f"bridge={bridge}", "--base", "main~1", "--level", "0")
    (side,) = ran.trial.sides
    assert (side.name, side.verdict, side.boundary) == ("Bridge conformance", Verdict.FAIL, Boundary.PROVIDER), ran.output
    assert side.reason.startswith("llama: parity: ")
    assert "mlp" in side.reason
    (note,) = side.notes
    assert note.startswith(f"compared with the state before the change (bridge {git(bridge, 'rev-parse', 'main~1')[:12]}): this is new: ")
    assert (ran.code, ran.trial.verdict) == (ExitCode.FAIL, Verdict.FAIL)
    assert (ran.level(0).verdict, ran.level(0).reason) == (Verdict.SKIPPED, "not run: Bridge conformance failed at provider")
    assert not list(ran.directory.glob("levels/*/run.log"))
    assert "boundary: provider" in read_text(ran.directory / "summary.md")
    assert json.loads(read_text(ran.directory / "report.json"))["result"] == "Fail"
    assert processes_of(ran.directory) == []
    assert len(git(bridge, "worktree", "list").splitlines()) == 1
