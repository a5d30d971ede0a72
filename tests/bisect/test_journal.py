"""The journal keeps every row, survives a kill at any byte, and refuses what it does not understand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from seatrial.bisect import bisect_dir
from seatrial.bisect.bisect_records import BisectRun, Failure, Mark, SkipKind
from seatrial.core.errors import UserError
from tests.bisect.bisects import history, run

PAST = history(4)
ROWS = (
    run(PAST, 1, 0, Mark.GOOD, value=0.5, passed=True, reason="fine"),
    run(PAST, 2, 3, Mark.BAD, value=2.5, passed=False, reason="missed, ünïcode \u2028 and \\", notes=("one", "two")),
    run(PAST, 3, 1, Mark.SKIP, reason="pip"),
)


def written(path: Path, rows: tuple[BisectRun, ...] = ROWS) -> Path:
    for row in rows:
        bisect_dir.append_run(path, row)
    return path


def edited(path: Path, line: int, **change: Any) -> BisectRun:
    """The row after a person changed keys of it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    assert path.read_bytes().isascii()
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | change)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return bisect_dir.read_runs(path).rows[line - 1]


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    found = bisect_dir.read_runs(written(tmp_path / "deep" / "runs.jsonl"))
    assert found == bisect_dir.RunJournal(ROWS)


def test_a_journal_that_is_not_there_has_no_rows(tmp_path: Path) -> None:
    assert bisect_dir.read_runs(tmp_path / "runs.jsonl") == bisect_dir.RunJournal()


@pytest.mark.parametrize(("value", "stored"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_what_is_not_finite_is_marked(tmp_path: Path, value: float, stored: str) -> None:
    path = written(tmp_path / "runs.jsonl", (run(PAST, 1, 0, Mark.BAD, value=value),))
    assert bisect_dir.read_runs(path).rows[0].value == stored


def test_a_kill_at_any_byte_costs_at_most_the_row_that_was_written(tmp_path: Path) -> None:
    path = written(tmp_path / "runs.jsonl")
    whole = path.read_bytes()
    before = len(b"".join(whole.splitlines(keepends=True)[:2]))
    for cut in [*range(before + 1, len(whole) - 3, 23), *range(len(whole) - 3, len(whole) + 1)]:
        path.write_bytes(whole[:cut])
        found = bisect_dir.read_runs(path)
        complete = cut >= len(whole) - 1
        assert found.rows == (ROWS if complete else ROWS[:2])
        assert bool(found.notes) is not complete


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_the_next_row_takes_the_place_of_a_torn_one(tmp_path: Path, cut: int) -> None:
    path = written(tmp_path / "runs.jsonl")
    path.write_bytes(path.read_bytes()[:-cut])
    kept = bisect_dir.read_runs(path).rows
    bisect_dir.append_run(path, run(PAST, 9, 2, Mark.GOOD))
    found = bisect_dir.read_runs(path)
    assert found.rows == (*kept, run(PAST, 9, 2, Mark.GOOD))
    assert found.notes == ()


def test_zeros_that_a_crash_left_are_a_torn_row(tmp_path: Path) -> None:
    path = written(tmp_path / "runs.jsonl")
    with path.open("ab") as stream:
        stream.write(b"\0" * 64)
    found = bisect_dir.read_runs(path)
    assert found.rows == ROWS
    assert "line 4 was cut off" in found.notes[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"not json", "runs.jsonl:2: not a row"),
        (b"[]", "runs.jsonl:2: (the whole line)"),
        (b'{"number": 2}', "runs.jsonl:2: stage: Field required"),
        (b"\xff\xfe", "runs.jsonl:2: not a row"),
        (b'{"number": 2, "number": 3}', "the key 'number' stands twice"),
        (b'{"value": NaN}', "NaN is no JSON"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    path = written(tmp_path / "runs.jsonl", ROWS[:1])
    with path.open("ab") as stream:
        stream.write(line + b"\n")
    with pytest.raises(UserError) as raised:
        bisect_dir.read_runs(path)
    assert words in raised.value.message
    assert "line 2" in raised.value.fix


@pytest.mark.parametrize(("key", "value"), [("mark", "worse"), ("colour", "red"), ("round", "x")])
def test_a_wrong_key_is_named(tmp_path: Path, key: str, value: str) -> None:
    path = written(tmp_path / "runs.jsonl")
    with pytest.raises(UserError, match=rf"runs\.jsonl:2: {key}: "):
        edited(path, 2, **{key: value})


@pytest.mark.parametrize("number", [1, 0])
def test_numbers_increase(tmp_path: Path, number: int) -> None:
    path = written(tmp_path / "runs.jsonl")
    with pytest.raises(UserError, match=rf"runs\.jsonl:2: number: {number} comes after 1"):
        edited(path, 2, number=number)


def test_a_deleted_row_is_gone(tmp_path: Path) -> None:
    path = written(tmp_path / "runs.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text(lines[0] + "\n" + lines[2], encoding="utf-8")
    assert bisect_dir.read_runs(path).rows == (ROWS[0], ROWS[2])


def test_bad_changed_to_skip_is_a_skip_by_hand(tmp_path: Path) -> None:
    row = edited(written(tmp_path / "runs.jsonl"), 2, mark="skip")
    assert (row.mark, row.skip) == (Mark.SKIP, SkipKind.HAND)
    assert row.reason.startswith("marked skip by hand; was: missed")
    assert row.notes == ("one", "two", "marked skip by hand")


def test_a_mark_by_hand_wins_over_what_was_measured(tmp_path: Path) -> None:
    row = edited(written(tmp_path / "runs.jsonl"), 2, mark="good")
    assert (row.mark, row.failure, row.value, row.passed) == (Mark.GOOD, None, None, None)
    assert "value 2.5" in row.reason
    row = edited(written(tmp_path / "other.jsonl"), 1, mark="bad")
    assert (row.mark, row.value, row.passed) == (Mark.BAD, None, None)


def test_a_skip_changed_to_a_mark_loses_its_reason_to_skip(tmp_path: Path) -> None:
    row = edited(written(tmp_path / "runs.jsonl"), 3, mark="bad")
    assert (row.mark, row.skip) == (Mark.BAD, None)
    assert row.reason == "marked bad by hand; was: pip"


def test_rows_that_contradict_nothing_are_left_alone(tmp_path: Path) -> None:
    failed = Failure(kind="exit", exit_code=1)
    rows = (
        run(PAST, 1, 0, Mark.BAD, value=0.5, passed=True, failure=failed),  # the metric is fine, the exit code is not
        run(PAST, 2, 1, Mark.SKIP, skip=SkipKind.OTHER_FAILURE, failure=failed),
        run(PAST, 3, 2, Mark.BAD, failure=None),  # from a log of git
    )
    assert bisect_dir.read_runs(written(tmp_path / "runs.jsonl", rows)).rows == rows


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        bisect_dir.append_run(tmp_path / "file" / "runs.jsonl", ROWS[0])
    with pytest.raises(UserError, match="cannot read"):
        bisect_dir.read_runs(tmp_path)
