"""All inputs into one file: what is taken, what is refused, and that nothing piles up."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.inputs import Written, write_inputs
from tests.rollouts.inputs_made import campaign, gym, jsonl, plain


def write(folder: Path, *datasets: dict[str, Any], **tables: Any) -> Written:
    return write_inputs(campaign(*datasets, **tables), folder, CampaignDir(folder))


def stored(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "inputs.jsonl").read_text().splitlines()]


def test_rows_of_all_datasets_in_order(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [plain(0, level="easy"), plain(1, level="hard")])
    jsonl(tmp_path / "b.jsonl", [gym(0, agent_ref={"name": "solver"}), plain(0, level="easy")])
    written = write(tmp_path, {"name": "a", "tag_columns": ["level"]}, {"name": "b"})
    rows = stored(tmp_path)
    assert [(row["dataset"], row["agent"], row["tags"]) for row in rows] == [
        ("a", None, ["level=easy"]),
        ("a", None, ["level=hard"]),
        ("b", "solver", []),
        ("b", None, []),
    ]
    assert rows[1]["data"] == plain(1, level="hard")
    assert rows[3]["source"] == f"{tmp_path / 'b.jsonl'}:2"
    assert rows[0]["id"] != rows[3]["id"]
    assert rows[0]["content"] == rows[3]["content"]
    assert written.sha256 == hashlib.sha256((tmp_path / "inputs.jsonl").read_bytes()).hexdigest()
    assert [(file.dataset, file.rows, file.skipped, file.bytes) for file in written.files] == [
        ("a", 2, 0, (tmp_path / "a.jsonl").stat().st_size),
        ("b", 2, 0, (tmp_path / "b.jsonl").stat().st_size),
    ]


def test_bad_rows_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [plain(0), "{torn", *[{"answer": "x"}] * 30])
    jsonl(tmp_path / "b.jsonl", [])
    with pytest.raises(UserError) as caught:
        write(tmp_path, {"name": "a"}, {"name": "b"})
    lines = caught.value.message.splitlines()
    assert lines[0] == "32 bad rows; nothing was started:"
    assert lines[1].startswith(f"{tmp_path / 'a.jsonl'}:2: not JSON")
    assert lines[2].startswith(f"{tmp_path / 'a.jsonl'}:3: neither")
    assert lines[-1] == "… and 12 more"
    assert len(lines) == 22
    jsonl(tmp_path / "a.jsonl", [plain(0)])
    with pytest.raises(UserError, match=r"1 bad row; nothing was started:\n.*b\.jsonl: empty: there is no row in it"):
        write(tmp_path, {"name": "a"}, {"name": "b"})


@pytest.mark.parametrize(
    ("rows", "dataset", "fix"),
    [
        ([{"problem": "q", "answer": "1"}], {}, 'prompt = "problem" of [[datasets]] (--prompt problem with --input)'),
        ([{"odd": "q", "answer": "1"}], {}, 'prompt = "COLUMN" of [[datasets]]'),
        ([{"prompt": "q", "solution": "1"}], {}, 'answer = "solution" of [[datasets]]'),
        ([plain(0)], {"answer": "gold"}, 'answer = "answer" of [[datasets]]'),
        ([plain(0)], {"tag_columns": ["levle"]}, "correct tag_columns of [[datasets]]"),
        ([], {}, "name a file that holds rows"),
        (["prompt,answer", "q,1"], {}, "rows are JSONL (an object per line) or Parquet"),
        ([{"prompt": "", "answer": "1"}], {}, "correct these rows, or take them out of the file"),
    ],
)
def test_what_to_do_about_a_bad_row_is_what_helps(tmp_path: Path, rows: list[Any], dataset: dict[str, Any], fix: str) -> None:
    jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError) as caught:
        write(tmp_path, {"name": "a", **dataset})
    assert fix in caught.value.fix


def test_each_advice_is_given_once(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [{"problem": "q"}, {"prompt": "", "answer": "1"}, {"problem": "r"}])
    with pytest.raises(UserError) as caught:
        write(tmp_path)
    assert caught.value.fix.count("which column holds the prompt") == 1
    assert "take them out of the file" in caught.value.fix


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (3, 3, ":2: _ng_task_index 3 stands in an earlier row too"),
        (0, "1", "'1', not a number"),
        (0, -1, "-1, not"),
        (0, True, "True, not"),
    ],
)
def test_two_rows_cannot_be_one_task(tmp_path: Path, first: Any, second: Any, said: str) -> None:
    jsonl(tmp_path / "a.jsonl", [gym(0, _ng_task_index=first), gym(1, _ng_task_index=second)])
    with pytest.raises(UserError, match="_ng_task_index") as caught:
        write(tmp_path)
    assert said in caught.value.message


def test_a_misspelt_tag_column_is_told(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [plain(0, level=1)])
    with pytest.raises(UserError, match="no row has the tag column 'levle'"):
        write(tmp_path, {"name": "a", "tag_columns": ["level", "levle"]})


def test_rows_that_are_nested_too_deeply_are_told(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", ['{"prompt": "x", "answer": "y", "deep": ' + "[" * 400 + "]" * 400 + "}"])
    with pytest.raises(UserError, match="nested deeper than 100"):
        write(tmp_path)


def test_duplicates_are_kept_apart_and_counted(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", [plain(0), plain(1), plain(0)])
    assert write(tmp_path).files[0].duplicates == 1
    ids = [row["id"] for row in stored(tmp_path)]
    assert ids[2] == f"{ids[0]}-2"


def test_weight_chooses_by_id_and_limit_takes_the_first_of_them(tmp_path: Path) -> None:
    rows = [plain(number) for number in range(100)]
    jsonl(tmp_path / "a.jsonl", rows)
    file = write(tmp_path, {"name": "a", "weight": 0.3}).files[0]
    chosen = [row["id"] for row in stored(tmp_path)]
    assert 15 < file.rows < 45
    assert file.rows + file.skipped == 100
    jsonl(tmp_path / "a.jsonl", reversed(rows))
    write(tmp_path, {"name": "a", "weight": 0.3})
    assert [row["id"] for row in stored(tmp_path)] == chosen[::-1]
    file = write(tmp_path, {"name": "a", "weight": 0.3, "limit": 5}).files[0]
    assert (file.rows, file.skipped) == (5, 95)
    assert [row["id"] for row in stored(tmp_path)] == chosen[::-1][:5]
    with pytest.raises(UserError, match="none of 100 rows is left"):
        write(tmp_path, {"name": "a", "weight": 1e-9})


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        with (tmp_path / "a.jsonl").open("w") as stream:
            stream.writelines(json.dumps(plain(number, more="x" * 1000)) + "\n" for number in range(count))
        tracemalloc.start()
        try:
            write(tmp_path)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)
    # Of a row of 1,000 characters less than a tenth stays: its hash, and where it starts.
    assert peak(2500) - peak(500) < 2000 * 120


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.rollouts.inputs.SAY_EVERY", 2)
    jsonl(tmp_path / "a.jsonl", [plain(number) for number in range(5)])
    told: list[str] = []
    write_inputs(campaign(), tmp_path, CampaignDir(tmp_path), told.append)
    assert told == ["a: 2 rows read", "a: 4 rows read"]
