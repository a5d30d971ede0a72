"""TensorBoard event files into points, in plain Python.

- Framing: length, checksum of the length, data, checksum of the data. Every checksum is verified: one flipped byte anywhere is found.
- Scalars in both forms: `simple_value`, and tensors of the scalars plugin. Text, images and histograms are no metrics and are skipped.
- `crc32c_many` takes many messages of one length at once, which makes checking everything affordable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

from seatrial.core.errors import UserError
from seatrial.core.guarded import read_file
from seatrial.core.series import Damage
from seatrial.metrics.readings import FileReading, Points

_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
_MASK_DELTA = 0xA282EAD8


def _make_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _make_table()


def crc32c(data: bytes) -> int:
    """The checksum of one message."""
    table, crc = _TABLE, _ONES
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ _ONES


def crc32c_many(messages: list[bytes]) -> list[int]:
    """The checksums of messages that all have the same length."""
    if not messages:
        return []
    count, length = len(messages), len(messages[0])
    joined = b"".join(messages)
    sums = [0, 0, 0, 0]
    for position in range(length):
        column = joined[position::length]
        for part, lookup in enumerate(_contribution(length - 1 - position)):
            sums[part] ^= int.from_bytes(column.translate(lookup), "little")
    # What is left is the part that depends on the length only: the checksum of as many zeros.
    zeros = crc32c(bytes(length)).to_bytes(4, "little")
    result = bytearray(4 * count)
    for part in range(4):
        constant = int.from_bytes(zeros[part : part + 1] * count, "little")
        result[part::4] = (sums[part] ^ constant).to_bytes(count, "little")
    return list(struct.unpack(f"<{count}I", result))


@cache
def _contribution(distance: int) -> tuple[bytes, ...]:
    """For each of the four bytes of a checksum: what a byte contributes that stands `distance` bytes before the end."""
    return tuple(bytes((state >> shift) & 255 for state in _states(distance)) for shift in (0, 8, 16, 24))


@cache
def _states(distance: int) -> tuple[int, ...]:
    if distance == 0:
        return _TABLE
    return tuple((state >> 8) ^ _TABLE[state & 255] for state in _states(distance - 1))


def masked(checksums: list[int]) -> list[int]:
    """The form in which records store their checksums."""
    return [((crc >> 15 | crc << 17) + _MASK_DELTA) & _ONES for crc in checksums]


VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class MalformedError(ValueError):
    """The bytes are no protobuf message."""


def varint(data: bytes, position: int) -> tuple[int, int]:
    """The unsigned integer at `position`, and the position behind it."""
    result = shift = 0
    while shift < 70:
        if position >= len(data):
            break
        byte = data[position]
        position += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, position
        shift += 7
    raise MalformedError("an integer is cut off")


def signed(value: int) -> int:
    """An unsigned varint read as a 64-bit signed integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Number, wire type and raw value of each field: an int for varints, the bytes for everything else."""
    position = 0
    while position < len(data):
        key, position = varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, position = varint(data, position)
            yield number, wire, value
            continue
        if wire == BYTES:
            length, position = varint(data, position)
        elif wire in (FIXED64, FIXED32):
            length = 8 if wire == FIXED64 else 4
        else:
            raise MalformedError(f"unknown wire type {wire}")
        end = position + length
        if end > len(data):
            raise MalformedError("a field is cut off")
        yield number, wire, data[position:end]
        position = end


def _numbers(code: str, value: int | bytes) -> list[float] | list[int]:
    """A repeated field, packed or not: floats (`f`), doubles (`d`), or integers of any kind."""
    if code in "fd":
        if isinstance(value, int) or len(value) % struct.calcsize(code):
            raise MalformedError("a list of numbers is cut off")
        return [number for (number,) in struct.iter_unpack(f"<{code}", value)]
    if isinstance(value, int):
        return [signed(value)]
    found, position = list[int](), 0
    while position < len(value):
        number, position = varint(value, position)
        found.append(signed(number))
    return found


_HALF, _BFLOAT16, _UINT64 = 19, 14, 23
_HALF_VAL = 13

# By dtype: the struct code of one element in tensor_content, and the number of the typed list that may stand instead.
_KINDS = {
    1: ("f", 5),
    2: ("d", 6),
    3: ("i", 7),
    4: ("B", 7),
    5: ("h", 7),
    6: ("b", 7),
    9: ("q", 10),
    10: ("?", 11),
    _BFLOAT16: ("H", _HALF_VAL),
    17: ("H", 7),
    _HALF: ("e", _HALF_VAL),
    22: ("I", 16),
    _UINT64: ("Q", 17),
}


def scalar(data: bytes) -> float | None:
    """The number in a serialized tensor; None when it holds text or anything but exactly one element."""
    dtype, elements, content = 0, 1, b""
    listed: dict[int, list[int | bytes]] = {}
    for number, _, value in fields(data):
        if number == 1 and isinstance(value, int):
            dtype = value
        elif number == 2 and isinstance(value, bytes):
            elements = _elements(value)
        elif number == 4 and isinstance(value, bytes):
            content = value
        else:
            listed.setdefault(number, []).append(value)
    if dtype not in _KINDS or elements != 1:
        return None
    code, list_number = _KINDS[dtype]
    if content:
        if len(content) != struct.calcsize(code):
            raise MalformedError("the content of a tensor has another length than its type")
        return _widen(dtype, struct.unpack(f"<{code}", content)[0])
    numbers = [number for value in listed.get(list_number, []) for number in _numbers(code, value)]
    if len(numbers) > 1:
        raise MalformedError("a tensor of one element lists several")
    if not numbers:
        return 0.0  # the format leaves out a value of zero
    if dtype == _HALF:
        return float(struct.unpack("<e", struct.pack("<H", int(numbers[0]) & 0xFFFF))[0])
    return _widen(dtype, numbers[0])


def _elements(shape: bytes) -> int:
    """The number of elements of a TensorShapeProto."""
    product = 1
    for number, _, dimension in fields(shape):
        if number == 2 and isinstance(dimension, bytes):
            sizes = [size for inner, _, size in fields(dimension) if inner == 1 and isinstance(size, int)]
            product *= sizes[-1] if sizes else 0
    return product


def _widen(dtype: int, number: float) -> float:
    if dtype == _BFLOAT16:
        return float(struct.unpack("<f", struct.pack("<I", (int(number) & 0xFFFF) << 16))[0])
    if dtype == _UINT64:
        return float(int(number) & (1 << 64) - 1)
    return float(number)


_HEADER = 12
_FOOTER = 4
_WORTH_A_BATCH = 32  # fewer messages, or longer ones, are summed one by one
_LONGEST_IN_BATCH = 256


def read_records(data: bytes, path: str) -> tuple[list[bytes], list[Damage]]:
    """The data of every intact record in the order of the file, and what is damaged between them."""
    records = _intact(data)
    return (records, []) if records is not None else _salvage(data, path)


def _intact(data: bytes) -> list[bytes] | None:
    """All records, or None if a single byte of the file is wrong or missing."""
    records: list[bytes] = []
    # By header (there are few different lengths): the length, the records of that length, their stored checksums.
    groups: dict[bytes, tuple[int, list[bytes], list[bytes]]] = {}
    position, size = 0, len(data)
    while position < size:
        header = data[position : position + _HEADER]
        group = groups.get(header)
        if group is None:
            length = _record_length(header)
            if length is None:
                return None
            group = groups[header] = (length, [], [])
        start = position + _HEADER
        end = start + group[0]
        position = end + _FOOTER
        record = data[start:end]
        records.append(record)
        group[1].append(record)
        group[2].append(data[end:position])
    if position != size:
        return None
    matches = (_checksums(length, messages) == b"".join(stored) for length, messages, stored in groups.values())
    return records if all(matches) else None


@lru_cache(maxsize=4096)  # a file that ends in zeros offers the same header millions of times
def _record_length(header: bytes) -> int | None:
    """The length in a record's header; None when the header is damaged or cut off."""
    if len(header) < _HEADER or _stored_form([crc32c(header[:8])]) != header[8:]:
        return None
    return int.from_bytes(header[:8], "little")


