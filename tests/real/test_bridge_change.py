"""A checkout of Megatron-Bridge under test, edited as a person would: it is what runs, what it breaks is named, and it stays as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.verdict import ExitCode
from tests.real.bridge_ladder import python
from tests.real.conftest import git
from tests.real.drive import call

pytestmark = pytest.mark.real

MODELS = "src/megatron/bridge/models"
MAPPING = f"{MODELS}/conversion/param_mapping.py"
QWEN2 = f"{MODELS}/qwen/qwen2_bridge.py"
GEMMA = f"{MODELS}/gemma/gemma_bridge.py"
JOINED = 'return torch.cat([hf_weights["gate"], hf_weights["up"]], dim=0)'
SWAPPED = 'return torch.cat([hf_weights["up"], hf_weights["gate"]], dim=0)'
CLASS = "class Qwen2Bridge(MegatronModelBridge):\n"
PROJECT = '[project]\nname = "megatron-bridge"\nversion = "0.6.2"\n'


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with the installed Bridge in the layout of its source."""
    root = tmp_path_factory.mktemp("released") / "Megatron-Bridge"
    (installed,) = python().parents[1].glob("lib/python*/site-packages/megatron/bridge")
    shutil.copytree(installed, root / "src" / "megatron" / "bridge", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "add", "--all", "--force")
    git(root, "commit", "--quiet", "--message", "as released")
    return root


def probe(released: Path, where: Path, path: str, old: str, new: str) -> tuple[int, dict[str, Any]]:
    """Commit one edit to a clone and probe it: the exit code and probe.json."""
    root, out = where / "my chänge" / "Megatron-Bridge", where / "out"
    git(where, "clone", "--quiet", str(released), str(root))
    text = (root / path).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path} of this release has {text.count(old)} occurrences of {old!r}"
    (root / path).write_text(text.replace(old, new), encoding="utf-8")
    git(root, "commit", "--quiet", "--all", "--message", "the change")
    asked = ("--change", f"bridge={root}", "--base", "HEAD~1", "--model", "qwen2", "--rungs", "roundtrip,parity")
    done = call(where, "probe", "bridge", *asked, "--no-tests", "--json", "--out", out)
    assert (out / "probe.json").is_file(), done.stdout
    assert git(root, "status", "--porcelain", "--ignored") == "", "the checkout is as it was"
    assert not list(root.rglob("__pycache__"))
    made: dict[str, Any] = json.loads((out / "probe.json").read_text(encoding="utf-8"))
    (change,) = made["changes"]
    assert (change["path"], change["changed"]) == (str(root), [path])
    return done.returncode, made


def test_swapped_gate_and_up_fail_and_are_named(released: Path, tmp_path: Path) -> None:
    code, made = probe(released, tmp_path, MAPPING, JOINED, SWAPPED)
    judged = made["judged"]
    assert (code, judged["verdict"], judged["boundary"]) == (ExitCode.FAIL, "Fail", "provider"), judged["reason"]
    back, parity = judged["families"][0]["rungs"]
    assert (back["verdict"], parity["verdict"]) == ("Fail", "Fail")
    assert "model.layers.0.mlp.gate_proj.weight" in back["reason"]
    assert "swapped" in back["reason"] or "up_proj" in back["reason"], "what it looks like is said"
    assert "decoder.layers.0.mlp.linear_fc1" in parity["reason"]


def test_a_bridge_that_cannot_be_imported_fails(released: Path, tmp_path: Path) -> None:
    code, made = probe(released, tmp_path, QWEN2, CLASS, CLASS.replace(":\n", "\n"))
    judged = made["judged"]
    assert (code, judged["verdict"], judged["boundary"]) == (ExitCode.FAIL, "Fail", "provider"), judged["reason"]
    assert "the Bridge under test cannot be imported: SyntaxError" in judged["reason"]
    assert judged["families"] == []


def test_a_change_that_no_rung_calls_is_never_a_pass(released: Path, tmp_path: Path) -> None:
    line = "class GemmaBridge(MegatronModelBridge):\n"
    code, made = probe(released, tmp_path, GEMMA, line, f"# A harmless edit.\n{line}")
    judged = made["judged"]
    assert (code, judged["verdict"]) == (ExitCode.BLOCKED, "Blocked"), judged["reason"]
    assert judged["reason"].startswith("vacuous: ")
    assert GEMMA in judged["reason"]


def test_a_harmless_change_passes_and_is_what_ran(released: Path, tmp_path: Path) -> None:
    line = "    def provider_bridge(self, hf_pretrained):\n"
    code, made = probe(released, tmp_path, QWEN2, line, f"    # A harmless edit.\n{line}")
    judged = made["judged"]
    assert (code, judged["verdict"]) == (ExitCode.PASS, "Pass"), judged["reason"]
    (change,) = made["changes"]
    assert judged["versions"]["megatron.bridge"].endswith(f" from {change['path']}/src/megatron/bridge/__init__.py")
    assert change["path"] not in judged["versions"]["megatron.core"]
