"""A record: what is written is read back, and nothing that was cut or changed passes for one."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from types import MappingProxyType

import pytest

from seatrial.rollouts.rollout_record import KEY, FailureKind, Head, TornError, check, encode, fields_of, head_of, row_of, unit_of

HEAD = Head(unit=7, task="0123abcd", repeat=2, seed=99, outcome="ok", reward=0.0, answer="ü", latency_s=1.5, metrics={"words": 3.0})
ROW = {"responses_create_params": {"input": "hello\nworld"}, "response": {"output": []}, "reward": 0.0}
LINE = encode(HEAD, ROW)


def test_what_is_written_is_read_back() -> None:
    end = check(LINE)
    assert head_of(LINE, end) == HEAD
    assert row_of(LINE) == ROW
    assert unit_of(LINE) == unit_of(memoryview(LINE)) == 7
    assert LINE.count(b"\n") == 1
    assert LINE.endswith(b"\n")


def test_other_tools_see_the_row_and_one_more_key() -> None:
    seen = json.loads(LINE)
    assert list(seen) == [KEY, *ROW]
    assert seen[KEY]["unit"] == 7


def test_a_failure_may_have_no_row() -> None:
    head = Head(unit=0, task="a", repeat=0, seed=-1, outcome="failed", kind=FailureKind.TIMEOUT, final=True, message="too slow")
    line = encode(head, {})
    assert head_of(line, check(line)) == head
    assert json.loads(line) == {
        KEY: {"crc": json.loads(line)[KEY]["crc"], "end": json.loads(line)[KEY]["end"], **fields_of(line, check(line))}
    }
    assert row_of(line) == {}
    assert head_of(line, check(line)).settled
    assert not replace(head, final=False).settled


def test_a_zero_is_kept_and_nothing_is_left_out() -> None:
    fields = fields_of(LINE, check(LINE))
    assert fields["reward"] == 0.0
    assert fields["final"] is False
    assert "kind" not in fields
    assert "message" not in fields


def test_our_key_in_a_row_is_replaced_and_any_mapping_is_a_row() -> None:
    line = encode(HEAD, MappingProxyType({KEY: {"unit": 5}, "reward": 1.0}))
    assert unit_of(line) == 7
    assert row_of(line) == {"reward": 1.0}


def test_every_cut_is_torn() -> None:
    with pytest.raises(TornError, match="no newline"):
        check(LINE[:-1])
    for length in range(len(LINE) - 1):
        with pytest.raises(TornError):
            check(LINE[:length])
        with pytest.raises(TornError):
            check(LINE[:length] + b"\n")
    with pytest.raises(TornError):
        check(LINE[:40] + LINE)


def test_every_changed_byte_is_torn() -> None:
    for place in range(len(LINE)):
        changed = bytearray(LINE)
        changed[place] ^= 0x01
        with pytest.raises(TornError):
            check(bytes(changed))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused(number: float) -> None:
    for head in (replace(HEAD, reward=number), replace(HEAD, latency_s=number), replace(HEAD, metrics={"x": number})):
        with pytest.raises(ValueError, match=r"unit 7: .* is not finite"):
            encode(head, ROW)


@pytest.mark.parametrize("row", [{"text": "\ud800"}, {"big": 1 << 70}, {"other": object()}])
def test_what_json_cannot_say_is_refused(row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="unit 7: cannot be written as JSON"):
        encode(HEAD, row)


def test_a_head_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="its head has 1000"):
        encode(replace(HEAD, message="x" * 1_000_000), ROW)


def test_a_head_of_another_version_is_torn() -> None:
    covered = LINE[LINE.index(b'","end"') : -1].replace(b'"answer"', b'"opinio"')
    line = LINE[: LINE.index(b'","end"') - 8] + b"%08x" % zlib.crc32(covered) + covered + b"\n"
    with pytest.raises(TornError, match="another version"):
        head_of(line, check(line))
    broken = covered.replace(b'"unit":7', b'"unit"=7')
    line = LINE[: LINE.index(b'","end"') - 8] + b"%08x" % zlib.crc32(broken) + broken + b"\n"
    with pytest.raises(TornError, match="cannot be read"):
        fields_of(line, check(line))