def _checksums(length: int, messages: list[bytes]) -> bytes:
    """The checksums of messages of one length, one after another as records store them."""
    if len(messages) >= _WORTH_A_BATCH and length <= _LONGEST_IN_BATCH:
        return _stored_form(crc32c_many(messages))
    return _stored_form([crc32c(message) for message in messages])


def _stored_form(checksums: list[int]) -> bytes:
    return struct.pack(f"<{len(checksums)}I", *masked(checksums))


def _salvage(data: bytes, path: str) -> tuple[list[bytes], list[Damage]]:
    """What can be read of a damaged file, record by record."""
    records: list[bytes] = []
    lost: list[int] = []
    damage: list[Damage] = []
    position, size = 0, len(data)
    while position < size:
        length = _record_length(data[position : position + _HEADER])
        start = position + _HEADER
        if size < start or (length is not None and size < start + length + _FOOTER):
            damage.append(Damage(path, f"offset {position}", 1, f"the last record is cut off; {size - position} bytes of it are there"))
            break
        if length is None:
            position = _resume(data, position, path, damage)
            continue
        end = start + length
        if _stored_form([crc32c(data[start:end])]) == data[end : end + _FOOTER]:
            records.append(data[start:end])
        else:
            lost.append(position)
        position = end + _FOOTER
    if lost:
        shown = ", ".join(map(str, lost[:5])) + (", …" if len(lost) > 5 else "")
        damage.append(Damage(path, f"offset {shown}", len(lost), "the data do not match their checksum"))
    return records, damage


