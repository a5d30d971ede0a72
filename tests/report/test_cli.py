"""`seatrial report` rebuilds everything from disk and answers with the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner, Result

from seatrial.cli.judge import report
from seatrial.core.errors import UserError
from seatrial.core.files import write_json
from seatrial.core.verdict import Verdict
from tests.report.trials import LADDER, SIDE, TITLE, TRIALS, failed, passed, store_run

APP = typer.Typer()
APP.command()(report)


@pytest.fixture(autouse=True)
def _toy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials of these tests are of a loop that does not exist."""
    loop = SimpleNamespace(title=TITLE, levels=lambda: LADDER)
    monkeypatch.setattr("seatrial.loops.loop_of", lambda plan: {"toy": loop}[plan.loop])


def run(directory: Path, *options: str) -> Result:
    return CliRunner().invoke(APP, [str(directory), *options])


def store(directory: Path, name: str) -> None:
    store_run(directory, TRIALS[name]())


@pytest.mark.parametrize(
    ("name", "code"),
    [("passed", 0), ("failed", 1), ("skipped_mix", 77), ("blocked_preflight", 99), ("blocked_vacuous", 99), ("interrupted", 99)],
)
def test_exit_code_is_the_verdict_and_summary_is_printed(tmp_path: Path, name: str, code: int) -> None:
    store(tmp_path, name)
    result = run(tmp_path)
    assert result.exit_code == code
    assert result.stdout == (tmp_path / "summary.md").read_text()
    assert result.stdout.startswith("Result: ")


@pytest.mark.parametrize(("format", "file"), [("json", "report.json"), ("junit", "junit.xml"), ("html", "report.html")])
def test_other_formats_print_their_file(tmp_path: Path, format: str, file: str) -> None:
    store(tmp_path, "failed")
    assert run(tmp_path, "--format", format).stdout == (tmp_path / file).read_text()


def test_path_prints_where_the_page_is(tmp_path: Path) -> None:
    store(tmp_path, "passed")
    assert run(tmp_path, "--format", "path").stdout.strip() == str((tmp_path / "report.html").resolve())


def test_metrics_on_disk_reach_the_page(tmp_path: Path) -> None:
    store(tmp_path, "failed")
    rows = [{"step": step, "train/loss": "NaN" if step == 13 else 0.5} for step in range(1, 21)]
    (tmp_path / "levels/1-resume/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(tmp_path)
    assert "NaN at step 13" in (tmp_path / "report.html").read_text()


def test_lost_log_turns_a_stored_pass_into_fail(tmp_path: Path) -> None:
    store(tmp_path, "passed")
    (tmp_path / "levels/0-smoke/run.log").unlink()
    assert run(tmp_path).exit_code == 1


def test_altered_tests_of_the_change_are_no_pass(tmp_path: Path) -> None:
    side = SIDE.model_copy(update={"verdict": Verdict.PASS, "failed": 0, "reason": "11 tests passed"})
    store_run(tmp_path, passed().model_copy(update={"sides": (side,)}))
    assert run(tmp_path).exit_code == 0
    (tmp_path / side.directory / "junit.xml").write_text("13 tests\n")
    result = run(tmp_path)
    assert result.exit_code == 99
    assert "sides/bridge/junit.xml changed" in result.stdout


def test_directory_without_trial_is_a_user_error(tmp_path: Path) -> None:
    error = run(tmp_path).exception
    assert isinstance(error, UserError)
    assert "no trial.json" in error.message
    assert error.fix


def test_torn_and_foreign_trial_json_name_the_place(tmp_path: Path) -> None:
    (tmp_path / "trial.json").write_text('{"id": ')
    assert "trial.json:1:" in str(run(tmp_path).exception)
    write_json(tmp_path / "trial.json", failed().model_dump(mode="json") | {"verdict": "Passed"})
    error = run(tmp_path).exception
    assert isinstance(error, UserError)
    assert "verdict" in error.message


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, "--format", "pdf").exit_code == 2
