"""A checkout of the loop's own package under test: it is what runs, and what it breaks is held against it.

The checkout lies at a path with blanks and umlauts, in src layout, and is never written to by a trial.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from seatrial.core.records import Plan
from seatrial.core.verdict import Boundary, ExitCode, Verdict
from seatrial.runtime.environments import Environment
from tests.real.conftest import git
from tests.real.drive import PLAIN, Ran, call, hashes, run, says, start, wait_for

pytestmark = pytest.mark.real

INIT = "src/trl/__init__.py"
TRAINER = "src/trl/trainer/grpo_trainer.py"
UTILS = "src/trl/models/utils.py"
TRANSFER = "src/trl/experimental/async_grpo/weight_transfer.py"
ADVANTAGES = "        advantages = torch.nan_to_num(advantages, nan=0.0)\n"
RATIO = "old_per_token_logps = per_token_logps.detach() if old_per_token_logps is None else"
again = pytest.mark.skipif(not os.environ.get("SEATRIAL_ALL_LEVELS"), reason="shown by others: SEATRIAL_ALL_LEVELS=1 runs it")
BASELINE = "            advantages = rewards - mean_grouped_rewards\n"


def checkout(upstream: Path, where: Path) -> Path:
    """A fresh clone to change."""
    root = where / "the chänge" / "päckage under test"
    git(where, "clone", "--quiet", str(upstream), str(root))
    return root


def edit(root: Path, path: str, old: str, new: str) -> None:
    """Replace the only occurrence of `old`."""
    text = (root / path).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path} of this release has {text.count(old)} occurrences of {old!r}"
    (root / path).write_text(text.replace(old, new), encoding="utf-8")


def prepend(root: Path, path: str, line: str) -> None:
    """Put a line before everything else."""
    (root / path).write_text(line + "\n" + (root / path).read_text(encoding="utf-8"), encoding="utf-8")


@pytest.fixture(scope="module")
def changed(upstream: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a harmless edit that requires level 0 alone, and a new file that requires level 2."""
    root = checkout(upstream, tmp_path_factory.mktemp("harmless"))
    prepend(root, UTILS, "# A harmless edit.")
    (root / "src/trl/sync_nötes.py").write_text("# A new file that nothing imports.\n", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def harmless(changed: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """`seatrial run --auto --change` on it."""
    return run(tmp_path_factory.mktemp("trial"), "trl", "--auto", "--change", changed)


def test_harmless_change_passes_the_levels_its_diff_requires(harmless: Ran) -> None:
    assert harmless.code == ExitCode.PASS, harmless.output
    planned = {level.number: level.reasons for level in harmless.trial.plan.levels}
    assert list(planned) == [0, 2]
    assert any(f"{UTILS} matches **/models/**" in reason for reason in planned[0])
    assert any("sync_nötes.py matches **/*sync*" in reason for reason in planned[2])
    assert harmless.trial.plan.unmatched == ()
    assert {level.verdict for level in harmless.trial.levels} == {Verdict.PASS}


def test_every_process_proves_that_it_runs_the_checkout(harmless: Ran, changed: Path) -> None:
    proofs = [proof for proof in harmless.trial.imports if proof.package == "trl"]
    assert {proof.process for proof in proofs} == {"driver", "generator"}
    assert {(proof.ok, proof.file) for proof in proofs} == {(True, str(changed / INIT))}
    assert {proof.method for proof in proofs if proof.process == "driver"} == {"imported"}
    assert all(proof.expected is None for proof in harmless.trial.imports if proof.package != "trl")


def test_patch_in_the_evidence_restores_the_tree(harmless: Ran, changed: Path, upstream: Path, tmp_path: Path) -> None:
    (repo,) = harmless.trial.plan.changes
    assert repo.commit == git(changed, "rev-parse", "HEAD").strip()
    assert sorted(repo.dirty) == [UTILS, "src/trl/sync_nötes.py"]
    assert repo.patch is not None
    restored = tmp_path / "restored"
    git(tmp_path, "clone", "--quiet", str(upstream), str(restored))
    git(restored, "apply", str(harmless.directory / "evidence" / repo.patch))
    assert hashes(restored / "src") == hashes(changed / "src")


def test_file_that_nothing_loads_is_a_limitation(harmless: Ran) -> None:
    assert any("sync_nötes.py" in text for level in harmless.trial.levels for text in level.limitations)
    assert not any(UTILS in text for level in harmless.trial.levels for text in level.limitations)


def test_change_that_nothing_loads_is_never_a_pass(upstream: Path, tmp_path: Path) -> None:
    root = checkout(upstream, tmp_path)
    prepend(root, TRANSFER, "# Of a trainer that this loop does not use.")
    done = run(tmp_path, "trl", "--level", "0", "--change", root, *PLAIN)
    result = done.level(0)
    assert (done.code, result.verdict, result.vacuous) == (ExitCode.BLOCKED, Verdict.BLOCKED, True), result.reason


def test_checkout_is_left_as_it_was(harmless: Ran, changed: Path) -> None:
    assert harmless.code == ExitCode.PASS
    assert not list(changed.rglob("__pycache__"))
    assert git(changed, "status", "--porcelain", "--ignored").count("\n") == 2


def test_broken_package_fails_when_called_from_inside_the_checkout(upstream: Path, tmp_path: Path) -> None:
    """As most people call it: no --out, the checkout as the working directory. The run directory must not count as a change."""
    root = checkout(upstream, tmp_path)
    prepend(root, INIT, "raise RuntimeError('broken by the change')")
    done = call(root, "run", "--level", "0", "--change", ".")
    (directory,) = root.glob("trials/*")
    result = Ran(done.returncode, done.stdout, directory).level(0)
    assert (done.returncode, result.verdict, result.boundary) == (ExitCode.FAIL, Verdict.FAIL, Boundary.PROVIDER)
    assert "RuntimeError: broken by the change" in result.reason
    assert git(root, "status", "--porcelain").splitlines() == [f" M {INIT}"]


def test_broken_module_fails(upstream: Path, tmp_path: Path) -> None:
    """The package imports; the module that is needed does not."""
    root = checkout(upstream, tmp_path)
    prepend(root, TRAINER, "raise RuntimeError('broken by the change')")
    done = run(tmp_path, "trl", "--level", "0", "--change", root)
    result = done.level(0)
    assert (done.code, result.verdict, result.boundary) == (ExitCode.FAIL, Verdict.FAIL, Boundary.PROVIDER)
    assert "RuntimeError: broken by the change" in result.reason
    assert all(proof.ok for proof in done.trial.imports), "the imports themselves were right"


@pytest.mark.parametrize(
    ("old", "new", "boundary"),
    [
        pytest.param(ADVANTAGES, ADVANTAGES.replace("\n", " * 0\n"), Boundary.REWARD, id="advantages are zeroed"),
        pytest.param(RATIO, RATIO.replace(".detach()", ""), Boundary.OPTIMIZER, id="the ratio loses its gradient", marks=again),
    ],
)
def test_silent_loss_of_the_gradient_is_a_fail(upstream: Path, tmp_path: Path, old: str, new: str, boundary: Boundary) -> None:
    """Rewards vary, losses are finite, the process exits with 0; nothing is learned."""
    root = checkout(upstream, tmp_path)
    edit(root, TRAINER, old, new)
    done = run(tmp_path, "trl", "--level", "0", "--change", root, "--no-base", *PLAIN)
    result = done.level(0)
    assert [(phase.ended, phase.exit_code) for phase in result.phases] == [("exited", 0)] * 2
    assert result.steps_reached == result.steps_expected
    assert (done.code, result.verdict, result.boundary) == (ExitCode.FAIL, Verdict.FAIL, boundary), result.reason
    assert result.reason.startswith("missed: step proof: ")


def test_inverted_advantage_fails_the_learning_signal(upstream: Path, tmp_path: Path) -> None:
    """Weights move and losses look normal, yet the reward falls: seen by what was measured, and step by step by the witness.

    Half of the level's steps are enough: each seed falls by 0.12 and more, and the controls stay within 0.02.
    """
    root = checkout(upstream, tmp_path)
    edit(root, TRAINER, BASELINE, "            advantages = mean_grouped_rewards - rewards\n")
    plan = Plan.model_validate_json(call(tmp_path, "plan", "--auto", "--change", root, "--json").stdout)
    assert 6 in [level.number for level in plan.levels]
    done = run(tmp_path, "trl", "--level", "0,6", "--change", root, "--no-base", "--", "--max_steps", "10")
    result = done.level(6)
    assert (done.code, result.verdict) == (ExitCode.FAIL, Verdict.FAIL), result.reason
    assert done.level(0).verdict is Verdict.FAIL, done.level(0).reason
    missed = {check.name for check in result.checks if not check.passed}
    assert {'mean(data["signal/gain"]) > 0', 'mean(data["signal/gain_over_control"]) > 0'} <= missed


def test_checkout_edited_while_the_trial_runs_is_never_a_pass(upstream: Path, tmp_path: Path) -> None:
    root = checkout(upstream, tmp_path)
    prepend(root, UTILS, "# As recorded.")
    process, out = start(tmp_path, "trl", "--level", "0", "--change", root, *PLAIN)
    wait_for("the run trains", lambda: says(out / "levels/0-smoke/run.log", "seatrial: imports proven in driver"))
    prepend(root, UTILS, "# Edited meanwhile.")
    assert process.wait(400) == ExitCode.BLOCKED
    result = Ran(process.returncode, "", out).level(0)
    assert (result.verdict, result.boundary) == (Verdict.BLOCKED, Boundary.ENVIRONMENT)
    assert "was changed while the trial ran" in result.reason


def test_wrong_import_blocks_before_the_first_step(upstream: Path, environment: Environment, tmp_path: Path) -> None:
    """An interpreter that does not see the checkout: whatever it would train is not the change."""
    root = checkout(upstream, tmp_path)
    prepend(root, UTILS, "# A harmless edit.")
    wrapper = tmp_path / "own python"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'PYTHONPATH=$(printf %s "$PYTHONPATH" | tr : "\\n" | grep -vxF "{root / "src"}" | paste -sd: -)\n'
        f'export PYTHONPATH\nexec "{environment.python}" "$@"\n',
        encoding="utf-8",
    )
    wrapper.chmod(0o755)
    done = run(tmp_path, "trl", "--level", "0,1", "--change", root, "--python", wrapper)
    assert done.code == ExitCode.BLOCKED, done.output
    first, second = done.level(0), done.level(1)
    assert (first.verdict, first.boundary) == (Verdict.BLOCKED, Boundary.ENVIRONMENT)
    assert first.reason.startswith("wrong import: driver: imported trl from ")
    assert "training starts" not in done.log(0)
    assert "seatrial: step" not in done.log(0)
    assert first.steps_reached is None
    assert (second.verdict, second.phases) == (Verdict.BLOCKED, ())
    assert "not run: level 0 found a wrong import" in second.reason
    assert not (done.place(1) / "run.log").exists()
    (proof,) = [proof for proof in done.trial.imports if proof.package == "trl"]
    assert (proof.ok, proof.expected) == (False, str(root / "src"))


@pytest.mark.parametrize(
    ("path", "levels"),
    [
        (TRAINER, [0, 1, 6]),
        ("src/trl/generation/vllm_client.py", [0, 2, 3]),
        ("src/trl/distributed.py", [0, 4]),
        ("src/trl/extras/profiling.py", [0, 1, 6]),
    ],
)
def test_auto_chooses_levels_with_reasons(upstream: Path, tmp_path: Path, path: str, levels: list[int]) -> None:
    root = checkout(upstream, tmp_path)
    prepend(root, path, "# An edit.")
    done = call(tmp_path, "plan", "--auto", "--change", root, "--json")
    assert done.returncode == 0, done.stdout
    plan = Plan.model_validate_json(done.stdout)
    assert [level.number for level in plan.levels] == levels
    assert all(level.reasons for level in plan.levels)
    assert any(path in reason for level in plan.levels for reason in level.reasons)
    assert bool(plan.unmatched) == any("default level" in reason for level in plan.levels for reason in level.reasons)
    assert not list(tmp_path.glob("trials")), "a plan makes nothing"


def test_auto_without_any_difference_takes_the_defaults(upstream: Path, tmp_path: Path) -> None:
    root = checkout(upstream, tmp_path)
    done = call(tmp_path, "plan", "--auto", "--change", root, "--base", "HEAD", "--json")
    assert [level["number"] for level in json.loads(done.stdout)["levels"]] == [0, 1, 6]
