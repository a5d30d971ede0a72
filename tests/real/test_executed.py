"""Real training says which changed functions ran: an import is no run, and what the interpreter runs itself is none of the loop's.

Also code that torch.compile compiles, which Python itself never runs.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from seatrial.core.verdict import Boundary, ExitCode, Verdict
from seatrial.evidence.imports import read_executed
from seatrial.runtime.environments import Environment
from tests.instruments.test_executed import SOURCE
from tests.real.drive import PLAIN, run
from tests.real.test_change import TRAINER, again, checkout, edit

pytestmark = [pytest.mark.real, pytest.mark.timeout(2700)]

SUFFIX = "    def _get_tool_suffix_ids(self, tool_messages):\n"
SYNC = "src/trl/generation/vllm_generation.py"
IDLE = "GRPOTrainer._get_tool_suffix_ids"
TENSORS = """
import torch


class Layer(torch.nn.Module):
    def forward(self, x):
        return helper(x) + 1


def helper(x):
    return x * 2


def idle(x):
    return x * 3


@torch.compile(backend="eager", fullgraph=True)
def whole(x):
    return inner(x)


def inner(x):
    return Layer()(x).sum()


@torch.no_grad()
def without_gradient(x):
    return x


def made(x):
    for number in range(2):
        yield x * number


@torch.compile(backend="eager")
def over_a_generator(x):
    return sum(made(x))
"""


def test_a_function_that_is_imported_and_never_called_blocks_the_pass(upstream: Path, tmp_path: Path) -> None:
    root = checkout(upstream, tmp_path)
    edit(root, TRAINER, SUFFIX, SUFFIX.replace("tool_messages", "tool_messages=None"))
    (root / "src" / "sitecustomize.py").write_text("import warnings\nwarnings.simplefilter('default')\n", encoding="utf-8")
    done = run(tmp_path, "trl", "--level", "0", "--change", root, *PLAIN)
    result = done.level(0)
    assert (done.code, result.verdict, result.boundary, result.vacuous) == (ExitCode.BLOCKED, Verdict.BLOCKED, Boundary.CONFIG, True)
    assert f"vacuous: none of the changed functions of {done.trial.plan.changes[0].name} ran ({IDLE} ({TRAINER}:" in result.reason
    assert any(finding.name == "loads itself" for finding in done.trial.findings)


def test_a_function_that_ran_passes_and_its_idle_neighbour_is_a_limitation(upstream: Path, tmp_path: Path) -> None:
    root = checkout(upstream, tmp_path)
    edit(root, TRAINER, SUFFIX, SUFFIX.replace("tool_messages", "tool_messages=None"))
    edit(
        root,
        TRAINER,
        "    def training_step(self, model, inputs, num_items_in_batch):\n",
        "    def training_step(self, model, inputs, num_items_in_batch=None):\n",
    )
    done = run(tmp_path, "trl", "--level", "0", "--change", root, *PLAIN)
    result = done.level(0)
    assert (done.code, result.verdict) == (ExitCode.PASS, Verdict.PASS), result.reason
    never = [text for text in result.limitations if "never ran" in text]
    assert len(never) == 1
    assert IDLE in never[0]
    assert "training_step" not in never[0]


@pytest.fixture(scope="module")
def renamer(upstream: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a harmless edit of TRL's own sync."""
    root = checkout(upstream, tmp_path_factory.mktemp("renamer"))
    edit(root, SYNC, "        extra_prefixes = extra_prefixes or []\n", "        extra_prefixes = list(extra_prefixes or ())\n")
    return root


def test_level_0_is_asked_for_trls_own_sync_in_vain(renamer: Path, tmp_path: Path) -> None:
    result = run(tmp_path, "trl", "--level", "0", "--change", renamer, "--no-base", *PLAIN).level(0)
    assert result.vacuous
    assert "_fix_param_name_to_vllm" in result.reason
    assert "seatrial run trl --level 2,3" in result.reason


@again
def test_level_3_runs_it(renamer: Path, tmp_path: Path) -> None:
    """By default test_levels.py shows it: level 3 counts TRL's own syncs, and every name that they sent."""
    done = run(tmp_path, "trl", "--level", "3", "--change", renamer, "--no-base")
    assert (done.code, done.level(3).verdict) == (ExitCode.PASS, Verdict.PASS), done.level(3).reason
    assert not any("never ran" in text for text in done.level(3).limitations)


@again
def test_a_bug_in_trls_own_sync_fails_level_3(upstream: Path, tmp_path: Path) -> None:
    root = checkout(upstream, tmp_path)
    walk = "                    name = self._fix_param_name_to_vllm(name)\n                    with self._dist.gather_params([param]):\n"
    edit(root, SYNC, walk, "                    if 'layers.1.mlp.up' in name:\n                        continue\n" + walk)
    result = run(tmp_path, "trl", "--level", "3", "--change", root, "--no-base").level(3)
    assert (result.verdict, result.boundary) == (Verdict.FAIL, Boundary.REFIT), result.reason
    missed = {check.name for check in result.checks if not check.passed}
    assert {"TRL's own sync sent every tensor under its name (sync)", "weights after each refit: bit-equal (sync)"} <= missed
    assert "model.layers.1.mlp.up_proj.weight" in result.reason


def test_what_torch_compiles_ran(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    file = tmp_path / "pkg" / "mod.py"
    file.write_text(TENSORS)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "changed.json").write_text(json.dumps({"files": [{"repo": "lib", "path": "pkg/mod.py", "sha256": digest}]}))
    program = (
        f"from seatrial.instruments import executed; executed.start({str(tmp_path)!r}, 'driver')\n"
        "import torch; from pkg import mod\n"
        "x = torch.ones(3)\n"
        "assert mod.whole(x) == 9 and mod.without_gradient(x) is x and mod.over_a_generator(x).tolist() == [1, 1, 1]\n"
    )
    variables = {"PYTHONPATH": f"{tmp_path}:{SOURCE}", "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    subprocess.run([environment.python, "-c", program], env=variables, check=True, timeout=300)
    ran = {row[2] for row in read_executed(tmp_path / "executed.jsonl").ran}
    assert ran == {"<module>", "Layer", "forward", "helper", "whole", "inner", "without_gradient", "made", "over_a_generator"}