def _resume(data: bytes, position: int, path: str, damage: list[Damage]) -> int:
    """Report the damaged header at `position` and return where to read on."""
    size = len(data)
    # A length below 4 GiB has four zero bytes at its high end: only those places can start a record.
    zeros = data.find(bytes(4), position + 5)
    while zeros >= 0:
        start = zeros - 4
        length = _record_length(data[start : start + _HEADER])
        if length is not None and start + _HEADER + length + _FOOTER <= size:
            what = f"the length of a record is damaged; {start - position} bytes are lost, reading goes on at offset {start}"
            damage.append(Damage(path, f"offset {position}", 1, what))
            return start
        zeros = data.find(bytes(4), zeros + 1)
    what = f"the length of a record is damaged and no record follows; the last {size - position} bytes are lost"
    damage.append(Damage(path, f"offset {position}", 0, what))
    return size


@dataclass(slots=True)
class _Raw:
    """Points whose values are still bytes: four for a float, eight for a double."""

    steps: list[int] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)

    def points(self) -> Points:
        joined = b"".join(self.values)
        if len(joined) == 4 * len(self.values):
            return Points(self.steps, list(struct.unpack(f"<{len(self.values)}f", joined)))
        return Points(self.steps, [struct.unpack("<f" if len(raw) == 4 else "<d", raw)[0] for raw in self.values])


def read_events(path: Path) -> FileReading:
    """The points of one event file, and what could not be read of it."""
    try:
        data = read_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}", "check the path and its permissions") from error
    records, damage = read_records(data, str(path))
    scan = _Scan(str(path))
    scan.read(records)
    return FileReading({tag: raw.points() for tag, raw in scan.series.items()}, damage=damage + scan.damage)


class _Scan:
    """Collects the points of one file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.series: dict[str, _Raw] = {}
        self.damage: list[Damage] = []
        self._shapes: dict[bytes, _Raw] = {}
        self._plugins: dict[str, str] = {}

    def read(self, records: list[bytes]) -> None:
        """Read records by their shape where it is known, in general otherwise."""
        shapes = self._shapes
        for index, record in enumerate(records):
            raw = None
            # 09: time as double, 10: step as integer of one to three bytes, then the shape, then a float.
            if len(record) > 16 and record[0] == 0x09 and record[9] == 0x10:
                step, start = record[10], 11
                if step > 127:
                    step, start = step & 127 | record[11] << 7, 12
                    if step > 16383:
                        step, start = step & 16383 | record[12] << 14, 13
                if step < 1 << 21:
                    raw = shapes.get(record[start:-4])
                    if raw is not None:
                        raw.steps.append(step)
                        raw.values.append(record[-4:])
            if raw is None:
                try:
                    self._event(record)
                except MalformedError as error:
                    self.damage.append(Damage(self.path, f"record {index + 1}", 1, f"not a readable event: {error}"))

    def _event(self, record: bytes) -> None:
        step, summaries = 0, []
        for number, _, value in fields(record):
            if number == 2 and isinstance(value, int):
                step = signed(value)
            elif number == 5 and isinstance(value, bytes):
                summaries.append(value)
        for summary in summaries:
            for number, _, value in fields(summary):
                if number == 1 and isinstance(value, bytes):
                    self._value(step, value)

    def _value(self, step: int, data: bytes) -> None:
        """One value of a summary: kept if it is a scalar in either form."""
        name, simple, tensor, metadata = b"", None, None, b""
        for number, wire, value in fields(data):
            if not isinstance(value, bytes):
                continue
            if number == 1:
                name = value
            elif number == 2 and wire == FIXED32:
                simple = value
            elif number == 8:
                tensor = value
            elif number == 9:
                metadata = value
        tag = name.decode("utf-8", errors="backslashreplace")
        if metadata:
            self._plugins[tag] = _plugin(metadata)
        if simple is not None:
            self._add(tag, step, simple)
            self._shapes.setdefault(_usual_shape(name), self.series[tag])
        elif tensor is not None and self._plugins.get(tag, "") in ("", "scalars"):
            number_read = scalar(tensor)
            if number_read is not None:
                self._add(tag, step, struct.pack("<d", number_read))
            elif self._plugins.get(tag) == "scalars":
                raise MalformedError(f"{tag!r} at step {step} is not one number")

    def _add(self, tag: str, step: int, value: bytes) -> None:
        raw = self.series.setdefault(tag, _Raw())
        raw.steps.append(step)
        raw.values.append(value)


def _plugin(metadata: bytes) -> str:
    """The name of the plugin that a SummaryMetadata belongs to."""
    for number, _, value in fields(metadata):
        if number == 1 and isinstance(value, bytes):
            for inner, _, name in fields(value):
                if inner == 1 and isinstance(name, bytes):
                    return name.decode("utf-8", errors="backslashreplace")
    return ""


def _usual_shape(name: bytes) -> bytes:
    """What stands between step and value when an event holds one summary with one simple value and nothing else."""
    value = b"\x0a" + _length(len(name)) + name + b"\x15"
    summary = b"\x0a" + _length(len(value) + 4) + value
    return b"\x2a" + _length(len(summary) + 4) + summary


def _length(number: int) -> bytes:
    """A length as varint."""
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])
