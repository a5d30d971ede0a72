"""One number out of a TensorProto: newer writers store a scalar as a tensor without dimensions."""

from __future__ import annotations

import struct

from seatrial.metrics.protobuf import MalformedError, fields, floats, integers

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


def _numbers(code: str, value: int | bytes) -> list[float] | list[int]:
    return floats(value, code) if code in "fd" else integers(value)


def _widen(dtype: int, number: float) -> float:
    if dtype == _BFLOAT16:
        return float(struct.unpack("<f", struct.pack("<I", (int(number) & 0xFFFF) << 16))[0])
    if dtype == _UINT64:
        return float(int(number) & (1 << 64) - 1)
    return float(number)
