"""`seatrial judge` on what a NeMo-RL run left, without running anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.core.verdict import Verdict
from seatrial.loops import get_loop
from seatrial.trial.files_judge import FileVerdict, judge_files
from tests.loops.nemo_logs import grpo_log

LOOP = get_loop("nemo-rl")


def judged(tmp_path: Path, text: str, *metrics: Path, level: int | None = 0) -> FileVerdict:
    log = tmp_path / "run.log"
    log.write_text(text, encoding="utf-8")
    return judge_files(LOOP, log, metrics, LOOP.levels()[level] if level is not None else None, 2)


@pytest.mark.parametrize("level", [0, None])
def test_a_log_alone_prints_too_little_and_is_inconclusive(tmp_path: Path, level: int | None) -> None:
    found = judged(tmp_path, grpo_log(steps=2, planned=2), level=level)
    assert found.verdict is Verdict.BLOCKED
    assert found.reason.startswith("inconclusive: no train/grad_norm was logged")
    assert any("not checked, since train/grad_norm was not logged" in text for text in found.limitations) is (level == 0)


def test_a_log_alone_still_shows_a_failure(tmp_path: Path) -> None:
    assert judged(tmp_path, grpo_log(steps=1, planned=2)).verdict is Verdict.FAIL


def test_metrics_that_were_given_must_hold_what_the_level_asks_for(tmp_path: Path) -> None:
    dump = tmp_path / "metrics.json"
    dump.write_text(json.dumps({"train/loss": {"1": 0.1, "2": 0.2}}))
    found = judged(tmp_path, grpo_log(steps=2, planned=2), dump)
    assert found.verdict is Verdict.FAIL
    assert "train/grad_norm" in found.reason
