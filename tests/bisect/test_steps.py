"""What exactly a step runs, and what its command.sh says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.bisect.step_preparer import begun, step_command, step_variables, write_step
from seatrial.core.errors import UserError
from tests.bisect.prepared import plan_of, prepared_of, ready_of, step_of

PATH = {"PATH": os.environ["PATH"]}


def test_placeholders_are_filled_in_words_and_values_and_other_braces_stay(tmp_path: Path) -> None:
    step = step_of(tmp_path)
    plan = plan_of("{python}", "{tree}/x", "--o={output}:{checkpoints}", "{commit}", '{"a": {}}', "{trees}", variables={"A": "{tree}/a"})
    python = tmp_path / "bin" / "python"
    assert step_command(plan, step, ready_of(python)) == (
        *(str(python), f"{step.tree}/x", f"--o={step.output}:{step.checkpoints}"),
        *(step.point.commit, '{"a": {}}', "{trees}"),
    )
    assert step_variables(plan, step, ready_of(), {})["A"] == f"{step.tree}/a"
    assert step_command(plan_of("{python}"), step, ready_of()) == (sys.executable,)


def test_what_is_filled_in_is_not_filled_in_again(tmp_path: Path) -> None:
    step = step_of(tmp_path / "{commit}")
    assert step_command(plan_of("{tree}"), step, ready_of()) == (str(step.tree),)


def test_extra_arguments_stand_at_the_end(tmp_path: Path) -> None:
    assert step_command(plan_of("run", "x", extra=("--more", "{commit}")), step_of(tmp_path), ready_of())[2:] == ("--more", f"{1:040x}")


def test_a_trial_tests_the_tree_and_keeps_its_run_directory_in_the_step(tmp_path: Path) -> None:
    step = step_of(tmp_path)
    made = step_command(plan_of("trl", "--level", "0", "--", "--lr", "1", trial=True), step, ready_of())
    assert made[1:5] == ("-P", "-m", "seatrial.cli.main", "run")
    assert made[5:] == ("--no-base", "--out", str(step.trial), "--change", str(step.tree), "trl", "--level", "0", "--", "--lr", "1")
    named = step_command(plan_of("trl", "-c", "trl={tree}/part", trial=True), step, ready_of())
    assert "--change" not in named
    assert f"trl={step.tree}/part" in named


def test_a_trial_does_not_run_the_trees_seatrial(tmp_path: Path) -> None:
    ready = ready_of(PYTHONPATH="/tree/src")
    step = step_of(tmp_path)
    assert step_variables(plan_of("trl"), step, ready, {})["PYTHONPATH"] == "/tree/src"
    assert "PYTHONPATH" not in step_variables(plan_of("trl", trial=True), step, ready, {"PYTHONPATH": "/caller"})


def test_the_callers_environment_cannot_point_the_command_at_another_checkout(tmp_path: Path) -> None:
    lost = {"GIT_DIR": "/mine/.git", "GIT_INDEX_FILE": "/mine/index", "GIT_WORK_TREE": "/mine", "PYTHONPATH": "/mine", "RANK": "0"}
    kept = {"HOME": "/home/me", "GIT_SSH_COMMAND": "ssh -i key", "GIT_CONFIG_COUNT": "0"}
    made = step_variables(plan_of("true"), step_of(tmp_path), ready_of(), {**lost, **kept})
    assert not set(lost) & set(made)
    assert kept.items() <= made.items()


def test_what_the_user_set_wins_over_the_environment_and_seatrials_own_over_both(tmp_path: Path) -> None:
    step = step_of(tmp_path)
    plan = plan_of("true", variables={"MODE": "user", "SEATRIAL_TREE": "elsewhere"})
    made = step_variables(plan, step, ready_of(MODE="commit", ONLY="commit"), {"MODE": "caller", "ONLY": "caller"})
    assert (made["MODE"], made["ONLY"], made["SEATRIAL_TREE"]) == ("user", "commit", str(step.tree))
    assert (made["SEATRIAL_OUTPUT"], made["SEATRIAL_CHECKPOINTS"]) == (str(step.output), str(step.checkpoints))
    assert made["SEATRIAL_COMMIT"] == step.point.commit


def test_a_name_that_no_shell_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not the name of a variable"):
        step_variables(plan_of("true", variables={"A B": "1"}), step_of(tmp_path), ready_of(), {})


def test_command_sh_runs_as_it_stands(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), sys.argv[1:], os.environ['ODD'], os.environ.get('GIT_DIR'), os.environ['SEATRIAL_COMMIT'])"
    odd = "two\nlines $HOME `id` 'quoted'"
    plan = plan_of(sys.executable, "-c", code, "a b", "$(id)", "*", variables={"ODD": odd})
    base = {**PATH, "GIT_DIR": "/mine/.git"}
    prepared = prepared_of(plan, tmp_path, base=base)
    done = subprocess.run(
        ["bash", str(prepared.step.command_file)], env=base, cwd="/", capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == f"{prepared.step.tree} ['a b', '$(id)', '*'] {odd} None {prepared.step.point.commit}\n"
    assert prepared.step.output.is_dir()
    assert prepared.step.checkpoints.is_dir()


def test_command_sh_without_its_tree_says_so_and_skips(tmp_path: Path) -> None:
    prepared = prepared_of(plan_of("true"), tmp_path, base=PATH)
    prepared.step.tree.rmdir()
    done = subprocess.run(["bash", str(prepared.step.command_file)], env=PATH, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 125
    assert "Put a checkout of" in done.stderr


def test_no_secret_is_written_and_what_is_missing_is_named(tmp_path: Path) -> None:
    mine, given = "hf_" + "m" * 34, "hf_" + "g" * 34
    base = {**PATH, "HF_TOKEN": mine}
    plan = plan_of("run", f"--token={given}", mine, variables={"WANDB_API_KEY": given, "HF_TOKEN": mine})
    prepared = write_step(plan, step_of(tmp_path, subject=f"Use {mine}"), ready_of(), base)
    text = prepared.step.command_file.read_text()
    assert mine not in text
    assert given not in text
    assert "WANDB_API_KEY is a secret" in text
    assert prepared.env["WANDB_API_KEY"] == given
    assert prepared.argv[1] == f"--token={given}"
    # What the caller has exported reaches a job from there.
    assert set(prepared.withheld) == {"WANDB_API_KEY", "the command"}


def test_facts_date_from_before_the_run_on_the_clock_of_the_file_system(tmp_path: Path) -> None:
    prepared = prepared_of(plan_of("true"), tmp_path)
    (prepared.step.output / "new").write_text("")
    facts = prepared.facts(0, "exited")
    assert (facts.log, facts.tree, facts.trial) == (prepared.step.log, prepared.step.tree, None)
    assert facts.started <= (prepared.step.output / "new").stat().st_mtime
    again = begun(plan_of("true"), prepared.step, ready_of(), {"PATH": "/elsewhere"}, prepared.stamp)
    assert again.facts(0, "exited").started == facts.started  # the same run, found again after a restart


def test_facts_of_a_trial_say_where_it_is(tmp_path: Path) -> None:
    prepared = prepared_of(plan_of("trl", trial=True), tmp_path)
    assert prepared.facts(1, "exited").trial == prepared.step.trial
