"""A trainer state that contradicts itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.metrics.read import read_metrics


@pytest.mark.parametrize(("reached", "damaged"), [(2, False), (3, False), (1, True)])
def test_steps_beyond_the_one_that_was_reached_are_damage(tmp_path: Path, reached: int, damaged: bool) -> None:
    path = tmp_path / "trainer_state.json"
    rows = [{"step": step, "loss": 0.5} for step in (1, 2)]
    path.write_text(json.dumps({"global_step": reached, "max_steps": 3, "log_history": rows}))
    assert bool(read_metrics([path]).damage) is damaged
