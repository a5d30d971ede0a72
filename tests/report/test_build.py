"""A report is never better than its evidence, and mentions everything that was requested."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from seatrial.core.records import Finding, ImportProof, LevelResult, Plan, Report, Trial
from seatrial.core.verdict import Boundary, Verdict, worst
from seatrial.report.build import build_report
from tests.report.trials import (
    IMPORTS,
    LADDER,
    LOSS,
    REPO,
    TITLE,
    TRIALS,
    check,
    failed,
    interrupted,
    level,
    passed,
    planned,
    trial,
    write_run,
)


def report(run_dir: Path, made: Trial, files: bool = True) -> Report:
    """The report of a trial whose evidence files exist, unless `files` is False."""
    if files:
        write_run(run_dir, made)
    return build_report(made, TITLE, run_dir, LADDER)


def verdict_of(built: Report, name: str) -> str:
    """The verdict of the deliverable whose name starts with `name`."""
    (line,) = [line for line in built.deliverables if line.name.startswith(name)]
    return str(line.verdict)


def proof_of(built: Report, name: str) -> str:
    """The proof of the deliverable whose name starts with `name`."""
    (line,) = [line for line in built.deliverables if line.name.startswith(name)]
    return line.proof


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("passed", Verdict.PASS),
        ("failed", Verdict.FAIL),
        ("blocked_preflight", Verdict.BLOCKED),
        ("blocked_vacuous", Verdict.BLOCKED),
        ("skipped_mix", Verdict.SKIPPED),
        ("interrupted", Verdict.BLOCKED),
    ],
)
def test_result_of_each_outcome(tmp_path: Path, name: str, result: Verdict) -> None:
    assert report(tmp_path, TRIALS[name]()).result is result


@pytest.mark.parametrize(("first", "second", "recorded"), list(itertools.product(Verdict, Verdict, [*Verdict, None])))
def test_pass_only_if_everything_is_pass(tmp_path: Path, first: Verdict, second: Verdict, recorded: Verdict | None) -> None:
    made = trial(level(0, verdict=first), level(1, verdict=second), verdict=recorded)
    built = report(tmp_path, made)
    assert built.result is worst([first, second, recorded or Verdict.BLOCKED])
    assert (built.result is Verdict.PASS) == (first is second is recorded is Verdict.PASS)
    assert ("not evidence against the change" in built.answer) == (built.result is Verdict.BLOCKED)


@pytest.mark.parametrize(
    ("broken", "result", "words"),
    [
        (level(checks=(check(), check(LOSS, passed=False, value="NaN"))), Verdict.FAIL, "this check was missed"),
        (level(steps_reached=19), Verdict.FAIL, "reached step 19 of 20"),
        (level(steps_reached=None), Verdict.FAIL, "reached no step of 20"),
        (level(vacuous=True), Verdict.BLOCKED, "vacuous"),
        (level(checks=()), Verdict.FAIL, "no check was evaluated"),
        (level(checks=(check(),)), Verdict.FAIL, "1 of 2 checks of the level were evaluated"),
    ],
)
def test_recorded_pass_without_its_evidence_is_taken_back(tmp_path: Path, broken: LevelResult, result: Verdict, words: str) -> None:
    built = report(tmp_path, trial(broken))
    assert built.result is result
    assert words in built.answer
    assert built.answer.startswith("the trial recorded Pass, but ")


@pytest.mark.parametrize(("file", "content"), [("run.log", None), ("run.log", ""), ("metrics.jsonl", None), ("metrics.jsonl", "")])
def test_missing_or_empty_evidence_file_is_no_pass(tmp_path: Path, file: str, content: str | None) -> None:
    made = passed()
    write_run(tmp_path, made)
    path = tmp_path / "levels/1-resume" / file
    path.unlink()
    if content is not None:
        path.write_text(content)
    built = report(tmp_path, made, files=False)
    assert built.result is Verdict.FAIL
    assert f"{file} is {'missing' if content is None else 'empty'}" in proof_of(built, "Metrics and log capture")


def test_what_a_blocked_level_could_not_write_is_no_fail(tmp_path: Path) -> None:
    zero = level(verdict=Verdict.BLOCKED, reason="the cluster never started", boundary=Boundary.CLUSTER, checks=(), steps_reached=None)
    built = report(tmp_path, trial(zero, verdict=Verdict.BLOCKED), files=False)
    assert built.result is Verdict.BLOCKED
    assert verdict_of(built, "Metrics and log capture") == "Blocked"


def test_import_from_elsewhere_blocks(tmp_path: Path) -> None:
    wrong = IMPORTS[1].model_copy(update={"file": "/usr/lib/bridge/__init__.py", "ok": False})
    built = report(tmp_path, trial(level(), imports=(IMPORTS[0], wrong)))
    assert built.result is Verdict.BLOCKED
    assert "generator: bridge from /usr/lib/bridge/__init__.py, expected from /home/user/bridge" in proof_of(built, "Local import")


def test_change_that_cannot_be_imported_fails_unless_the_trial_was_blocked(tmp_path: Path) -> None:
    broken = IMPORTS[0].model_copy(update={"file": None, "ok": False})
    assert report(tmp_path, trial(level(), imports=(broken,))).result is Verdict.FAIL
    blocked = trial(level(verdict=Verdict.BLOCKED), imports=(broken,), verdict=Verdict.BLOCKED)
    assert report(tmp_path, blocked).result is Verdict.BLOCKED


@pytest.mark.parametrize(
    ("imports", "packages"),
    [
        ((), ("bridge",)),
        (IMPORTS, ("bridge", "bridge_extra")),
        (IMPORTS, ()),
        ((ImportProof(process="driver", package="bridge", file="/x", ok=True),), ("bridge",)),
    ],
)
def test_import_that_nobody_proved_blocks(tmp_path: Path, imports: tuple[ImportProof, ...], packages: tuple[str, ...]) -> None:
    made = trial(level(), imports=imports)
    plan = made.plan.model_copy(update={"changes": (REPO.model_copy(update={"packages": packages}),)})
    built = report(tmp_path, made.model_copy(update={"plan": plan}))
    assert (built.result, verdict_of(built, "Local import")) == (Verdict.BLOCKED, "Blocked")


def test_package_that_was_only_found_is_a_limitation(tmp_path: Path) -> None:
    found = tuple(proof.model_copy(update={"method": "found"}) for proof in IMPORTS)
    built = report(tmp_path, trial(level(), imports=found))
    assert any(
        text.startswith("bridge was located in driver") and text.endswith("not proven by a real import there") for text in built.limitations
    )
    assert "(only found by driver, generator)" in proof_of(built, "Local import")


def test_nothing_requested_is_left_unmentioned(tmp_path: Path) -> None:
    plan = Plan(loop="toy", levels=planned(0, 2, 3, skip={3: "needs 2 GPUs"}), model="m", changes=(REPO,))
    built = report(tmp_path, trial(level(0), plan=plan))
    assert built.result is Verdict.SKIPPED
    assert proof_of(built, "Requested variants, level 2") == "not run: the trial recorded no result for it"
    assert proof_of(built, "Requested variants, level 3") == "needs 2 GPUs"
    assert proof_of(built, "Requested variants, other levels") == "not in the plan: level 1 (LoRA, checkpoint and resume)"
    assert [line for line in built.follow_ups if line.startswith("run level 2")]


def test_result_outside_the_plan_and_double_results_are_shown(tmp_path: Path) -> None:
    made = trial(level(0), level(0, verdict=Verdict.FAIL, reason="second attempt broke"), level(3, verdict=Verdict.BLOCKED))
    plan = Plan(loop="toy", levels=planned(0), model="m")
    built = report(tmp_path, made.model_copy(update={"plan": plan}))
    assert [str(line.verdict) for line in built.deliverables if line.name == "Toy RL policy run"] == ["Pass", "Fail"]
    assert verdict_of(built, "Requested variants, level 3") == "Blocked"
    assert built.result is Verdict.FAIL


def test_plan_without_levels_is_skipped(tmp_path: Path) -> None:
    built = report(tmp_path, trial(verdict=Verdict.SKIPPED, reason="nothing to run"))
    assert built.result is Verdict.SKIPPED
    assert verdict_of(built, "Toy RL policy run") == "Not requested"


def test_unfinished_trial_is_not_a_pass_even_if_every_level_is(tmp_path: Path) -> None:
    built = report(tmp_path, trial(level(0), status="running", verdict=None, ended=None))
    assert built.result is Verdict.BLOCKED
    assert "status: running" in built.answer
    assert "resume the trial, or run it again" in built.follow_ups


def test_level_that_failed_before_the_interruption_stays_fail(tmp_path: Path) -> None:
    made = interrupted().model_copy(update={"levels": (level(0, verdict=Verdict.FAIL, boundary=Boundary.PEFT),)})
    built = report(tmp_path, made)
    assert built.result is Verdict.FAIL
    assert "level 0 (GRPO smoke) is Fail at peft" in built.answer


def test_evidence_names_state_command_environment_and_first_error(tmp_path: Path) -> None:
    text = "\n".join(report(tmp_path, failed()).evidence)
    for words in (REPO.commit, "fix-provider", "src/bridge/provider.py", "bridge.patch", "seatrial run toy --change", "seed=7"):
        assert words in text
    for words in ("Python 3.11.9", "f00dcafe", "toy 1.0.0, torch 2.13.0", "loss is nan (levels/1-resume/run.log:412)", "1/2 checks met"):
        assert words in text


def test_limitations_are_merged_over_levels_and_noise_is_named(tmp_path: Path) -> None:
    built = report(tmp_path, failed())
    assert "level 0, 1: no claim of convergence" in built.limitations
    assert "level 1: residual log noise: resource_tracker: leaked semaphore" in built.limitations


def test_loose_ends_of_change_and_environment_are_limitations(tmp_path: Path) -> None:
    made = passed()
    module = REPO.submodules[0].model_copy(update={"state": "uninitialised"})
    repo = REPO.model_copy(update={"patch": None, "submodules": (module,), "branch": None})
    plan = made.plan.model_copy(update={"changes": (repo,), "unmatched": ("setup.cfg",)})
    assert made.environment is not None
    environment = made.environment.model_copy(update={"lock": None, "gpus": ("H200",)})
    built = report(tmp_path, made.model_copy(update={"plan": plan, "environment": environment}))
    text = "\n".join(built.limitations)
    for words in ("setup.cfg", "3rdparty/core uninitialised", "no patch of them was kept", "not built from a lock"):
        assert words in text
    assert "no GPU" not in text
    assert any("detached HEAD" in line for line in built.evidence)


def test_failed_finding_beside_levels_that_ran_does_not_block_them(tmp_path: Path) -> None:
    finding = Finding(name="clock", ok=False, message="drifts", fix="ntpdate")
    plan = Plan(loop="toy", levels=planned(0, 1), model="m", changes=(REPO,))
    built = report(tmp_path, trial(level(0), plan=plan, findings=(finding,)))
    assert verdict_of(built, "Requested variants, level 1") == "Skipped"
    assert "Preflight: clock: drifts" in built.evidence
    assert "fix clock: ntpdate" in built.follow_ups


def test_build_does_not_write(tmp_path: Path) -> None:
    report(tmp_path, passed(), files=False)
    assert list(tmp_path.iterdir()) == []
