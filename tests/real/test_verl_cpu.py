"""verl itself on this CPU: level 0 to a verdict, with the environment that `seatrial env build verl-cpu` made.

The other levels and the faults take ten minutes more; SEATRIAL_ALL_LEVELS=1 runs them too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from seatrial.files import read_text
from seatrial.launch.environments import Environments
from seatrial.loops import environments
from seatrial.loops.verl.drive.fault_names import FAULTS
from seatrial.model.verdict import ExitCode, Verdict

from .drive import Ran, processes_of, start

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

NAME = "verl-cpu"
MINUTES = 20
WORDS = ("verl", "--device", "cpu")
slow = pytest.mark.skipif(not os.environ.get("SEATRIAL_ALL_LEVELS"), reason="takes ten minutes: SEATRIAL_ALL_LEVELS=1 runs it")

EXACT = {
    "no parameter is frozen (grpo, actor)": "80640 of 80640",
    "only adapters train (ppo, actor)": "8192 of 88832",
    "the generator holds what was sent: bit-equal (grpo)": "27 tensors, 0 of 3 syncs wrong",
    "the generator holds what was sent: bit-equal (ppo)": "28 tensors, 0 of 4 syncs wrong",
    "every trajectory was scored (ppo)": "64",
    "the reference starts as the actor (grpo): bit-equal": "29 of 29 equal",
    "no rollout was lost (grpo)": "0 prompts, 0 trajectories",
}
"""What level 0 measures of the tiny model."""
CAUGHT = {
    "stale-generator": (0, "the generator holds what was sent: bit-equal (grpo)", Verdict.FAIL),
    "frozen": (0, "weights move at every step (grpo, actor)", Verdict.FAIL),
    "reward-raises": (0, "no rollout was lost (grpo)", Verdict.FAIL),
    "constant-reward": (0, "rewards differ (grpo)", Verdict.BLOCKED),
    "fresh-optimizer": (1, "restored optimizer of the actor: bit-equal", Verdict.FAIL),
}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Building takes minutes and is not a test's business; a skip would look like success."""
    cache = Environments()
    if cache.find(NAME, environments()[NAME]) is None:
        pytest.fail(f"the environment {NAME} is not built in {cache.root}: run `seatrial env build {NAME}` first", pytrace=False)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return trial(tmp_path_factory.mktemp("smoke"), "--level", "0")


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


def test_nothing_is_left_running_or_lying_around(smoke: Ran) -> None:
    assert processes_of(smoke.directory) == []
    used = re.findall(r"Ray works in (\S+)", smoke.log(0))
    assert len(used) == 2
    assert not any(Path(place).exists() for place in used)


@slow
@pytest.mark.parametrize("number", [1, 5])
def test_the_other_levels_pass(number: int, tmp_path: Path) -> None:
    ran = trial(tmp_path, "--level", str(number))
    assert missed(ran, number) == [], ran.output
    assert ran.code == ExitCode.PASS, ran.output


@slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault: str, tmp_path: Path) -> None:
    number, check, verdict = CAUGHT[fault]
    ran = trial(tmp_path, "--level", str(number), "--fault", fault)
    assert ran.level(number).verdict == verdict, ran.output
    assert check in missed(ran, number)
