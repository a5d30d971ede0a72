from __future__ import annotations

import random

import pytest

from seatrial.metrics.tensorboard import crc32c, crc32c_many, masked
from tests.metrics.writer import slow_crc32c, stored


def test_the_published_check_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc32c(bytes([255] * 32)) == 0x62A8AB43


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 48, 255])
def test_many_at_once_equal_one_by_one(length: int) -> None:
    source = random.Random(length)
    messages = [source.randbytes(length) for _ in range(50)]
    assert crc32c_many(messages) == [slow_crc32c(message) for message in messages]


def test_many_of_none() -> None:
    assert crc32c_many([]) == []


def test_masked_is_the_stored_form() -> None:
    assert masked([crc32c(b"abc")])[0].to_bytes(4, "little") == stored(b"abc")
