"""verl itself on this CPU: levels 0 and 1 on Megatron to a verdict, with the environment that `seatrial env build verl-cpu` made.

The other levels, the other engine, the faults, and copies of Megatron-Bridge with a bug take half an hour; SEATRIAL_ALL_LEVELS=1 runs
them too. By default test_bridge_change.py shows that a wrong export is found, and test_bridge_faults.py that it is named.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from seatrial.core.files import read_text
from seatrial.core.verdict import ExitCode, Verdict
from seatrial.instruments.verl.verl_process import FAULTS
from seatrial.loops import environments
from seatrial.loops.verl.cpu_settings import STRATEGIES
from seatrial.runtime.environments import Environments
from tests.real.conftest import git
from tests.real.drive import Ran, processes_of, start

pytestmark = [pytest.mark.real, pytest.mark.timeout(2700)]

NAME = "verl-cpu"
MINUTES = 40
WORDS = ("verl", "--device", "cpu")
ALONE = ("--set", "options.tests=off")
"""Without the conformance of the Bridge: what the levels themselves find is the question here."""
slow = pytest.mark.skipif(not os.environ.get("SEATRIAL_ALL_LEVELS"), reason="takes half an hour: SEATRIAL_ALL_LEVELS=1 runs it")

EXACT = {
    "configuration in force (ppo)": "38 of 38 values as claimed",
    "no parameter is frozen (grpo, actor)": "80640 of 80640",
    "only adapters train (ppo, actor)": "6656 of 87296",
    "only adapters train (ppo, critic)": "6720 of 87360",
    "the generator holds what was sent: bit-equal (grpo)": "26 tensors, 0 of 4 syncs wrong",
    "the generator holds what was sent: bit-equal (ppo)": "28 tensors, 0 of 5 syncs wrong",
    "what was sent is what the actor holds: bit-equal (ppo)": "0 tensors differ",
    "the first weights sent are those of the model's files: bit-equal (grpo)": "0 of 26 tensors differ",
    "every trajectory was scored (ppo)": "96",
    "the reference starts as the actor (grpo): bit-equal": "16 of 16 equal",
    "no rollout was lost (grpo)": "0 prompts, 0 trajectories",
    "every step was recomputed (grpo)": "12 steps",
    "every step was recomputed (ppo)": "12 steps",
}
"""What level 0 measures of the tiny model on Megatron."""
CAUGHT = {
    "stale-generator": (0, "the generator holds what was sent: bit-equal (grpo)", Verdict.FAIL),
    "frozen": (0, "weights move at every step (grpo, actor)", Verdict.FAIL),
    "reward-raises": (0, "no rollout was lost (grpo)", Verdict.FAIL),
    "constant-reward": (0, "rewards differ (grpo)", Verdict.BLOCKED),
    "fresh-optimizer": (1, "restored optimizer of the actor: bit-equal", Verdict.FAIL),
}
BRIDGE = "src/megatron/bridge"
BUGS = {
    "key and value change places on export": (
        f"{BRIDGE}/models/conversion/param_mapping.py",
        "q, k, v = split_qkv_weights(config, packed_qkv)",
        "q, v, k = split_qkv_weights(config, packed_qkv)",
        "the first weights sent are those of the model's files: bit-equal (grpo)",
    ),
    "adapters have no gradient": (
        f"{BRIDGE}/peft/lora_layers.py",
        "return linear_output + adapter_output, bias",
        "return linear_output + adapter_output.detach(), bias",
        "gradients reach every tensor (ppo, actor)",
    ),
}
"""File, text and its replacement, and the check that must be missed."""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Building takes minutes and is not a test's business; a skip would look like success."""
    cache = Environments()
    if cache.find(NAME, environments()[NAME]) is None:
        pytest.fail(f"the environment {NAME} is not built in {cache.root}: run `seatrial env build {NAME}` first", pytrace=False)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Levels 0 and 1 in one trial: what comes before the levels is done once."""
    return trial(tmp_path_factory.mktemp("smoke"), "--level", "0,1")


def trial(where: Path, *words: str) -> Ran:
    """`seatrial run`, with more patience than the other loops need: eight processes import torch one after another."""
    process, out = start(where, *WORDS, *words)
    code = process.wait(60 * MINUTES)
    return Ran(code, read_text(where / f"{out.name}.out"), out)


def missed(ran: Ran, number: int) -> list[str]:
    return [check.name for check in ran.level(number).checks if not check.passed]


def test_level_0_passes_with_what_it_measures(smoke: Ran) -> None:
    assert missed(smoke, 0) == [], smoke.output
    assert smoke.code == ExitCode.PASS, smoke.output
    found = {check.name: check.value for check in smoke.level(0).checks}
    assert {name: found.get(name) for name in EXACT} == EXACT
    assert len(found) > 50


def test_driver_and_workers_prove_their_imports(smoke: Ran) -> None:
    rows = (smoke.place(0) / "imports.jsonl").read_text(encoding="utf-8")
    assert '"process": "driver"' in rows
    assert '"process": "worker"' in rows


def test_level_1_passes(smoke: Ran) -> None:
    assert missed(smoke, 1) == [], smoke.output
    assert smoke.level(1).verdict is Verdict.PASS


def test_nothing_is_left_running_or_lying_around(smoke: Ran) -> None:
    assert processes_of(smoke.directory) == []
    used = re.findall(r"Ray works in (\S+)", smoke.log(0))
    assert len(used) == 2
    assert not any(Path(place).exists() for place in used)


@pytest.fixture
def bridge(tmp_path: Path) -> Path:
    """A git repository with the environment's own Megatron-Bridge in src layout; `megatron` is a namespace that it shares."""
    found = Environments().find(NAME, environments()[NAME])
    assert found is not None
    root = tmp_path / "bridge under test"
    shutil.copytree(
        next(found.path.glob("lib/python*/site-packages/megatron/bridge")), root / BRIDGE, ignore=shutil.ignore_patterns("__pycache__")
    )
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "add", "--all", "--force")
    git(root, "commit", "--quiet", "--message", "as released")
    return root


@slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_bridge_fails(bug: str, bridge: Path, tmp_path: Path) -> None:
    file, text, other, check = BUGS[bug]
    source = bridge / file
    assert text in source.read_text(encoding="utf-8")
    source.write_text(source.read_text(encoding="utf-8").replace(text, other), encoding="utf-8")
    ran = trial(tmp_path, "--level", "0", "--change", f"bridge={bridge}", "--no-base", *ALONE)  # the base costs as much again
    assert ran.level(0).verdict == Verdict.FAIL, ran.output
    assert check in missed(ran, 0)


@slow
def test_a_bridge_as_released_passes_and_is_what_ran(bridge: Path, tmp_path: Path) -> None:
    ran = trial(tmp_path, "--level", "0", "--change", f"bridge={bridge}", *ALONE)
    assert missed(ran, 0) == [], ran.output
    assert ran.code == ExitCode.PASS, ran.output
    rows = [json.loads(row) for row in (ran.place(0) / "imports.jsonl").read_text(encoding="utf-8").splitlines()]
    own = [row for row in rows if row["package"] == "megatron.bridge"]
    assert {row["file"] for row in own} == {str(bridge / BRIDGE / "__init__.py")}
    assert {(row["process"], row["method"]) for row in own} == {("driver", "found"), ("worker", "found"), ("worker", "imported")}


OTHERS = [("megatron", 5), ("fsdp2", 0), ("fsdp2", 1), ("fsdp2", 5)]


@slow
@pytest.mark.parametrize(("strategy", "number"), OTHERS)
def test_the_other_levels_pass(strategy: str, number: int, tmp_path: Path) -> None:
    ran = trial(tmp_path, "--level", str(number), "--set", f"options.strategy={strategy}", *ALONE)
    assert missed(ran, number) == [], ran.output
    assert ran.code == ExitCode.PASS, ran.output


@slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault: str, strategy: str, tmp_path: Path) -> None:
    number, check, verdict = CAUGHT[fault]
    ran = trial(tmp_path, "--level", str(number), "--fault", fault, "--set", f"options.strategy={strategy}")
    assert ran.level(number).verdict == verdict, ran.output
    assert check in missed(ran, number)
