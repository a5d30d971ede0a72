"""A value that is not finite never disappears, not even under a later row of the same step."""

from __future__ import annotations

from pathlib import Path

from seatrial.metrics.read import read_metrics


def test_a_nan_that_is_written_over_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": "NaN"}\n{"step": 2, "loss": 0.5}\n')
    metrics = read_metrics([path])
    assert metrics.series["loss"].values == (1.0, 0.5)
    assert [(item.where, item.what) for item in metrics.damage] == [("loss, step 2", "the value nan was written over by 0.5")]


def test_a_finite_value_that_is_written_over_is_an_overlap_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 1, "loss": 0.5}\n')
    metrics = read_metrics([path])
    assert not metrics.damage
    assert [overlap.steps for overlap in metrics.overlaps] == [(1,)]
