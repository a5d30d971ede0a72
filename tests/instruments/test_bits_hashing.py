"""The hash without torch: its keys, the stream, and the C kernels against the specification."""

from __future__ import annotations

import ctypes
import mmap
import random
from pathlib import Path

import pytest

from seatrial.instruments.bits import fingerprint, native, plain
from tests.instruments import bits_reference as reference

DATA = random.Random(3).randbytes(3 * 16384 + 777)


def library() -> native.Library:
    found = native.library()
    assert found is not None, native.why_not()
    return found


def test_the_keys_are_those_of_the_specification() -> None:
    assert list(plain.TABLE) == reference.KEYS
    assert len(plain.TABLE) == 4096 + 4
    assert all(0 <= key < 1 << 32 for key in plain.TABLE)
    assert len(set(plain.TABLE)) > 4090


def test_signed_keeps_the_bits() -> None:
    for value in (0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
        assert plain.signed(value) % (1 << 64) == value
        assert -(1 << 63) <= plain.signed(value) < 1 << 63


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 16383, 16384, 16385, len(DATA)])
def test_c_hashes_as_specified(size: int) -> None:
    assert library().add_sums(DATA[:size], size, 0, (0, 0)) == reference.sums(DATA[:size])


def test_any_address_will_do() -> None:
    buffer = ctypes.create_string_buffer(DATA, len(DATA))
    for start in (0, 1, 2, 3, 17):
        assert library().add_sums(ctypes.addressof(buffer) + start, 20000, 0, (0, 0)) == reference.sums(DATA[start : start + 20000])


@pytest.mark.parametrize("step", [1000, 16383, 16384, 16385, 40000, 10**6])
def test_any_chunking_gives_the_same(step: int) -> None:
    stream = fingerprint.Stream()
    for start in range(0, len(DATA), step):
        stream.update(DATA[start : start + step])
    assert stream.finish() == reference.sums(DATA)


def test_uneven_and_empty_chunks_of_every_kind(tmp_path: Path) -> None:
    place = tmp_path / "data"
    place.write_bytes(DATA)
    draw = random.Random(4)
    with place.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
        stream, start = fingerprint.Stream(), 0
        stream.update(b"")
        while start < len(DATA):
            end = start + draw.choice((0, 1, 7, 500, 16384, 30000))
            made = draw.choice((bytes, bytearray, memoryview))
            stream.update(made(view[start:end]))
            start = end
        assert stream.finish() == stream.finish() == reference.sums(DATA)
    words = memoryview(DATA[:40000]).cast("I")
    stream = fingerprint.Stream()
    stream.update(words)
    assert stream.finish() == reference.sums(DATA[:40000])


def test_an_unfinished_stream_may_go_on() -> None:
    stream = fingerprint.Stream()
    assert stream.finish() == (0, 0)
    stream.update(DATA[:100])
    assert stream.finish() == reference.sums(DATA[:100])
    stream.update(DATA[100:])
    assert stream.finish() == reference.sums(DATA)


def test_every_bit_and_every_position_counts() -> None:
    def both(data: bytes) -> tuple[int, int]:
        return library().add_sums(data, len(data), 0, (0, 0))

    block = 16384
    swapped = DATA[block : 2 * block] + DATA[:block] + DATA[2 * block :]
    found = [both(DATA), both(swapped), both(DATA[1:] + DATA[:1]), both(DATA[::-1]), both(DATA[4:] + DATA[:4])]
    for place in range(0, len(DATA), 997):
        flipped = bytearray(DATA)
        flipped[place] ^= 1 << (place % 8)
        found.append(both(bytes(flipped)))
    assert len({sums[0] for sums in found}) == len({sums[1] for sums in found}) == len(found)
