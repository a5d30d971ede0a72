"""Reading the console of a trainer: which step a row belongs to, and what cannot be read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from seatrial.loops.trl.trl_metrics import read_console, steps_planned
from seatrial.metrics.read import read_metrics

DATA = Path(__file__).parents[1] / "data" / "trl"


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "console.log"
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def steps(tmp_path: Path, *lines: str, tag: str = "train/loss") -> tuple[int, ...]:
    found = read_console(write(tmp_path, *lines)).series
    return found[tag].steps if tag in found else ()


def row(loss: object = "0.5", epoch: object = None) -> str:
    return str({"loss": loss, "grad_norm": "1.0"} | ({"epoch": str(epoch)} if epoch is not None else {}))


def end(seconds: float, speed: float, epoch: object = None) -> str:
    values = {"train_runtime": f"{seconds:.4g}", "train_samples_per_second": "9", "train_steps_per_second": f"{round(speed, 3):.4g}"}
    return str(values | {"train_loss": "0.1"} | ({"epoch": str(epoch)} if epoch is not None else {}))


@pytest.mark.parametrize("name", ["grpo_full", "grpo_seven", "grpo_resumed"])
def test_the_console_says_what_the_state_says_rounded(name: str) -> None:
    printed, stored = read_console(DATA / name / "console.log"), read_metrics([DATA / name / "trainer_state.json"])
    assert printed.damage == ()
    assert set(printed.series) == {tag for tag in stored.series if tag != "train/total_flos"}
    for tag, series in printed.series.items():
        if any(word in tag for word in ("time", "per_second", "train_loss")):
            continue
        for step, value in zip(series.steps, series.values, strict=True):
            assert value == pytest.approx(stored.series[tag].get(step), rel=1e-3), (tag, step)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bars", (1, 2, 3, 4, 5, 6)),
        ("buffered", tuple(range(1, 25))),
        ("sparse", (3, 6, 9)),
        ("plain", (3, 6, 9)),
        ("lora_resumed", (4, 5, 6)),
        ("plain_resumed", (4, 5, 6)),
        ("stopped", (1, 2, 3, 4)),
        ("stopped_bar", (1, 2, 3, 4)),
        ("ranks_ok", (1, 2, 3, 4)),
        ("sigkill", (1, 2)),
        ("no_rows", ()),
    ],
)
def test_the_steps_of_real_logs(name: str, expected: tuple[int, ...]) -> None:
    found = read_console(DATA / "made" / name / "console.log")
    assert found.damage == ()
    assert (found.series["train/loss"].steps if "train/loss" in found.series else ()) == expected


def test_evaluations_and_the_closing_row_are_read() -> None:
    found = read_console(DATA / "made" / "sparse" / "console.log")
    assert found.series["train/train_runtime"].steps == (11,)
    assert len(found.series["eval/loss"]) == 3
    assert "train/eval_loss" not in found.series
    assert read_console(DATA / "made" / "no_rows" / "console.log").series["train/reward"].steps == (4,)


def test_announced_steps_count_as_they_are(tmp_path: Path) -> None:
    assert steps(tmp_path, "STEP 11 1.2", row(), "STEP 12 0.9", row()) == (11, 12)
    assert steps(tmp_path, "seatrial: step 5 of 20", "seatrial: step 10 of 20", row(), "seatrial: step 20 of 20", row()) == (10, 20)
    assert steps(tmp_path, "STEP 10", row(), row()) == (10, 11)


def test_a_run_that_was_repeated_in_one_log_does_not_count_on(tmp_path: Path) -> None:
    once = ["STEP 1", row(), "STEP 2", row("0.25")]
    assert steps(tmp_path, *once, *once) == (1, 2)
    found = read_console(write(tmp_path, *once, "STEP 1", row("7"), end(2, 1)))
    assert found.series["train/loss"].values == (7.0, 0.25)


def test_rows_are_counted_when_nothing_says_more(tmp_path: Path) -> None:
    assert steps(tmp_path, row(), row(), row()) == (1, 2, 3)


def test_the_closing_row_says_how_many_steps_lie_between_two_rows(tmp_path: Path) -> None:
    assert steps(tmp_path, row(), row(), end(10, 2)) == (10, 20)
    assert steps(tmp_path, row(), row(), row(), end(5.5, 2)) == (3, 6, 9)
    assert steps(tmp_path, row(), end(5, 2), tag="train/train_loss") == (10,)


def test_a_long_run_needs_more_than_its_rounded_speed(tmp_path: Path) -> None:
    """3000 s at 0.1 steps per second: between 298 and 302 steps, but 30 rows lie 10 steps apart."""
    assert steps(tmp_path, *[row()] * 30, end(3000, 0.1))[-1] == 300
    assert steps(tmp_path, *[row()] * 2, end(9000, 0.002)) == (1, 2)  # 18 steps, or 22: nobody knows


def test_a_resumed_run_is_placed_by_its_epochs(tmp_path: Path) -> None:
    assert steps(tmp_path, *(row(epoch=0.01 * step) for step in range(11, 21)), end(10, 1, 0.2)) == tuple(range(11, 21))
    assert steps(tmp_path, *(row(epoch=0.01 * step) for step in range(1, 11)), end(10, 1, 0.1)) == tuple(range(1, 11))


def test_a_progress_bar_says_where_the_run_ended(tmp_path: Path) -> None:
    bars = ["\r  0%|          | 0/40 [00:00<?, ?it/s]" + row(), row(), "\r 50%|#####     | 20/40 [00:02<00:02,  9.5it/s]"]
    assert steps(tmp_path, *bars) == (10, 20)
    assert steps_planned((tmp_path / "console.log",)) == 40


def test_titled_bars_and_bars_before_the_training_are_others(tmp_path: Path) -> None:
    lines = ["\r100%|####| 512/512 [00:00<00:00, 9it/s]", "Map: 100%|####| 64/64 [00:00<00:00, 9 examples/s]"]
    path = write(tmp_path, *lines, "\r  0%|    | 0/4 [00:00<?, ?it/s]", row(), "\r100%|####| 8/8 [00:00<00:00, 9it/s]", end(4, 1))
    assert steps_planned((path,)) == 4
    assert steps_planned((write(tmp_path, *lines),)) is None


@pytest.mark.parametrize(
    "text",
    [
        "{'loss': 'nan', 'grad_norm': '1'}",
        "{'loss': nan, 'grad_norm': 1.0}",
        "{'loss': -inf, 'grad_norm': 1.0}",
        "{'loss': None, 'grad_norm': '1'}",
        '{"loss": NaN, "grad_norm": 1.0}',
        '{"loss": null, "grad_norm": 1.0}',
        "{'loss': np.float64(nan), 'grad_norm': 1.0}",
        "[rank0]: {'loss': 'inf', 'grad_norm': '1'}",
    ],
)
def test_what_is_not_finite_is_kept(tmp_path: Path, text: str) -> None:
    found = read_console(write(tmp_path, row(), text, row()))
    assert found.damage == ()
    assert not math.isfinite(found.series["train/loss"].values[1])
    assert found.series["train/grad_norm"].values[1] == 1.0


def test_numbers_come_in_several_spellings(tmp_path: Path) -> None:
    text = ["{'loss': 0.5, 'epoch': 1}", "{'loss': '1.5e-3'}", '{"loss": 2.0, "epoch": 0.1}', "{'loss': np.float64(0.25)}"]
    assert read_console(write(tmp_path, *text)).series["train/loss"].values == (0.5, 0.0015, 2.0, 0.25)


@pytest.mark.parametrize(
    "text",
    ["{'loss': '0.1', 'grad_norm': }", "{'loss': '0.1', 'grad_no", "{'loss': [1]}", "{'loss': 'soon'}", "{'loss': x()}", "{'loss': 1 2}"],
)
def test_a_row_that_cannot_be_read_is_damage(tmp_path: Path, text: str) -> None:
    found = read_console(write(tmp_path, row(), text))
    assert [(item.where, item.count) for item in found.damage] == [("line 2", 1)]


def test_what_stands_behind_a_row_does_not_belong_to_it(tmp_path: Path) -> None:
    found = read_console(write(tmp_path, f"{row()} and {{more}}", f"12:00 INFO {row()}"))
    assert (found.damage, found.series["train/loss"].steps) == ((), (1, 2))


def test_other_dicts_are_no_rows(tmp_path: Path) -> None:
    found = read_console(write(tmp_path, "{'prompt': 'x', 'loss': 1}", "{'weight_version': 'v'}", "config {'loss_type': 'grpo'}"))
    assert (found.series, found.damage, found.sources) == ({}, (), ())


def test_the_plan_is_read_from_states_before_logs(tmp_path: Path) -> None:
    log = write(tmp_path, "seatrial: step 1 of 9", row())
    assert steps_planned((log,)) == 9
    assert steps_planned((tmp_path,)) is None  # a directory is searched for states only
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text(json.dumps({"max_steps": 20}))
    assert steps_planned((tmp_path, log)) == 20
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text('{"max_steps": 2')
    assert steps_planned((tmp_path, log)) == 9
    assert steps_planned(()) is None
