from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from seatrial.cli.judge import check
from seatrial.cli.metrics import app as metrics_app
from seatrial.cli.metrics import sparkline
from seatrial.core.errors import UserError

DATA = Path(__file__).parent.parent / "data" / "metrics"
RUN = str(DATA / "logger_run")

app = typer.Typer()
app.command()(check)
app.add_typer(metrics_app, name="metrics")


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    return path


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_check_passes() -> None:
    code, output, _ = run("check", RUN, 'data["train/loss"]["4"] < 6.4', '"4" in data["val/loss"]')
    assert code == 0
    assert output.count("Pass") == 2
    assert 'data["train/loss"]["4"] < 6.4' in output
    assert "6.375" in output


def test_check_misses() -> None:
    code, output, _ = run("check", RUN, 'data["train/loss"]["4"] < 6.4', 'max(data["train/los"]) < 9')
    assert code == 1
    assert "did you mean train/loss" in output


def test_a_wrong_expression_is_told_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no comparison"):
        run("check", str(tmp_path / "nowhere"), 'max(data["a"])')


def test_missing_metrics_are_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        run("check", str(tmp_path / "nowhere"), 'max(data["a"]) < 1')


def test_damaged_metrics_cannot_pass(torn: Path) -> None:
    code, output, _ = run("check", str(torn), 'data["loss"]["1"] == 1')
    assert code == 1
    assert "metrics are undamaged" in output
    assert "line 2" in output


def test_check_as_json(torn: Path) -> None:
    code, output, _ = run("check", str(torn), 'data["loss"]["1"] == 1', 'data["loss"]["2"] == 1', "--json")
    content = json.loads(output)
    assert code == 1
    assert content["passed"] is False
    assert [result["passed"] for result in content["checks"]] == [True, False, False]
    assert content["checks"][1]["missing"] == [2]
    assert content["sources"] == [str(torn)]
    assert len(content["damage"]) == 1


def test_check_without_expressions_is_a_usage_error() -> None:
    assert run("check", RUN)[0] == 2


def test_dump_to_standard_output() -> None:
    code, output, _ = run("metrics", "dump", RUN)
    assert code == 0
    assert json.loads(output)["train/loss"] == {"1": 6.953125, "2": 6.6875, "3": 6.5, "4": 6.375}


def test_dump_writes_the_file_and_fails_on_damage(torn: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        run("metrics", "dump", str(torn), "--output", str(tmp_path / "absent" / "metrics.json"))
    target = tmp_path / "metrics.json"
    code, output, errors = run("metrics", "dump", str(torn), "--output", str(target))
    assert code == 1
    assert output == ""
    assert "damaged" in errors
    assert "line 2" in errors
    assert json.loads(target.read_text()) == {"loss": {"1": 1.0}}


def test_show() -> None:
    code, output, _ = run("metrics", "show", str(DATA / "trainer_run"), "--tag", "train/reward*")
    assert code == 0
    line = next(line for line in output.splitlines() if "train/reward " in line)
    assert "1…20" in line
    assert "0.777315" in line
    assert "▁" in line
    assert "train/loss" not in output


def test_show_empty_series_scalars_and_overlaps(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"none": {}, "bad": {"1": NaN}, "score": 0.15}')
    (tmp_path / "rows.jsonl").write_text('{"step": 1, "x": 1}\n{"step": 1, "x": 2}\n')
    code, output, _ = run("metrics", "show", str(tmp_path))
    assert code == 0
    assert "×" in output
    assert "0.15" in output
    assert "x: written more than once with different values at 1 steps" in output


def test_show_without_a_match_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no metric matches 'nope'"):
        run("metrics", "show", RUN, "--tag", "nope")


def test_show_fails_on_damage(torn: Path) -> None:
    assert run("metrics", "show", str(torn))[0] == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([0.0, 1.0], "▁█"),
        ([0.0, math.nan, 1.0], "▁×█"),
        ([math.inf, math.inf], "××"),
        ([2.0] * 100, "▁" * 24),
        ([-1.7e308, 1.7e308], "▁█"),
    ],
)
def test_sparkline(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected
