"""Writes event files for the tests, independent of the reader: its checksum is the textbook bit-by-bit one."""

from __future__ import annotations

import struct
from pathlib import Path


def slow_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def stored(data: bytes) -> bytes:
    crc = slow_crc32c(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + stored(length) + data + stored(data)


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    return bytes([*encoded, number])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def simple(tag: str, value: float) -> bytes:
    """A Summary.Value with a simple_value."""
    return field(1, tag.encode()) + struct.pack("<Bf", 0x15, value)


def tensor(tag: str, content: bytes, plugin: str | None = "scalars") -> bytes:
    """A Summary.Value with a tensor."""
    metadata = field(9, field(1, field(1, plugin.encode()))) if plugin is not None else b""
    return field(1, tag.encode()) + field(8, content) + metadata


def event(step: int, *values: bytes) -> bytes:
    """An Event record with one summary of these values."""
    head = struct.pack("<Bd", 0x09, 1.7e9) + (b"\x10" + varint(step) if step else b"")
    return record(head + field(5, b"".join(field(1, value) for value in values)))


def version() -> bytes:
    return record(struct.pack("<Bd", 0x09, 1.7e9) + field(3, b"brain.Event:2"))


def write_series(path: Path, tag: str, points: dict[int, float]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(version() + b"".join(event(step, simple(tag, value)) for step, value in points.items()))
    return path
