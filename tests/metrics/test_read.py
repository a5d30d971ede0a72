from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.series import Overlap
from seatrial.metrics.read import read_metrics
from seatrial.metrics.readings import as_float32, same
from tests.metrics.writer import write_series

DATA = Path(__file__).parent.parent / "data" / "metrics"


def rows(path: Path, tag: str, points: dict[int, float]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"step": step, tag: value}) + "\n" for step, value in points.items()))
    return path


def test_the_same_metrics_from_events_and_jsonl_do_not_overlap() -> None:
    metrics = read_metrics([DATA / "logger_run"])
    assert metrics.overlaps == ()
    assert metrics.damage == ()
    assert [Path(source).name[:7] for source in metrics.sources] == ["events.", "metrics"]  # the rollouts are left alone
    assert metrics.series["train/loss"].steps == (1, 2, 3, 4)
    # JSONL holds doubles, event files floats: the precise value is kept.
    assert metrics.series["train/mfu"].values[0] == 0.0006935504195950899


def test_events_and_trainer_states_agree() -> None:
    metrics = read_metrics([DATA / "trainer_run"])
    assert len(metrics.sources) == 3
    assert metrics.overlaps == ()
    assert metrics.damage == ()
    assert metrics.last_step() == 20
    assert len(metrics.series) == 29
    assert all(len(series) in (1, 20) for series in metrics.series.values())


def test_prefix_and_several_paths(tmp_path: Path) -> None:
    first = rows(tmp_path / "a.jsonl", "loss", {1: 1.0})
    (tmp_path / "metrics.json").write_text('{"score": 1}')
    metrics = read_metrics([first, tmp_path / "metrics.json"], prefix="baseline/")
    assert metrics.series["baseline/loss"].tag == "baseline/loss"
    assert metrics.scalars == {"baseline/score": 1}


def test_a_resumed_run_the_last_writer_wins(tmp_path: Path) -> None:
    write_series(tmp_path / "events.out.tfevents.900.host.7.0", "loss", dict.fromkeys(range(1, 6), 1.0))
    write_series(tmp_path / "events.out.tfevents.1000.host.3.0", "loss", {4: 1.0, 5: 2.0, 6: 2.0})
    os.utime(tmp_path / "events.out.tfevents.900.host.7.0")  # copied later: the name counts, not the file's time
    metrics = read_metrics([tmp_path])
    assert metrics.series["loss"].steps == (1, 2, 3, 4, 5, 6)
    assert metrics.series["loss"].values == (1.0, 1.0, 1.0, 1.0, 2.0, 2.0)
    assert metrics.overlaps == (Overlap("loss", (5,)),)


def test_paths_are_merged_in_the_order_given(tmp_path: Path) -> None:
    one, two = rows(tmp_path / "1.jsonl", "loss", {1: 1.0}), rows(tmp_path / "2.jsonl", "loss", {1: 2.0})
    assert read_metrics([one, two]).series["loss"].values == (2.0,)
    assert read_metrics([two, one]).series["loss"].values == (1.0,)
    assert read_metrics([two, one, two]).sources == (str(two), str(one))  # no file counts twice


def test_a_step_written_twice_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 2, "loss": 1}\n{"step": 1, "loss": 5}\n{"step": 2, "loss": 3}\n{"step": 1, "loss": 5}\n')
    metrics = read_metrics([path])
    assert metrics.series["loss"].steps == (1, 2)
    assert metrics.series["loss"].values == (5.0, 3.0)
    assert metrics.overlaps == (Overlap("loss", (2,)),)


def test_newer_trainer_states_win(tmp_path: Path) -> None:
    for directory, value in (("checkpoint-9", 1.0), ("checkpoint-10", 2.0)):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": value}]}))
    assert read_metrics([tmp_path]).series["train/loss"].values == (2.0,)
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 3.0}]}))
    assert read_metrics([tmp_path]).series["train/loss"].values == (3.0,)


def test_non_finite_overlaps(tmp_path: Path) -> None:
    one, two = rows(tmp_path / "1.jsonl", "loss", {1: math.nan, 2: math.nan}), rows(tmp_path / "2.jsonl", "loss", {1: math.nan, 2: 1.0})
    assert read_metrics([one, two]).overlaps == (Overlap("loss", (2,)),)
    assert read_metrics([two, one]).series["loss"].non_finite() == (1, 2)


def test_scalars_that_differ_overlap(tmp_path: Path) -> None:
    for name, value in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").write_text(json.dumps({"score": value}))
    metrics = read_metrics([tmp_path])
    assert metrics.scalars == {"score": 0.2}
    assert metrics.overlaps == (Overlap("score", ()),)


def test_a_tag_cannot_be_series_and_scalar(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"score": 1}')
    rows(tmp_path / "more.jsonl", "score", {1: 2.0})
    metrics = read_metrics([tmp_path])
    assert metrics.scalars == {}
    assert metrics.series["score"].values == (2.0,)
    assert [damage.where for damage in metrics.damage] == ["tag 'score'"]


def test_damage_is_carried_with_its_file(tmp_path: Path) -> None:
    path = write_series(tmp_path / "run" / "events.out.tfevents.1.h.1.0", "loss", {1: 1.0, 2: 2.0})
    path.write_bytes(path.read_bytes()[:-3])
    (damage,) = read_metrics([tmp_path]).damage
    assert damage.path == str(path)
    assert damage.count == 1


def test_a_directory_whose_only_file_is_damaged_is_not_without_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"loss": {"1"')
    metrics = read_metrics([tmp_path])
    assert metrics.series == {}
    assert metrics.damage


@pytest.mark.parametrize("name", ["notes.txt", "notes.json", "notes.jsonl"])
def test_a_named_file_without_metrics_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("hello")
    with pytest.raises(UserError, match=f"{name}: the file holds no metrics"):
        read_metrics([tmp_path / name])


def test_a_named_rollout_file_is_an_error() -> None:
    with pytest.raises(UserError, match=r"1\.jsonl: the file holds no metrics"):
        read_metrics([DATA / "logger_run" / "rollout_dump" / "1.jsonl"])


def test_a_directory_without_metrics_is_an_error() -> None:
    with pytest.raises(UserError, match="rollout_dump: the directory holds no metrics"):
        read_metrics([DATA / "logger_run" / "rollout_dump"])


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such file or directory"):
        read_metrics([DATA / "rows.json", tmp_path / "nowhere"])


def test_an_unreadable_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match="cannot read: Permission denied"):
        read_metrics([tmp_path])


@pytest.mark.parametrize("value", [0.1, -3.3e-5, 1e300, 123456789.123])
def test_a_float_equals_the_double_it_was_rounded_from(value: float) -> None:
    assert same(value, as_float32(value))
    assert same(as_float32(value), value)
    assert not same(value, value * (1 + 1e-12))


def test_as_float32() -> None:
    assert as_float32(0.1) == struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert as_float32(-1e300) == -math.inf
    assert math.isnan(as_float32(math.nan))
