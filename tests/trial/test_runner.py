"""Whole trials of the fake loop: verdicts, what is stored, and what makes evidence worthless."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.files import read_json, read_model
from seatrial.core.loop import Phase
from seatrial.core.records import Finding, LevelResult, Report, Trial
from seatrial.core.verdict import Boundary, Verdict
from seatrial.trial import run_dir, runner
from seatrial.trial.level import Limits
from seatrial.trial.progress import Ended, Event, Found, Judged, Planned, Running, Stage
from tests.evidence.shapes import OPENSSH, ROWS
from tests.trial.conftest import Bench, commit, git, result
from tests.trial.fake import FakeLoop


def test_a_trial_that_passes_leaves_everything(bench: Bench) -> None:
    trial = bench.start(0, 1)
    assert (trial.verdict, trial.status, trial.reason) == (Verdict.PASS, "done", "every requested level passed")
    assert read_model(bench.out / "trial.json", Trial) == trial
    assert read_model(bench.out / "report.json", Report).result is Verdict.PASS
    for name in ("summary.md", "junit.xml", "report.html", "evidence/config.json", "evidence/environment.json", "evidence/imports.json"):
        assert (bench.out / name).stat().st_size, name
    for name in ("command.sh", "run.log", "metrics.jsonl", "checks.json", "result.json", "phases.json"):
        assert (bench.level(0) / name).stat().st_size, name
    stored = read_model(bench.level(1) / "result.json", LevelResult)
    assert stored == result(trial, 1)
    assert (stored.steps_reached, stored.steps_expected, stored.reason) == (3, 3, "second works")
    assert all(check.passed for check in stored.checks)
    assert {check.kind for check in stored.checks} == {"proof", "expression"}
    assert "a fake" in stored.limitations
    assert trial.imports[0].process == "driver"
    assert not list(bench.out.rglob("*.pids"))


def test_events_come_in_the_order_of_the_trial(bench: Bench) -> None:
    bench.start(0, 1)
    kinds = [type(event) for event in bench.events if not isinstance(event, Running | Found)]
    assert kinds == [Planned, Stage, Stage, Judged, Judged, Stage, Ended]


def test_the_command_of_a_level_runs_as_it_stands(bench: Bench, tmp_path: Path) -> None:
    bench.start(0)
    before = sorted(path.relative_to(bench.out) for path in bench.out.rglob("*"))
    other = tmp_path / "other place"
    done = subprocess.run(
        ["bash", bench.level(0) / "command.sh"], env={"OUT": str(other), "PATH": "/usr/bin:/bin"}, cwd="/", capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (other / "run" / "metrics.jsonl").read_text().count("\n") == 3
    assert sorted(path.relative_to(bench.out) for path in bench.out.rglob("*")) == before


OUTCOMES = [
    ("crash", Verdict.FAIL, Boundary.PROVIDER, "run: exit code 1: RuntimeError: the model is broken"),
    ("late", Verdict.FAIL, Boundary.CHECKPOINT, "checks met), after the milestone 'done', without an exception"),
    ("short", Verdict.FAIL, Boundary.METRICS, "reached step 2 of 3"),
    ("nan", Verdict.FAIL, Boundary.METRICS, "train/loss is not finite at step 2"),
    ("nan-printed", Verdict.FAIL, Boundary.METRICS, "says that train/loss is not finite"),
    ("torn", Verdict.FAIL, Boundary.METRICS, "metrics are damaged"),
    ("twice", Verdict.FAIL, Boundary.METRICS, "missed: no step was written twice"),
    ("flat", Verdict.BLOCKED, Boundary.REWARD, "vacuous: the reward never varied"),
    ("stuck", Verdict.FAIL, Boundary.OPTIMIZER, "missed: weights changed"),
    ("no-facts", Verdict.FAIL, Boundary.OPTIMIZER, "missed: weights changed"),
    ("no-imports", Verdict.BLOCKED, Boundary.ENVIRONMENT, "wrong import: driver: never reported what it imported"),
    ("torn-imports", Verdict.BLOCKED, Boundary.ENVIRONMENT, "imports.jsonl:1: the last row has no end"),
]


@pytest.mark.parametrize(("word", "verdict", "boundary", "reason"), OUTCOMES)
def test_each_way_to_go_wrong(bench: Bench, word: str, verdict: Verdict, boundary: Boundary, reason: str) -> None:
    bench.words = {0: word}
    trial = bench.start(0)
    level = result(trial, 0)
    assert (trial.verdict, level.verdict, level.boundary) == (verdict, verdict, boundary), level.reason
    assert reason in level.reason
    assert trial.reason == f"level 0: {level.reason}"
    assert read_model(bench.level(0) / "result.json", LevelResult) == level
    assert read_model(bench.out / "report.json", Report).result is verdict


def test_a_later_level_runs_although_an_earlier_one_failed(bench: Bench) -> None:
    bench.words = {0: "crash"}
    trial = bench.start(0, 1)
    assert (result(trial, 0).verdict, result(trial, 1).verdict, trial.verdict) == (Verdict.FAIL, Verdict.PASS, Verdict.FAIL)


def test_a_deadline_and_a_stall_are_placed_by_the_last_milestone(bench: Bench) -> None:
    bench.words = {0: "hang"}
    bench.patient(lambda: any(bench.out.glob("levels/*/run/waiting")))
    bench.limits = Limits(stall_minutes=0.3 / 60)
    level = result(bench.start(0), 0)
    assert (level.verdict, level.boundary, level.phases[0].ended) == (Verdict.FAIL, Boundary.OPTIMIZER, "stalled")
    bench.limits = Limits(deadline_minutes=0.3 / 60)
    bench.out = bench.out.with_name("second run")
    bench.out.mkdir()
    level = result(bench.start(0), 0)
    assert (level.verdict, level.boundary, level.phases[0].ended) == (Verdict.FAIL, Boundary.OPTIMIZER, "deadline")


def test_a_skipped_level_is_no_pass(bench: Bench) -> None:
    trial = bench.start(0, 3)
    assert (result(trial, 0).verdict, result(trial, 3).verdict) == (Verdict.PASS, Verdict.SKIPPED)
    assert trial.verdict is Verdict.SKIPPED
    assert result(trial, 3).reason == "not part of this release"


def test_a_finding_blocks_every_level_and_nothing_runs(bench: Bench) -> None:
    bench.finding = Finding(name="model", ok=False, boundary=Boundary.DATA, message="no such model", fix="--model tiny")
    trial = bench.start(0, 1)
    assert {level.verdict for level in trial.levels} == {trial.verdict} == {Verdict.BLOCKED}
    assert result(trial, 1).reason == "preflight: model: no such model"
    assert result(trial, 1).follow_ups == ("--model tiny",)
    assert result(trial, 1).boundary is Boundary.DATA
    assert not list(bench.out.rglob("run.log"))
    assert list(bench.out.rglob("command.sh"))


def test_an_interpreter_that_is_not_there_blocks_every_level(bench: Bench) -> None:
    bench.python = Path("/no/such/python")
    trial = bench.start(0, 1)
    assert {level.verdict for level in trial.levels} == {Verdict.BLOCKED}
    assert "/no/such/python: no such interpreter" in trial.reason
    assert trial.findings[-1].ok is False
    assert (bench.out / "summary.md").exists()


def test_an_interpreter_that_is_none_blocks_every_level(bench: Bench, tmp_path: Path) -> None:
    bench.python = tmp_path / "python"
    bench.python.write_text("#!/bin/sh\necho not json\n")
    bench.python.chmod(0o755)
    assert bench.start(0).verdict is Verdict.BLOCKED


def test_a_program_that_cannot_be_started_blocks_its_level(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLoop, "phases", lambda *_: (Phase(name="run", argv=("/no/such/program",)),))
    level = result(bench.start(0), 0)
    assert (level.verdict, level.boundary) == (Verdict.BLOCKED, Boundary.ENVIRONMENT)
    assert "/no/such/program" in level.reason


def test_a_wrong_import_makes_every_later_level_worthless(bench: Bench, repo: Path) -> None:
    bench.words, bench.changes = {0: "wrong-import"}, (repo,)
    trial = bench.start(0, 1, 2)
    assert {level.verdict for level in trial.levels} == {Verdict.BLOCKED}
    assert "wrong import: driver: imported pkg from /somewhere/else" in result(trial, 0).reason
    assert result(trial, 2).reason.startswith("not run: level 0 found a wrong import")
    assert not (bench.level(1) / "run.log").exists()
    assert [proof.ok for proof in trial.imports if proof.package == "pkg"] == [True]  # the probe's own word counts for nothing


def test_a_change_is_recorded_and_tested(bench: Bench, repo: Path) -> None:
    (repo / "pkg" / "smoke.py").write_text("a = 2\n")
    bench.changes = (repo,)
    trial = bench.start(0)
    assert trial.verdict is Verdict.PASS, trial.reason
    (recorded,) = trial.plan.changes
    assert recorded.dirty == ("pkg/smoke.py",)
    assert "+a = 2" in (bench.out / "evidence" / str(recorded.patch)).read_text()
    assert read_json(bench.out / "evidence" / "repos.json")[0]["commit"] == git(repo, "rev-parse", "HEAD")


def test_a_checkout_that_is_edited_while_the_trial_runs_blocks_its_pass(bench: Bench, repo: Path) -> None:
    bench.words, bench.changes = {0: "edit", 1: "crash"}, (repo,)
    trial = bench.start(0, 1)
    assert result(trial, 0).verdict is Verdict.BLOCKED
    assert "was changed while the trial ran" in result(trial, 0).reason
    assert read_model(bench.level(0) / "result.json", LevelResult) == result(trial, 0)  # no file goes on saying Pass
    assert result(trial, 1).verdict is Verdict.FAIL  # a failure is not excused by it


@pytest.mark.parametrize(
    ("word", "reason"),
    [("unloaded", "no process of the loop loaded any file of my_checkout_ü"), ("torn-loaded", "loaded.jsonl:1: not a row of loaded files")],
)
def test_a_change_that_was_not_loaded_was_not_tested(bench: Bench, repo: Path, word: str, reason: str) -> None:
    bench.words, bench.changes = {0: word}, (repo,)
    trial = bench.start(0)
    level = result(trial, 0)
    assert (trial.verdict, level.verdict, level.boundary, level.vacuous) == (Verdict.BLOCKED, Verdict.BLOCKED, Boundary.CONFIG, True)
    assert reason in level.reason
    assert read_model(bench.level(0) / "result.json", LevelResult) == level
    bench.words = {}
    assert bench.resume().verdict is Verdict.PASS


def changed(bench: Bench, repo: Path, text: str = "def f():\n    return 2\n\n\ndef g():\n    return 2\n") -> None:
    """Two functions of a package differ from the base."""
    bench.base = commit(
        repo, {"pkg/smoke.py": "import os\n\n\ndef f():\n    return 1\n\n\ndef g():\n    return 1\n", "tests/test_it.py": ""}
    )
    (repo / "pkg" / "smoke.py").write_text(text)
    bench.changes = (repo,)


def test_a_file_whose_changed_functions_never_ran_was_not_tested(bench: Bench, repo: Path) -> None:
    changed(bench, repo)
    (repo / "pkg" / "third.py").write_text("def h():\n    return 1\n")
    bench.words = {0: "call-nothing", 1: "call-nothing"}
    trial = bench.start(0, 1)
    assert {level.verdict for level in trial.levels} == {Verdict.BLOCKED}
    level = result(trial, 0)
    assert (level.boundary, level.vacuous) == (Boundary.CONFIG, True)
    assert level.reason == (
        "vacuous: none of the changed functions of my_checkout_ü ran (f (pkg/smoke.py:1), g (pkg/smoke.py:5), h (pkg/third.py:1)); "
        "these paths ask for level 2 (third): seatrial run fake --level 2"
    )


def test_a_function_that_ran_in_one_level_speaks_for_the_trial_and_is_named_in_the_others(bench: Bench, repo: Path) -> None:
    changed(bench, repo)
    bench.words = {0: "call-nothing", 1: "call-f"}
    trial = bench.start(0, 1)
    assert trial.verdict is Verdict.PASS, trial.reason
    never = "changed but never ran, so not tested: g (pkg/smoke.py:5) of my_checkout_ü"
    elsewhere = "none of the changed functions of my_checkout_ü ran in this level; level 1 (second) ran some"
    assert {never, elsewhere} <= set(result(trial, 0).limitations)
    assert never in result(trial, 1).limitations
    assert elsewhere not in result(trial, 1).limitations


def test_a_function_that_ran_only_in_a_level_that_failed_was_not_shown_to_work(bench: Bench, repo: Path) -> None:
    changed(bench, repo)
    bench.words = {0: "call-nothing", 1: "nan"}
    (repo / "pkg" / "WORD").write_text("x")
    trial = bench.start(0, 1)
    assert [level.verdict for level in trial.levels] == [Verdict.BLOCKED, Verdict.FAIL]


def test_what_is_no_code_needs_not_run(bench: Bench, repo: Path) -> None:
    changed(bench, repo, "# a comment\nimport os\n\n\ndef f():\n    return 1\n\n\ndef g():\n    return 1\n")
    bench.words = {0: "call-nothing"}
    trial = bench.start(0)
    assert trial.verdict is Verdict.PASS, trial.reason
    assert any("there is nothing to run" in text for text in result(trial, 0).limitations)


def test_without_a_base_or_a_recorder_files_decide_and_that_is_said(bench: Bench, repo: Path) -> None:
    bench.changes = (repo,)
    assert any("no base is known" in text for text in result(bench.start(0), 0).limitations)


def test_a_loop_that_records_no_functions_is_judged_by_files(bench: Bench, repo: Path) -> None:
    changed(bench, repo)
    trial = bench.start(0)
    assert trial.verdict is Verdict.PASS
    assert any("which functions ran was not recorded" in text for text in result(trial, 0).limitations)


def test_a_checkout_that_loads_itself_is_reported(bench: Bench, repo: Path) -> None:
    changed(bench, repo)
    (repo / "sitecustomize.py").write_text("import pkg.smoke\npkg.smoke.f()\n")
    bench.words = {0: "call-nothing"}
    trial = bench.start(0)
    assert result(trial, 0).verdict is Verdict.BLOCKED
    assert any(finding.name == "loads itself" and "sitecustomize.py" in finding.message for finding in trial.findings)
    assert "none of the changed functions" in result(trial, 0).reason


def test_a_checkout_that_vanishes_while_the_trial_runs_blocks_its_pass(bench: Bench, repo: Path) -> None:
    bench.changes = (repo,)
    gone = repo.with_name("gone")

    def move(event: Event) -> None:
        if isinstance(event, Judged) and repo.exists():
            repo.rename(gone)

    bench.meddle = move
    assert bench.start(0).verdict is Verdict.BLOCKED


def test_a_run_directory_inside_the_checkout_is_no_change_of_it(bench: Bench, repo: Path) -> None:
    bench.changes = (repo,)
    bench.out = run_dir.new_directory(repo / "trials", "fake")
    assert bench.start(0).verdict is Verdict.PASS


def test_a_trial_that_holds_a_directory_keeps_others_out(bench: Bench) -> None:
    with run_dir.locked(bench.out), pytest.raises(UserError, match="another seatrial"):
        bench.start(0)
    assert not (bench.out / "trial.json").exists()


def planted(directory: Path, *secrets: str) -> list[str]:
    """Files below the directory that hold one of the secrets."""
    found = []
    for path in directory.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            found += [f"{path.relative_to(directory)}: {secret}" for secret in secrets if secret.encode() in content]
    return found


def test_no_secret_reaches_any_file_of_the_run_directory(bench: Bench, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, password, argument = "hf_" + "Aa1Bb2Cc3" * 4, "pw-Zx81kQ-93hfk2", "sk-abc123DEF456ghi789JKL012"
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("PLANTED_PASSWORD", password)
    git(repo, "remote", "add", "origin", f"https://me:{password}@example.org/x.git")
    (repo / "pkg" / "smoke.py").write_text(f"TOKEN = '{token}'\n")
    (repo / "id_ed25519").write_text(OPENSSH + "\n")
    (repo / f"notes-{token}.txt").write_text(f"machine x\nlogin y\npassword {password}\n")
    git(repo, "checkout", "-q", "-b", f"fix-{token}")
    monkeypatch.setenv("PLANTED_LOG", f"{OPENSSH}\nDB_PASS=planted-in-the-log\nmysql -pplanted-in-a-command db")
    bench.words, bench.changes = {0: "secret"}, (repo,)
    bench.arguments = ("--hub_token", argument, f"--api_key={argument}", "--wandb_password", "correct-horse")
    trial = bench.start(0)
    assert trial.verdict is Verdict.FAIL
    log = (bench.level(0) / "run.log").read_text()
    assert "fake: imports, called with" in log
    assert "[redacted" in log
    assert planted(bench.out, token, password, argument, "correct-horse", "planted-in", *ROWS) == []
    stored = read_model(bench.out / "trial.json", Trial).plan.arguments
    assert stored == (
        "--hub_token",
        "[redacted:hub_token]",
        "--api_key=[redacted:api_key]",
        "--wandb_password",
        "[redacted:wandb_password]",
    )


def test_a_trial_with_a_secret_argument_cannot_be_resumed(bench: Bench) -> None:
    bench.arguments = ("--hub_token", "sk-abc123DEF456ghi789JKL012")
    assert bench.start(0).verdict is Verdict.PASS  # the process gets the real value
    with pytest.raises(UserError, match="a loop argument is a secret that was not stored"):
        bench.resume()


def test_the_process_gets_the_real_arguments(bench: Bench) -> None:
    bench.arguments = ("--name", 'größe "x" $HOME', "--flag")
    trial = bench.start(0)
    assert "--flag" in (bench.level(0) / "run.log").read_text()
    assert 'größe "x" $HOME' in (bench.level(0) / "run.log").read_text()
    assert any("loop arguments override" in text for text in result(trial, 0).limitations)


def test_a_commit_while_the_state_is_recorded_is_refused(bench: Bench, repo: Path) -> None:
    bench.changes = (repo,)
    request = bench.request(0)
    commit(repo, {"new.py": "x\n"})
    with pytest.raises(UserError, match="the repository changed while its state was recorded"):
        runner.start(request, bench.events.append)
    assert not (bench.out / "trial.json").exists()  # nothing that `resume` could take for a trial
