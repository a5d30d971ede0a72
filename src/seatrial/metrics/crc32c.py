"""CRC-32C (Castagnoli), the checksum of TensorBoard event files, in plain Python.

- `crc32c` takes one message, byte by byte.
- `crc32c_many` takes many messages of one length at once, about 30 times as fast: a CRC is linear, so it is the
  XOR of what each byte contributes at its distance from the end. `bytes.translate` looks up one column of all
  messages in one call and long integers XOR them. This is what makes it affordable to verify every record.
"""

from __future__ import annotations

import struct
from functools import cache

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
def _contribution(distance: int) -> tuple[bytes, bytes, bytes, bytes]:
    """For each of the four bytes of a checksum: what a byte contributes that stands `distance` bytes before the end."""
    table = _states(distance)
    first, second, third, fourth = (bytes((state >> shift) & 255 for state in table) for shift in (0, 8, 16, 24))
    return first, second, third, fourth


@cache
def _states(distance: int) -> tuple[int, ...]:
    if distance == 0:
        return _TABLE
    return tuple((state >> 8) ^ _TABLE[state & 255] for state in _states(distance - 1))


def masked(checksums: list[int]) -> list[int]:
    """The form in which records store their checksums."""
    return [((crc >> 15 | crc << 17) + _MASK_DELTA) & _ONES for crc in checksums]
