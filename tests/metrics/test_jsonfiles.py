from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from seatrial.metrics.json_files import read_json_metrics, read_jsonl
from seatrial.metrics.readings import FileReading

DATA = Path(__file__).parent.parent / "data" / "metrics"


def jsonl(tmp_path: Path, text: str, name: str = "rows.jsonl") -> FileReading | None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_jsonl(path)


def table(tmp_path: Path, text: str, name: str = "metrics.json") -> FileReading | None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read_json_metrics(path)


def must(reading: FileReading | None) -> FileReading:
    assert reading is not None
    return reading


def points(reading: FileReading, tag: str) -> list[tuple[int, float]]:
    return list(zip(reading.points[tag].steps, reading.points[tag].values, strict=True))


def test_rows_with_data() -> None:
    reading = must(read_jsonl(DATA / "logger_run" / "metrics.jsonl"))
    assert reading.damage == []
    assert points(reading, "train/loss") == [(1, 6.953125), (2, 6.6875), (3, 6.5), (4, 6.375)]
    assert points(reading, "val/loss") == [(2, 6.4921875), (4, 6.2421875)]


def test_flat_rows(tmp_path: Path) -> None:
    reading = must(jsonl(tmp_path, '{"step": 1, "loss": 0.5, "ok": true}\n\n{"step": 2.0, "loss": 1}\r\n'))
    assert points(reading, "loss") == [(1, 0.5), (2, 1.0)]
    assert "ok" not in reading.points  # true is no number
    assert reading.damage == []


@pytest.mark.parametrize(
    ("text", "expected"), [("null", math.nan), ('"NaN"', math.nan), ("NaN", math.nan), ("1e999", math.inf), ('"-Infinity"', -math.inf)]
)
def test_non_finite_values_are_points(tmp_path: Path, text: str, expected: float) -> None:
    reading = must(jsonl(tmp_path, f'{{"step": 1, "data": {{"loss": {text}}}}}\n'))
    (value,) = reading.points["loss"].values
    assert value == expected or (math.isnan(value) and math.isnan(expected))
    assert reading.damage == []


def test_an_integer_beyond_a_double(tmp_path: Path) -> None:
    assert points(must(jsonl(tmp_path, f'{{"step": 1, "x": 1{"0" * 400}}}\n')), "x") == [(1, math.inf)]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("not json", "not valid JSON"),
        ("[1, 2]", "not an object"),
        ('{"loss": 0.5}', "no step"),
        ('{"step": "3", "loss": 0.5}', "the step '3' is not a whole number"),
        ('{"step": 1.5, "loss": 0.5}', "the step 1.5 is not a whole number"),
        ('{"step": true, "loss": 0.5}', "the step True is not a whole number"),
        ('{"step": 2, "loss": "oops"}', "the value of 'loss' is not a number"),
        ('{"step": 2, "loss": [1]}', "the value of 'loss' is not a number"),
        ('{"step": 2, "loss": 1, "loss": 2}', "the key 'loss' occurs twice"),
        ("\x00\x00\x00", "not valid JSON"),
        ("[" * 100_000, "not valid JSON: nested deeper than 100"),
    ],
)
def test_a_bad_line_is_damage_with_its_number(tmp_path: Path, line: str, what: str) -> None:
    reading = must(jsonl(tmp_path, f'{{"step": 1, "loss": 1}}\n{line}\n{{"step": 3, "loss": 3}}\n'))
    assert [(damage.where, damage.count, damage.what) for damage in reading.damage] == [("line 2", 1, what)]
    assert {(1, 1.0), (3, 3.0)} <= set(points(reading, "loss"))


def test_a_torn_last_line(tmp_path: Path) -> None:
    reading = must(jsonl(tmp_path, '{"step": 1, "loss": 1}\n{"step": 2, "lo'))
    assert [(damage.where, damage.what) for damage in reading.damage] == [("line 2", "the last line is torn")]


