"""The shadow of verl on this CPU: its formulas, a clean run of GRPO and of PPO with a critic, and bugs in a copy of verl.

SEATRIAL_ALL_LEVELS=1 runs more bugs; each is a whole trial, of two minutes on two idle cores.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from seatrial.core.files import read_text
from seatrial.core.verdict import ExitCode, Verdict
from seatrial.loops import environments
from seatrial.runtime.environments import Environments
from tests.real.conftest import git
from tests.real.drive import Ran, start
from tests.real.inside import run_cases

pytestmark = [pytest.mark.real, pytest.mark.timeout(2700)]

NAME = "verl-cpu"
WORDS = ("verl", "--device", "cpu", "--set", "options.strategy=fsdp2", "--level", "0")
CASES = (
    "case_group_advantages",
    "case_gae_and_kl_in_the_reward",
    "case_gae_by_hand",
    "case_kl_estimates_and_their_gradients",
    "case_clipped_losses_in_every_reduction",
    "case_value_losses",
    "case_schedules_of_fsdp2",
    "case_adam_with_odd_settings",
    "case_overrides_are_read_as_hydra_reads_them",
    "case_parts_become_one_record",
)
ALGORITHMS, LOSSES, TRAINER = "verl/trainer/ppo/core_algos.py", "verl/workers/utils/losses.py", "verl/trainer/ppo/v1/trainer_base.py"
BUGS = {
    "advantages are divided by the biased deviation": (
        ALGORITHMS,
        "id2std[idx] = torch.std(scores_tensor)",
        "id2std[idx] = torch.std(scores_tensor, unbiased=False)",
        ("grpo", "advantage"),
    ),
    "gamma and lambda change places": (
        "verl/trainer/ppo/ray_trainer.py",
        "            gamma=gamma,\n            lam=lam,",
        "            gamma=lam,\n            lam=gamma,",
        ("ppo", "advantage"),
    ),
    "the KL term counts twice": (LOSSES, "kl_loss * config.kl_loss_coef", "kl_loss * config.kl_loss_coef * 2", ("grpo", "kl")),
    "betas are not handed on": (
        "verl/workers/config/optimizer.py",
        'optimizer_args["betas"] = config.betas',
        'optimizer_args["betas"] = (0.9, 0.999)',
        ("grpo", "update"),
    ),
    "values are clipped around the returns": (
        ALGORITHMS,
        "verl_F.clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)",
        "verl_F.clip_by_value(vpreds, returns - cliprange_value, returns + cliprange_value)",
        ("ppo", "loss"),
    ),
    "every step takes the first prompts": (
        TRAINER,
        "            if self.train_dataloader_it is None:\n",
        "            if True:\n",
        ("grpo", "data"),
    ),
}
"""File, text and its replacement; the run and the stage that must be named."""
FEW: tuple[str, ...] = ()
slow = pytest.mark.skipif(not os.environ.get("SEATRIAL_ALL_LEVELS"), reason="takes minutes each: SEATRIAL_ALL_LEVELS=1 runs it")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/verl_shadow_cases.py", CASES, environment=NAME)


@pytest.mark.parametrize("name", CASES)
def test_formula(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]


def trial(where: Path, *words: str) -> Ran:
    """`seatrial run`; eight processes import torch one after another."""
    process, out = start(where, *WORDS, *words)
    return Ran(process.wait(2400), read_text(where / f"{out.name}.out"), out)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Level 0 without a change."""
    return trial(tmp_path_factory.mktemp("clean"))


def test_clean_runs_of_grpo_and_ppo_are_recomputed(clean: Ran) -> None:
    ran = clean
    assert ran.code == ExitCode.PASS, ran.output
    checks = {check.name: check for check in ran.level(0).checks}
    for run, stages in (("grpo", ("reference", "kl", "ratio", "loss")), ("ppo", ("value", "advantage", "loss", "logging"))):
        assert checks[f"every step was recomputed ({run})"].value == "12 steps"
        for stage in (*stages, "data", "sampling", "reward", "gradient", "clip", "schedule", "update"):
            assert checks[f"step proof: {stage} ({run})"].passed
        found = json.loads(read_text(ran.place(0) / run / "shadow.json"))
        assert "verl" not in found["imports"]
    assert not any(text.startswith("the stage ") for text in ran.level(0).limitations)


def test_other_settings_than_the_run_had_are_named_at_their_stage(clean: Ran) -> None:
    cases = ("case_settings_of_grpo", "case_settings_of_ppo")
    found = run_cases("tests/real/verl_knob_cases.py", cases, environment=NAME, extra={"SEATRIAL_LEVEL": str(clean.place(0))})
    assert found == dict.fromkeys(cases)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git repository with the environment's own verl."""
    found = Environments().find(NAME, environments()[NAME])
    assert found is not None
    root = tmp_path / "verl under test"
    place = next(found.path.glob("lib/python*/site-packages/verl"))
    shutil.copytree(place, root / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "add", "--all", "--force")
    git(root, "commit", "--quiet", "--message", "as released")
    return root


@pytest.mark.parametrize("bug", [bug if bug in FEW else pytest.param(bug, marks=slow) for bug in BUGS])
def test_a_bug_is_named_at_its_stage(bug: str, checkout: Path, tmp_path: Path) -> None:
    file, text, other, (run, stage) = BUGS[bug]
    source = checkout / file
    assert text in source.read_text(encoding="utf-8")
    source.write_text(source.read_text(encoding="utf-8").replace(text, other, 1), encoding="utf-8")
    ran = trial(tmp_path, "--change", f"verl={checkout}")
    assert ran.level(0).verdict == Verdict.FAIL, ran.output
    assert (run, stage) in {(check.run, check.stage) for check in ran.level(0).checks if not check.passed}
