"""Two level directories, bit by bit: what is identical, where the first difference is, and what proves nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.records import BitDifference
from seatrial.core.verdict import Boundary
from seatrial.loops.trl.trl_metrics import is_clock
from seatrial.trial.compare import boundary_of, compare_levels

Rows = Sequence[Mapping[str, Any]]


def row(step: int, stage: str, digest: str = "aa", **more: Any) -> dict[str, Any]:
    return {"event": "batch", "step": step, "stage": stage, "digests": {"weights": digest}, "values": {"loss": 0.25}} | more


RECORD = [row(1, "reward"), row(1, "loss"), row(2, "reward"), row(2, "loss")]
METRICS = [{"step": step, "train/loss": 1 / step, "train/step_time": step * 1.5} for step in (1, 2)]


def level(root: Path, record: Rows | None = RECORD, metrics: Rows | None = METRICS, phase: str = "run", ended: str = "exited") -> Path:
    """A level directory with one more phase; rows are written as they are."""
    place = root / phase
    place.mkdir(parents=True)
    done = root / "phases.json"
    phases = json.loads(done.read_text()) if done.is_file() else []
    done.write_text(json.dumps([*phases, {"name": phase, "ended": ended, "exit_code": 0}]))
    for name, rows in (("record.jsonl", record), ("metrics.jsonl", metrics)):
        if rows is not None:
            (place / name).write_text("".join(json.dumps(item) + "\n" for item in rows))
    return root


def first(base: Path, now: Path) -> BitDifference:
    found = compare_levels(0, base, now, is_clock)
    assert (found.outcome, found.reason) == ("differs", "")
    assert found.difference is not None
    return found.difference


def test_equal_rows_are_identical_whatever_clocks_processes_and_paths_say(tmp_path: Path) -> None:
    other = [item | {"seconds": 9.5, "pid": 77, "path_of_run": "/elsewhere"} for item in RECORD]
    metrics = [item | {"train/step_time": 99.0} for item in METRICS]
    found = compare_levels(3, level(tmp_path / "base"), level(tmp_path / "now", other, metrics), is_clock)
    assert (found.level, found.outcome, found.sources, found.compared) == (3, "identical", ("record", "metrics"), 10)


def test_what_only_the_trainer_says_is_no_difference_where_a_side_lacks_it(tmp_path: Path) -> None:
    told = {"event": "scored", "step": 1, "stage": "advantage", "digests": {"trainer/advantages": "dd"}, "tensors": "00002.safetensors"}
    loss = row(1, "loss") | {"digests": {"weights": "aa", "trainer/mask": "ee"}, "values": {"trainer/loss": 0.5}}
    silent = row(1, "loss") | {"values": {"trainer/loss": None}, "tensors": "00002.safetensors"}
    base = level(tmp_path / "base", [RECORD[0], told, loss | {"tensors": "00003.safetensors"}])
    assert compare_levels(0, base, level(tmp_path / "renamed", [RECORD[0], silent]), is_clock).outcome == "identical"
    other = level(tmp_path / "other", [RECORD[0], told | {"digests": {"trainer/advantages": "ff"}}, loss])
    assert first(base, other).name == "trainer/advantages"
    assert first(base, level(tmp_path / "moved", [RECORD[0], silent | {"digests": {"weights": "bb"}}])).name == "weights"


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    now = [*RECORD[:2], row(2, "reward", "bb"), row(2, "loss", "cc")]
    found = first(level(tmp_path / "base"), level(tmp_path / "now", now))
    assert found == BitDifference(phase="run", source="record", step=2, stage="reward", name="weights", expected="aa", found="bb")
    assert boundary_of(found) is Boundary.REWARD


def test_a_digest_and_a_value_of_one_name_are_two_things(tmp_path: Path) -> None:
    rows = [{"event": "e", "step": 1, "stage": "loss", "digests": {"x": digest}, "values": {"x": 1.0}} for digest in ("a", "b")]
    assert first(level(tmp_path / "base", rows[:1]), level(tmp_path / "now", rows[1:])).expected == "a"


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (1, 1.0, True),
        (0.0, -0.0, False),
        (0.1, 0.1 + 1e-18, True),
        (0.1, 0.10000000000000002, False),
        ("NaN", "NaN", True),
        (1.0, None, False),
    ],
)
def test_numbers_are_equal_to_the_bit(tmp_path: Path, before: object, after: object, same: bool) -> None:
    sides = [level(tmp_path / name, [row(1, "loss", values={"loss": value})]) for name, value in (("a", before), ("b", after))]
    assert (compare_levels(0, sides[0], sides[1], is_clock).outcome == "identical") is same


def test_metrics_alone_decide_where_there_is_no_record_and_the_result_says_so(tmp_path: Path) -> None:
    base, now = level(tmp_path / "base", None), level(tmp_path / "now", None)
    found = compare_levels(0, base, now, is_clock)
    assert (found.outcome, found.sources, found.compared) == ("identical", ("metrics",), 2)
    changed = level(tmp_path / "other", None, [METRICS[0], METRICS[1] | {"train/loss": 0.7}])
    difference = first(base, changed)
    assert (difference.source, difference.step, difference.name, difference.expected, difference.found) == (
        *("metrics", 2, "train/loss", "0.5", "0.7"),
    )
    assert boundary_of(difference) is Boundary.METRICS


def test_an_earlier_metric_comes_before_a_later_row(tmp_path: Path) -> None:
    now = level(tmp_path / "now", [*RECORD[:3], row(2, "loss", "bb")], [METRICS[0] | {"train/loss": 3.0}, METRICS[1]])
    difference = first(level(tmp_path / "base"), now)
    assert (difference.source, difference.step) == ("metrics", 1)


def test_a_run_that_ends_earlier_differs_where_it_ends(tmp_path: Path) -> None:
    difference = first(level(tmp_path / "base"), level(tmp_path / "now", RECORD[:3]))
    assert (difference.step, difference.stage, difference.name, difference.found) == (2, "loss", "row", "the end")
    more = first(level(tmp_path / "more base"), level(tmp_path / "more", [*RECORD, row(3, "data")]))
    assert (more.step, more.stage, more.expected, more.found) == (3, "data", "the end", "a row")


def test_phases_are_compared_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    sides = []
    for name, digest in (("base", "aa"), ("now", "bb")):
        level(tmp_path / name, [row(5, "loss", digest)], phase="two")
        sides.append(level(tmp_path / name, [row(1, "data", digest)], phase="one"))
    assert first(*sides).phase == "two"


def test_a_record_on_one_side_only_is_a_difference(tmp_path: Path) -> None:
    difference = first(level(tmp_path / "base"), level(tmp_path / "now", None))
    assert (difference.name, difference.expected, difference.found) == ("record.jsonl", "4 rows", "absent")


def test_nested_records_count_and_earlier_attempts_do_not(tmp_path: Path) -> None:
    base, now = level(tmp_path / "base"), level(tmp_path / "now")
    for side, digest in ((base, "aa"), (now, "bb")):
        (side / "attempts" / "1" / "run").mkdir(parents=True)
        (side / "attempts" / "1" / "run" / "record.jsonl").write_text(json.dumps(row(1, "data", digest)) + "\n")
    assert compare_levels(0, base, now, is_clock).outcome == "identical"
    for side, digest in ((base, "aa"), (now, "bb")):
        (side / "run" / "seed-1").mkdir()
        (side / "run" / "seed-1" / "record.jsonl").write_text(json.dumps(row(1, "data", digest)) + "\n")
    assert first(base, now).phase == "run/seed-1"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda side: (side / "run" / "record.jsonl").write_text('{"event": "e", "st'), "is damaged"),
        (lambda side: (side / "run" / "record.jsonl").write_text("[1]\n"), "is no object"),
        (lambda side: (side / "phases.json").unlink(), "phases.json cannot be read"),
        (lambda side: (side / "phases.json").write_text('[{"name": "run", "ended": "deadline"}]'), r"own end \(deadline\)"),
    ],
)
@pytest.mark.parametrize("which", ["base", "now"])
def test_what_cannot_be_read_or_was_cut_is_not_comparable(tmp_path: Path, spoil: Any, reason: str, which: str) -> None:
    sides = [level(tmp_path / name) for name in ("base", "now")]
    spoil(tmp_path / which)
    found = compare_levels(0, sides[0], sides[1], is_clock)
    assert found.outcome == "not comparable"
    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize("metrics", [None, [], [{"step": 1, "train/step_time": 2.0}]])
def test_nothing_that_could_differ_is_never_identical(tmp_path: Path, metrics: Rows | None) -> None:
    sides = [level(tmp_path / name, None, metrics) for name in ("base", "now")]
    assert compare_levels(0, sides[0], sides[1], is_clock).outcome == "not comparable"


def test_gathered_metrics_count_where_no_phase_has_any(tmp_path: Path) -> None:
    sides = [level(tmp_path / name, None, None) for name in ("base", "now")]
    for side, loss in zip(sides, (1.0, 2.0), strict=True):
        (side / "metrics.jsonl").write_text(json.dumps({"step": 4, "loss": loss}) + "\n")
    assert (first(*sides).phase, first(*sides).step) == (".", 4)


def test_metrics_in_a_group_of_their_own_are_told_apart_from_clocks(tmp_path: Path) -> None:
    rows = [{"step": 1, "data": {"actor/loss": 0.5, "step_time": seconds}} for seconds in (1.0, 2.0)]
    base, now = level(tmp_path / "base", None, rows[:1]), level(tmp_path / "now", None, rows[1:])
    assert compare_levels(0, base, now, is_clock).outcome == "identical"
    other = level(tmp_path / "other", None, [{"step": 1, "data": {"actor/loss": 0.25, "step_time": 1.0}}])
    assert (first(base, other).name, first(base, other).found) == ("actor/loss", "0.25")


def test_processes_that_write_to_one_file_may_do_so_in_any_order(tmp_path: Path) -> None:
    metrics = [{"step": 1, "train/loss": 0.5}, {"step": 1, "rank1/reward": 2.0}, {"step": 1, "rank1/reward": 1.0}]
    record = [row(1, "loss", "aa", rank=0), row(1, "loss", "bb", rank=1), row(2, "loss", "cc", rank=1)]
    base, now = level(tmp_path / "base", record, metrics), level(tmp_path / "now", [record[1], record[0], record[2]], metrics[::-1])
    found = compare_levels(0, base, now, is_clock)
    assert (found.outcome, found.sources) == ("identical", ("record", "metrics"))
    other = level(tmp_path / "other", [record[1], record[2], record[0]], metrics[:2])
    difference = first(base, other)
    assert (difference.step, difference.name, difference.expected, difference.found) == (1, "rank1/reward", "1, 2", "2")
    swapped = level(tmp_path / "swapped", [record[0], record[2], record[1]], metrics)
    assert (first(base, swapped).name, first(base, swapped).expected, first(base, swapped).found) == ("step", "1", "2")


def test_a_step_that_one_side_lacks_is_the_first_difference(tmp_path: Path) -> None:
    base, now = level(tmp_path / "base", None), level(tmp_path / "now", None, METRICS[1:])
    assert (first(base, now).step, first(base, now).name, first(base, now).found) == (1, "train/loss", "absent")
