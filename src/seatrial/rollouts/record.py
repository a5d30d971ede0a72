"""One line of a journal: a rollout, or a failure, as a JSON object that carries its own head and checksum.

    {"_seatrial":{"crc":"1a2b3c4d","end":"000217","unit":7,"task":"…",…},"responses_create_params":…,"response":…,"reward":1.0}

- The line is the row as other tools know it, behind one more key. `end` is where the head ends, so that merge and profile read the
  head alone; `crc` covers everything behind itself.
- A record counts when it ends in a newline, its checksum holds and its head parses. Anything else is torn: owed again.
- Numbers are finite. A reward that is not is a failure of class `reward`, never a record.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any

import orjson

KEY = "_seatrial"
_START = b'{"_seatrial":{"crc":"'
_CRC = len(_START)
_COVERED = _CRC + 8
_END = b'","end":"'
_DIGITS = _COVERED + len(_END)
_HEAD = _DIGITS + 6 + 2
_UNIT = _HEAD + len(b'"unit":')
_UNIT_DIGITS = 20
_MOST = 999_999


class FailureKind(StrEnum):
    """What kept a unit from a result."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    """Refused, reset, closed early: the server may be gone."""
    RATE_LIMIT = "rate-limit"
    HTTP_4XX = "http-4xx"
    HTTP_5XX = "http-5xx"
    CONTEXT_LENGTH = "context-length"
    SANDBOX = "sandbox"
    JUDGE = "judge"
    PARSE = "parse"
    """An answer that is not what the interface promises."""
    REWARD = "reward"
    """The verifier raised, or gave no finite number."""
    AGENT = "agent"
    """The environment itself said that the rollout failed."""


@dataclass(frozen=True, slots=True)
class Head:
    """What merge, status and profile need to know of a record."""

    unit: int
    task: str
    """The row's stable id."""
    repeat: int
    seed: int
    outcome: str
    """`ok`, or `failed`."""
    reward: float | None = None
    """Of `ok`, always."""
    answer: str | None = None
    """What the verifier extracted, for majority votes."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    turns: int | None = None
    """Answers of the model."""
    latency_s: float | None = None
    finish: str | None = None
    """stop, length, tool_calls, …, as the server said."""
    kind: str | None = None
    """Of `failed`: a FailureKind."""
    final: bool = False
    """Of `failed`: whether it is owed no more."""
    tries: int = 1
    """Requests it took, over this attempt."""
    message: str = ""
    ended: float = 0.0
    """Seconds since 1970."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other numbers of the row."""

    @property
    def ok(self) -> bool:
        """Whether it is a rollout."""
        return self.outcome == "ok"

    @property
    def settled(self) -> bool:
        """Whether the unit is owed no more."""
        return self.outcome == "ok" or self.final


class TornError(ValueError):
    """A line that is no record: cut, changed, or not ours."""


_FIELDS = Head.__slots__
_values_of = attrgetter(*_FIELDS)
_NUMBER = (float, int)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("unit", "repeat", "seed", "input_tokens", "output_tokens", "turns", "tries"), (int,)),
    **dict.fromkeys(("task", "outcome", "answer", "finish", "kind", "message"), (str,)),
    **dict.fromkeys(("reward", "latency_s", "ended"), _NUMBER),
    "final": (bool,),
    "metrics": (dict,),
}


def encode(head: Head, row: Mapping[str, Any]) -> bytes:
    """The line, with its newline. A ValueError for a number in the head that is not finite, and for what JSON cannot say."""
    for value in (head.reward, head.latency_s, head.ended, *head.metrics.values()):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"unit {head.unit}: {value} is not finite")
    # None, "" and {} are left out; 0 and False are not.
    fields = {name: value for name, value in zip(_FIELDS, _values_of(head), strict=True) if value or value == 0}
    shown = dict(row)
    shown.pop(KEY, None)
    try:
        inner, body = orjson.dumps(fields), orjson.dumps(shown)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"unit {head.unit}: cannot be written as JSON: {error}") from error
    end = _HEAD + len(inner) - 1
    if end > _MOST:
        raise ValueError(f"unit {head.unit}: its head has {end} bytes, more than {_MOST}")
    covered = b'%s%06d",%s%s%s' % (_END, end, inner[1:], b"" if body == b"{}" else b",", body[1:])
    return b"%s%08x%s\n" % (_START, zlib.crc32(covered), covered)


def check(line: bytes | memoryview) -> int:
    """Where the head of a whole record ends; raises TornError."""
    if line[-1:] != b"\n" or line[:_CRC] != _START:
        raise TornError("no newline at the end" if line[:_CRC] == _START else "not a record")
    # Compared as text: a checksum that is cut or not hexadecimal is then simply another one.
    if b"%08x" % zlib.crc32(memoryview(line)[_COVERED:-1]) != line[_CRC:_COVERED]:
        raise TornError("its checksum does not hold")
    digits = bytes(line[_DIGITS : _DIGITS + 6])
    if not digits.isdigit():
        raise TornError("no number says where its head ends")
    return int(digits)


def unit_of(line: bytes | memoryview) -> int:
    """The unit of a record that `check` has taken: it stands first in the head."""
    return int(bytes(line[_UNIT : _UNIT + _UNIT_DIGITS]).partition(b",")[0])


def fields_of(line: bytes, end: int) -> dict[str, Any]:
    """The head of a record that `check` has taken, as it stands: half the price of `head_of`. Defaults may be absent."""
    try:
        fields: dict[str, Any] = orjson.loads(b"{" + line[_HEAD:end])
    except orjson.JSONDecodeError as error:
        raise TornError(f"its head cannot be read: {error}") from error
    return fields


def head_of(line: bytes, end: int) -> Head:
    """The head of a record that `check` has taken."""
    fields = fields_of(line, end)
    check_types(fields)
    try:
        return Head(**fields)
    except TypeError as error:
        raise TornError(f"its head is of another version: {error}") from error


def check_types(fields: Mapping[str, Any]) -> None:
    """Raise TornError for a head that another program wrote, or a person: a field that holds what no collector writes there."""
    for name, value in fields.items():
        if name in _TYPES and type(value) not in _TYPES[name]:
            raise TornError(f"its {name} is of another type")
    if not all(type(value) in _NUMBER for value in fields.get("metrics", {}).values()):
        raise TornError("one of its metrics is no number")


def row_of(line: bytes) -> dict[str, Any]:
    """The row as other tools know it, without our head. Raises TornError where somebody wrote it anew, checksum included, as no JSON."""
    try:
        row: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TornError(f"its row cannot be read: {error}") from error
    row.pop(KEY, None)
    return row
