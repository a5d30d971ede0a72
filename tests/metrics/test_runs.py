"""One run at a time: two runs are never read as one series, and the files of one run stay together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.metrics.read import read_metrics, read_run
from tests.cli.command import inside
from tests.metrics.test_read import DATA, rows
from tests.metrics.writer import write_series

GOOD, BAD = {1: 0.5, 2: 0.4, 3: 0.3}, {1: 9.0, 2: 9.0}


def state(path: Path, points: Mapping[int, float]) -> Path:
    return table(path, {"log_history": [{"step": step, "loss": value} for step, value in points.items()]})


def events(path: Path, points: Mapping[int, float], time: int = 1) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return write_series(path / f"events.out.tfevents.{time}.host.1.0", "train/loss", dict(points))


def table(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


SEVERAL: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl side by side": lambda top: [rows(top / name / "metrics.jsonl", "train/loss", BAD) for name in "ab"],
    "runs that follow each other": lambda top: (
        rows(top / "a/metrics.jsonl", "train/loss", {1: 1.0}),
        rows(top / "b/metrics.jsonl", "train/loss", {2: 1.0}),
    ),
    "event files side by side": lambda top: (events(top / "a", BAD), events(top / "b", GOOD)),
    "event files deep below": lambda top: (events(top / "x/run1/tb", BAD), events(top / "y/run2/tb", GOOD)),
    "two runs in one directory of events": lambda top: (events(top, BAD, 1), events(top, GOOD, 2)),
    "trainer states of two runs": lambda top: (
        state(top / "a/checkpoint-2/trainer_state.json", BAD),
        state(top / "b/checkpoint-2/trainer_state.json", GOOD),
    ),
    "two files of rows": lambda top: (rows(top / "run1.jsonl", "train/loss", BAD), rows(top / "run2.jsonl", "train/loss", GOOD)),
    "events of one, rows of another": lambda top: (events(top / "a", BAD), rows(top / "b/metrics.jsonl", "train/loss", GOOD)),
    "a run below another": lambda top: (
        rows(top / "metrics.jsonl", "train/loss", BAD),
        rows(top / "again/metrics.jsonl", "train/loss", GOOD),
    ),
    "tables of two runs": lambda top: [table(top / name / "metrics.json", {"score": value}) for name, value in (("a", 0.1), ("b", 0.2))],
    "other metrics side by side": lambda top: (
        rows(top / "a/metrics.jsonl", "sft/loss", BAD),
        rows(top / "b/metrics.jsonl", "train/loss", GOOD),
    ),
    "many": lambda top: [rows(top / f"{number}/metrics.jsonl", "train/loss", {1: float(number)}) for number in range(50)],
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_runs_are_refused_and_named(tmp_path: Path, name: str) -> None:
    SEVERAL[name](tmp_path)
    assert read_metrics([tmp_path]).series or name == "tables of two runs"  # what was judged before
    with pytest.raises(UserError, match=r"holds the metrics of \d+ runs: ") as caught:
        read_run([tmp_path])
    assert str(tmp_path) in caught.value.fix
    for words in (("check", tmp_path, 'max(data["train/loss"]) < 100'), ("metrics", "show", tmp_path), ("metrics", "dump", tmp_path)):
        assert inside(*words).code == 2


ONE: dict[str, Callable[[Path], object]] = {
    "resumed event files": lambda top: (events(top, {1: 1.0, 2: 1.0, 3: 1.0}, 1), events(top, {3: 2.0, 4: 2.0}, 2)),
    "checkpoints below": lambda top: (
        state(top / "checkpoint-1/trainer_state.json", {1: 1.0}),
        state(top / "checkpoint-2/trainer_state.json", {1: 1.0, 2: 1.0}),
        state(top / "trainer_state.json", {1: 1.0, 2: 1.0, 3: 1.0}),
        events(top / "runs/host", {1: 1.0, 2: 1.0, 3: 1.0}),
    ),
    "checkpoints alone": lambda top: [state(top / f"checkpoint-{n}/trainer_state.json", {1: float(n)}) for n in (9, 10)],
    "the same as rows and as events": lambda top: (events(top / "tb", GOOD), rows(top / "jsonl/metrics.jsonl", "train/loss", GOOD)),
    "sub-writers": lambda top: (
        events(top, GOOD),
        rows(top / "reward/metrics.jsonl", "reward", GOOD),
        rows(top / "length/metrics.jsonl", "length", GOOD),
    ),
    "train and eval in one directory": lambda top: (
        rows(top / "train.jsonl", "train/loss", GOOD),
        rows(top / "eval.jsonl", "eval/loss", BAD),
    ),
    "a dump beside its events": lambda top: (events(top, {1: 0.5}), table(top / "metrics.json", {"train/loss": {"1": 0.5}})),
}


@pytest.mark.parametrize("name", ONE)
def test_the_files_of_one_run_stay_together(tmp_path: Path, name: str) -> None:
    ONE[name](tmp_path)
    assert read_run([tmp_path]) == read_metrics([tmp_path])


@pytest.mark.parametrize("name", ["logger_run", "trainer_run"])
def test_real_runs_stay_together(name: str) -> None:
    assert read_run([DATA / name]) == read_metrics([DATA / name])


def test_what_is_named_together_belongs_together(tmp_path: Path) -> None:
    SEVERAL["runs that follow each other"](tmp_path)
    answer = inside("check", tmp_path / "a", 'len(data["train/loss"]) == 2', "--also", tmp_path / "b")
    assert answer.code == 0, answer.err
