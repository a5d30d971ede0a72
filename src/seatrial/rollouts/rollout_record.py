"""A rollout: its row, unit and outcome, the interfaces of backends and verifiers, and its line in a journal.

    {"_seatrial":{"crc":"1a2b3c4d","end":"000217","unit":7,"task":"…",…},"responses_create_params":…,"response":…,"reward":1.0}

- The line is the row as other tools know it, behind one more key. `end` is where the head ends, so that merge and profile read the
  head alone; `crc` covers everything behind itself.
- A record counts when it ends in a newline, its checksum holds and its head parses. Anything else is torn: its unit is pending.
- Numbers are finite. A reward that is not is a failure of class `reward`, never a record.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

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
    answer: str | None = None
    """What the verifier extracted, for majority votes."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    turns: int | None = None
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
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def settled(self) -> bool:
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
    # Another program, or a person, may have written what no collector writes there.
    for name, value in fields.items():
        if name in _TYPES and type(value) not in _TYPES[name]:
            raise TornError(f"its {name} is of another type")
    if not all(type(value) in _NUMBER for value in fields.get("metrics", {}).values()):
        raise TornError("one of its metrics is no number")
    try:
        return Head(**fields)
    except TypeError as error:
        raise TornError(f"its head is of another version: {error}") from error


def row_of(line: bytes) -> dict[str, Any]:
    """The row as other tools know it, without our head. Raises TornError where somebody wrote it anew, checksum included, as no JSON."""
    try:
        row: dict[str, Any] = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise TornError(f"its row cannot be read: {error}") from error
    row.pop(KEY, None)
    return row


HEALING = frozenset({FailureKind.TIMEOUT, FailureKind.CONNECTION, FailureKind.RATE_LIMIT, FailureKind.HTTP_5XX})
"""Classes that another try may mend; judge and sandbox failures say it case by case."""


@dataclass(frozen=True, slots=True)
class InputRow:
    """A row of the inputs, as `inputs.jsonl` stores it."""

    index: int
    """Position among all rows of the campaign: Gym's `_ng_task_index`."""
    id: str
    dataset: str
    data: Mapping[str, Any]
    """The row as the user wrote it."""
    agent: str | None = None
    """Gym: who rolls it out."""
    tags: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class Unit:
    """One rollout that is owed."""

    number: int
    """Among all units of the campaign; the key of its record."""
    row: InputRow
    repeat: int
    """Which repetition: Gym's `_ng_rollout_index`."""
    seed: int
    """Derived, so that a retry asks for the same."""


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """A rollout that worked."""

    row: Mapping[str, Any]
    """As Gym writes it: responses_create_params, response, reward, fields of the verifier, _ng_task_index, _ng_rollout_index,
    agent_ref."""
    reward: float
    answer: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    turns: int | None = None
    finish: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    latency_s: float | None = None
    """Where it is another than that of the call: of a rollout that was stored before."""


class RolloutError(Exception):
    """A rollout that did not work, and whether another try may heal it."""

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        heals: bool | None = None,
        after_s: float | None = None,
        row: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.heals = kind in HEALING if heals is None else heals
        self.after_s = after_s
        """What the server asked to wait (Retry-After)."""
        self.row: Mapping[str, Any] = row or {}
        """What is worth keeping of it, such as the response that the judge could not read."""


class ServersGoneError(Exception):
    """Nobody answers any more: the attempt ends, its units are owed again."""


class Backend(Protocol):
    """Makes rollouts, many at a time, in one event loop."""

    async def open(self) -> None:
        """Connect and see that everything is there; raises BlockedError or UserError."""

    async def roll(self, unit: Unit) -> RolloutOutcome:
        """One try. Raises RolloutError, and ServersGoneError when it knows that no server is left."""

    async def alive(self) -> str | None:
        """None, or why nobody answers: asked when connections fail."""

    async def close(self) -> None:
        """End everything that was started."""


@runtime_checkable
class Streaming(Backend, Protocol):
    """A backend that takes many units at once and hands them on as they are done, by a collector of its own."""

    def stream(self, units: Sequence[Unit]) -> AsyncGenerator[tuple[Unit, RolloutOutcome | RolloutError], None]:
        """Each unit once, in any order; what never comes out is owed."""


class Verifier(Protocol):
    """Scores an answer."""

    async def score(self, row: InputRow, text: str, output: Sequence[Mapping[str, Any]]) -> Score:
        """`text` is the model's last message, `output` the items of the response. Raises RolloutError (reward, sandbox, judge)."""

    async def close(self) -> None:
        """End what it started; nothing, where it starts nothing."""
        return


@dataclass(frozen=True, slots=True)
class Score:
    """What a verifier says."""

    reward: float
    answer: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Kept in the row, beside the reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)


async def score_answer(verifier: Verifier, row: InputRow, text: str, output: Sequence[Mapping[str, Any]], kept: Mapping[str, Any]) -> Score:
    """The score of an answer; a RolloutError of the verifier, or for a reward that is not finite, has `kept` in its row."""
    try:
        score = await verifier.score(row, text, output)
        if not math.isfinite(score.reward):
            raise RolloutError(FailureKind.REWARD, f"the verifier gave {score.reward}, which is not finite")
    except RolloutError as error:
        error.row = {**kept, **error.row}
        raise
    return score


async def close_verifiers(verifiers: Mapping[str, Verifier]) -> None:
    """Close each verifier once; datasets may share one."""
    for verifier in {id(verifier): verifier for verifier in verifiers.values()}.values():
        await verifier.close()