def test_a_tag_that_is_always_text_is_no_metric(tmp_path: Path) -> None:
    reading = must(jsonl(tmp_path, '{"step": 1, "data": {"loss": 1, "phase": "warm"}}\n'))
    assert list(reading.points) == ["loss"]
    assert reading.damage == []


def test_rollouts_are_no_metrics(tmp_path: Path) -> None:
    assert read_jsonl(DATA / "logger_run" / "rollout_dump" / "1.jsonl") is None
    assert jsonl(tmp_path, "hello\nworld\n") is None
    assert jsonl(tmp_path, '{"step": 1}\n') is None


def test_a_file_called_metrics_is_metrics_even_when_nothing_can_be_read(tmp_path: Path) -> None:
    assert must(jsonl(tmp_path, '{"st', "metrics.jsonl")).damage
    assert must(jsonl(tmp_path, "", "metrics.jsonl")).points == {}
    dated = must(jsonl(tmp_path, '{"step": 1, "time": "12:00", "loss": 0.5}\n', "metrics.jsonl"))
    assert list(dated.points) == ["loss"]


def test_tables_and_scalars(tmp_path: Path) -> None:
    reading = must(table(tmp_path, '{"a": {"2": 1, "10": NaN}, "b": {}, "score": 0.15, "ok": "yes", "off": null, "bad": "NaN", "n": 3}'))
    assert points(reading, "a")[0] == (2, 1.0)
    assert math.isnan(points(reading, "a")[1][1])
    assert reading.points["b"].steps == []
    assert {key: value for key, value in reading.scalars.items() if key != "bad"} == {"score": 0.15, "ok": "yes", "off": None, "n": 3}
    assert isinstance(reading.scalars["bad"], float)
    assert math.isnan(reading.scalars["bad"])
    assert reading.damage == []


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ('{"a": {"1": 1, "x": 2}}', "a['x']", "the step is not a whole number"),
        ('{"a": {"1": 1, "2": "high"}}', "a['2']", "the value 'high' is not a number"),
        ('{"a": {"1": 1, "1": 2}}', "key '1'", "the key occurs twice"),
        ('{"a": {"1": 1', "line 1 column 14", "not valid JSON: torn, or still being written"),
        ("", "line 1 column 1", "not valid JSON: torn, or still being written"),
    ],
)
def test_a_damaged_table(tmp_path: Path, text: str, where: str, what: str) -> None:
    assert [(damage.where, damage.what) for damage in must(table(tmp_path, text)).damage] == [(where, what)]


@pytest.mark.parametrize("text", ["{}", "3", '"x"', "[]", "[1, 2]", '{"nested": {"x": {"1": 1}}, "list": [1]}', '[{"a": "b"}]'])
def test_other_json_is_no_metrics(tmp_path: Path, text: str) -> None:
    assert table(tmp_path, text) is None


def test_torn_json_of_another_name_is_no_metrics(tmp_path: Path) -> None:
    assert table(tmp_path, '{"a": ', "settings.json") is None


def test_a_list_of_rows() -> None:
    reading = must(read_json_metrics(DATA / "rows.json"))
    assert reading.points["reward"].steps == list(range(1, 41))
    assert reading.points["reward"].values[0] == 0.01171875
    assert reading.damage == []


def test_trainer_state() -> None:
    reading = must(read_json_metrics(DATA / "trainer_run" / "trainer_state.json"))
    assert reading.damage == []
    assert reading.points["train/reward"].steps == list(range(1, 21))
    assert points(reading, "train/train_loss") == [(20, -0.014609217806719244)]
    assert not reading.scalars


def test_trainer_state_splits_and_damage(tmp_path: Path) -> None:
    history = [{"step": 1, "loss": 1.0}, {"step": 1, "eval_loss": 2.0, "test_acc": 3.0}, {"loss": 4.0}, "x"]
    reading = must(table(tmp_path, json.dumps({"log_history": history, "global_step": 1}), "trainer_state.json"))
    assert sorted(reading.points) == ["eval/loss", "test/acc", "train/loss"]
    assert [damage.where for damage in reading.damage] == ["log_history row 3", "log_history row 4"]
