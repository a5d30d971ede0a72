"""`seatrial check RUN`: a bound that one level misses is not passed by another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest

from seatrial.core.records import Cost, Plan, PlannedLevel, Trial
from seatrial.trial import run_dir
from tests.cli.command import Answer, inside
from tests.trial.fake import LEVELS, FakeLoop

LOW, SAME = 'max(data["train/loss"]) < 1', 'len(data["train/loss"]) >= 1'


def call(*words: str | Path) -> Answer:
    with mock.patch("seatrial.loops.get_loop", return_value=FakeLoop()):
        return inside(*words)


def make(path: Path, losses: dict[int, list[float]]) -> Path:
    """A trial whose levels logged these losses."""
    plan = tuple(PlannedLevel(number=n, name=LEVELS[n].name, title="t", reasons=(), cost=Cost(minutes=1)) for n in losses)
    trial = Trial(id="t", seatrial="0", created="c", plan=Plan(loop="fake", levels=plan, model="m"), command=(), status="done")
    run_dir.save(path, trial)
    for planned in plan:
        text = "".join(json.dumps({"step": step, "train/loss": loss}) + "\n" for step, loss in enumerate(losses[planned.number], 1))
        for place in ("run/metrics.jsonl", "metrics.jsonl", "attempts/1/run/metrics.jsonl"):
            file = run_dir.level_directory(path, planned) / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text if "attempts" not in place else '{"step": 1, "train/loss": 50}\n')
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Level 0 misses the bound, level 1 does not."""
    return make(tmp_path / "trials" / "one", {0: [9.0, 9.0], 1: [0.5, 0.5, 0.5]})


@pytest.mark.parametrize("place", [".", "levels"])
@pytest.mark.parametrize("words", [("check", LOW), ("metrics", "show"), ("metrics", "dump")])
def test_a_trial_of_several_levels_asks_for_one(run: Path, place: str, words: tuple[str, ...]) -> None:
    after = 1 if words[0] == "check" else 2
    answer = call(*words[:after], run / place, *words[after:])
    assert answer.code == 2
    assert "2 levels (0, 1)" in answer.err
    assert "--level 0" in answer.err


def test_each_level_is_judged_by_itself(run: Path) -> None:
    assert call("check", run, LOW, "--level", "0").code == 1
    assert call("check", run, LOW, "--level", "1").code == 0
    assert call("check", run / "levels/0-smoke", LOW).code == 1
    assert call("check", run / "levels/1-second", LOW).code == 0
    assert call("check", run / "levels/1-second/metrics.jsonl", LOW).code == 0
    assert '"1": 0.5' in call("metrics", "dump", run, "--level", "1").out
    assert "train/loss" in call("metrics", "show", run, "--level", "1").out


def test_a_trial_of_one_level_needs_no_choice(tmp_path: Path) -> None:
    assert call("check", make(tmp_path / "run", {1: [0.5]}), LOW).code == 0


def test_a_level_that_is_not_there_is_named(run: Path) -> None:
    for words in ((run, "--level", "7"), (run / "levels/0-smoke", "--level", "1")):
        answer = call("check", words[0], LOW, *words[1:])
        assert answer.code == 2
        assert "choose from 0, 1" in answer.err


def test_a_level_of_no_trial_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    for path in (tmp_path, tmp_path / "metrics.jsonl"):
        answer = call("check", path, LOW, "--level", "0")
        assert answer.code == 2
        assert "no run directory of a trial" in answer.err
        assert call("check", path, LOW).code == 0


def test_several_trials_are_refused(run: Path) -> None:
    assert call("check", run.parent, LOW, "--level", "1").code == 0
    shutil.copytree(run, run.with_name("two"))
    answer = call("check", run.parent, SAME)
    assert answer.code == 2
    assert "holds 2 trials: one, two" in answer.err


def test_a_level_without_its_trial_is_one_run_or_refused(run: Path) -> None:
    (run / "trial.json").unlink()
    assert call("check", run, SAME).code == 2
    assert call("check", run / "levels/1-second", LOW).code == 2  # an earlier attempt is another run
    shutil.rmtree(run / "levels/1-second/attempts")
    assert call("check", run / "levels/1-second", LOW).code == 0
