"""Rows out of files, and what is wrong with them."""

from __future__ import annotations

import builtins
import datetime
import decimal
import hashlib
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.inputs import BadRowError, RowSource


def read(path: Path) -> list[tuple[int, Any]]:
    """All rows, faults as text."""
    return [(number, str(found) if isinstance(found, BadRowError) else found) for number, found in RowSource(path).rows()]


def test_lines_of_every_common_shape_are_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n   \n{"a": "\xc3\xbc"}\n{"a": 18446744073709551615}')
    assert read(file) == [(1, {"a": 1}), (4, {"a": "ü"}), (5, {"a": 18446744073709551615})]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"a": 1', "not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": 1e999}', "not JSON"),
        (b'{"a": "\\ud800"}', "not JSON"),
        (b'{"a": "\xff"}', "not JSON"),
        (b"[1, 2]", "not an object: [1, 2]"),
        (b"null", "not an object"),
        (b'{"a": 18446744073709551616}', "does not fit into 64 bits"),
        (b'{"a": {"b": [-9223372036854775809]}}', "does not fit into 64 bits"),
    ],
)
def test_a_bad_line_is_told_and_the_next_is_read(tmp_path: Path, line: bytes, said: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(line + b'\n{"a": 1}\n')
    first, second = read(file)
    assert first[0] == 1
    assert said in first[1]
    assert "line 1" not in first[1]
    assert second == (2, {"a": 1})


def test_a_long_number_in_a_text_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "123456789012345678901234567890"}\n')
    assert read(tmp_path / "a.jsonl") == [(1, {"a": "123456789012345678901234567890"})]


def test_the_whole_file_is_hashed_also_where_enough_was_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n\n{"a": 2}\nnot even JSON\n')
    source = RowSource(file)
    rows = []
    for number, _ in source.rows():
        rows.append(number)
        source.enough = True
    assert (rows, source.skipped) == ([1], 2)
    assert (source.bytes, source.sha256) == (file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest())


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing\.jsonl: cannot read: No such file"):
        read(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="Is a directory"):
        read(tmp_path)


def table(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    parquet.write_table(arrow.Table.from_pylist(rows), path, **options)
    return path


def test_parquet_is_known_by_its_content_and_read_over_row_groups(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "n": n, "messages": [{"role": "user", "content": "x"}], "none": None} for n in range(700)]
    file = table(tmp_path / "rows.data", rows, row_group_size=100)
    assert read(file) == list(enumerate(rows, 1))
    source = RowSource(file)
    for number, _ in source.rows():
        source.enough = number == 3
    assert (source.skipped, source.sha256) == (697, hashlib.sha256(file.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "column 'b' holds nan"),
        ([1.0, float("inf")], "column 'b' holds inf"),
        ({"c": b"bytes"}, "column 'b' holds a bytes"),
        (decimal.Decimal("1.5"), "column 'b' holds a Decimal"),
        (datetime.date(2026, 1, 1), "column 'b' holds a date"),
    ],
)
def test_what_json_cannot_say_is_refused_with_its_column(tmp_path: Path, value: Any, said: str) -> None:
    ((number, found),) = read(table(tmp_path / "a.parquet", [{"a": 1, "b": value}]))
    assert number == 1
    assert said in found


def test_a_torn_parquet_file_is_told(tmp_path: Path) -> None:
    file = table(tmp_path / "a.parquet", [{"a": 1}])
    file.write_bytes(file.read_bytes()[:-6])
    with pytest.raises(UserError, match="not a whole Parquet file"):
        read(file)


def test_without_pyarrow_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = table(tmp_path / "a.parquet", [{"a": 1}])
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError) as caught:
        read(file)
    assert caught.value.fix == 'pip install "seatrial[rollouts]"'
