"""Just enough of the protobuf wire format to walk the fields of a message."""

from __future__ import annotations

import struct
from collections.abc import Iterator

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


def integers(value: int | bytes) -> list[int]:
    """A repeated integer field, packed or not."""
    if isinstance(value, int):
        return [signed(value)]
    found, position = [], 0
    while position < len(value):
        number, position = varint(value, position)
        found.append(signed(number))
    return found


def floats(value: int | bytes, code: str) -> list[float]:
    """A repeated float (`f`) or double (`d`) field, packed or not."""
    if isinstance(value, int) or len(value) % struct.calcsize(code):
        raise MalformedError("a list of numbers is cut off")
    return [number for (number,) in struct.iter_unpack(f"<{code}", value)]
