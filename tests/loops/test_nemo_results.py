"""Which run of a script left which files."""

from __future__ import annotations

from pathlib import Path

from seatrial.loops.nemo_rl import nemo_outputs
from tests.metrics.writer import write_series


def events(place: Path) -> Path:
    place.mkdir(parents=True)
    return write_series(place / "events.out.tfevents.1.host", "train/loss", {1: 0.5})


def test_the_only_run_has_no_prefix_and_its_files_are_found(tmp_path: Path) -> None:
    one = events(tmp_path / "run/results/logs/exp_001/tensorboard")
    (tmp_path / "run/results/metrics.json").write_text("{}")
    (tmp_path / "run/results/logs/exp_001/train_data_step1.jsonl").write_text("")
    assert nemo_outputs.metric_files(tmp_path) == {"": (one,)}
    assert nemo_outputs.dumps(tmp_path) == {"": tmp_path / "run/results/metrics.json"}
    assert [(prefix, path.name) for prefix, path in nemo_outputs.token_files(tmp_path)] == [("", "train_data_step1.jsonl")]


def test_runs_of_a_script_are_told_apart_and_a_resumed_one_is_one(tmp_path: Path) -> None:
    base = events(tmp_path / "resume/results/logs/baseline/exp_001/tensorboard")
    first, second = (events(tmp_path / f"resume/results/logs/mcore/exp_00{n}/tensorboard") for n in (1, 2))
    case = events(tmp_path / "run/results/w4a16/logs/exp_001/tensorboard")
    assert nemo_outputs.metric_files(tmp_path) == {"resume/baseline/": (base,), "resume/mcore/": (first, second), "w4a16/": (case,)}


def test_without_events_the_dump_counts_and_without_both_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "run/results/logs").mkdir(parents=True)
    assert nemo_outputs.metric_files(tmp_path) == {}
    (tmp_path / "run/results/metrics.json").write_text("{}")
    assert nemo_outputs.metric_files(tmp_path) == {"": (tmp_path / "run/results/metrics.json",)}
