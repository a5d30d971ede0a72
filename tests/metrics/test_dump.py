from __future__ import annotations

import json
import math
from pathlib import Path

from seatrial.core.files import write_json
from seatrial.core.series import Metrics, Series
from seatrial.metrics.json_files import to_metrics_json
from seatrial.metrics.read import read_metrics

DATA = Path(__file__).parent.parent / "data" / "metrics"


def test_tags_are_sorted_and_steps_ascend() -> None:
    metrics = Metrics(
        {"b": Series("b", (2, 10), (1.0, 2.0)), "a": Series("a", (), ())}, {"score": 0.15, "word": "yes", "off": None, "ok": True}
    )
    text = json.dumps(to_metrics_json(metrics))
    assert text == '{"a": {}, "b": {"2": 1.0, "10": 2.0}, "off": null, "ok": true, "score": 0.15, "word": "yes"}'


def test_non_finite_values_are_strict_json_and_come_back(tmp_path: Path) -> None:
    metrics = Metrics({"x": Series("x", (1, 2, 3), (math.nan, math.inf, -math.inf))}, {"score": math.nan})
    content = to_metrics_json(metrics)
    assert content == {"score": "NaN", "x": {"1": "NaN", "2": "Infinity", "3": "-Infinity"}}
    write_json(tmp_path / "metrics.json", content)
    back = read_metrics([tmp_path])
    assert math.isnan(back.series["x"].values[0])
    assert back.series["x"].values[1:] == (math.inf, -math.inf)
    assert isinstance(back.scalars["score"], float)
    assert back.damage == ()


def test_a_real_run_survives_the_round_trip(tmp_path: Path) -> None:
    metrics = read_metrics([DATA / "trainer_run"])
    write_json(tmp_path / "metrics.json", to_metrics_json(metrics))
    assert read_metrics([tmp_path]).series == metrics.series
