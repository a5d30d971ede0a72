"""The kernels of bits.c on CPU tensors: the same functions as `plain`, with the same values."""

from __future__ import annotations

from typing import Any

from seatrial.probes.bits import native
from seatrial.probes.bits.keys import Sums
from seatrial.probes.bits.plain import ROW_UNITS, Planes


def _library() -> native.Library:
    found = native.library()
    if found is None:
        raise RuntimeError(f"the C kernels are not here: {native.why_not()}")
    return found


def _addresses(planes: Planes) -> tuple[int, int, int]:
    return planes.counts.data_ptr(), planes.offsets.data_ptr(), planes.values.data_ptr()


def _rows(nbytes: int) -> int:
    return -(-nbytes // (2 * ROW_UNITS))


def add_sums(data: Any, first_block: int, sums: Sums) -> Sums:
    """The sums with the blocks of `data` added, of which the first has this position."""
    return _library().add_sums(data.data_ptr(), data.numel(), first_block, sums)


def encode(current: Any, base: Any, overwrite: bool) -> tuple[Planes, int, Sums]:
    """Entries, the number of changed units, and the sums of `current`; `base` becomes `current`, all in one pass."""
    import torch

    nbytes = current.numel()
    units = -(-nbytes // 2)
    # Room for every unit costs nothing: the system gives memory only where it is written.
    counts, offsets = torch.empty(_rows(nbytes), dtype=torch.uint8), torch.empty(units, dtype=torch.uint8)
    room = Planes(counts, offsets, torch.empty(units, dtype=torch.int16))
    entries, changed, sums = _library().encode(current.data_ptr(), base.data_ptr(), nbytes, overwrite, _addresses(room))
    return Planes(counts, offsets[:entries].clone(), room.values[:entries].clone()), changed, sums


def check(planes: Planes, nbytes: int) -> None:
    """ValueError if the planes do not fit each other and a tensor of so many bytes."""
    rows, entries = planes.counts.numel(), planes.offsets.numel()
    counts, offsets, _ = _addresses(planes)
    fits = rows == _rows(nbytes) and entries == planes.values.numel()
    if not fits or not _library().check(counts, rows, offsets, entries, nbytes):
        raise ValueError(
            f"{rows} rows, {entries} offsets and {planes.values.numel()} values are not of one tensor with {nbytes} bytes, "
            "or offsets do not ascend within their rows"
        )


def apply(target: Any, planes: Planes, sign: int) -> None:
    """Set (sign 0), add to (1) or subtract from (-1) the units of the entries, in place. The planes are checked."""
    _library().apply(target.data_ptr(), target.numel(), _addresses(planes), sign)


def apply_dense(target: Any, dense: Any, sign: int) -> None:
    """The same for all units; `dense` has two bytes for each."""
    _library().apply_dense(target.data_ptr(), target.numel(), dense.data_ptr(), sign)


def to_bitmap(planes: Planes, nbytes: int) -> Any:
    """Which units are entries: one bit per unit, lowest first."""
    import torch

    bitmap = torch.zeros(-(-nbytes // 16), dtype=torch.uint8)
    counts, offsets, _ = _addresses(planes)
    _library().to_bitmap(counts, offsets, nbytes, bitmap.data_ptr())
    return bitmap


def from_bitmap(bitmap: Any, values: Any, nbytes: int) -> Planes:
    """The planes of which `to_bitmap` makes this bitmap; ValueError if there are none."""
    import torch

    counts, offsets = torch.empty(_rows(nbytes), dtype=torch.uint8), torch.empty(-(-nbytes // 2), dtype=torch.uint8)
    entries = _library().from_bitmap(bitmap.data_ptr(), nbytes, counts.data_ptr(), offsets.data_ptr())
    if entries != values.numel():
        raise ValueError(f"a bitmap with {entries} entries (-1: not well-formed) for {values.numel()} values")
    return Planes(counts, offsets[:entries].clone(), values)


def to_gaps(planes: Planes, nbytes: int) -> Any:
    """How many units lie between entries: a byte below 255 ends an entry, 255 adds as many."""
    import torch

    entries = planes.offsets.numel()
    room = torch.empty(entries + -(-nbytes // 2) // 255 + native.GAPS_SPARE, dtype=torch.uint8)
    counts, offsets, _ = _addresses(planes)
    return room[: _library().to_gaps(counts, offsets, entries, nbytes, room.data_ptr())].clone()


def from_gaps(gaps: Any, values: Any, nbytes: int) -> Planes:
    """The planes of which `to_gaps` makes these gaps; ValueError if there are none."""
    import torch

    counts, offsets = torch.zeros(_rows(nbytes), dtype=torch.uint8), torch.empty(-(-nbytes // 2), dtype=torch.uint8)
    entries = _library().from_gaps(gaps.data_ptr(), gaps.numel(), nbytes, counts.data_ptr(), offsets.data_ptr())
    if entries != values.numel():
        raise ValueError(f"gaps of {entries} entries (-1: not well-formed) for {values.numel()} values")
    return Planes(counts, offsets[:entries].clone(), values)


def to_dense(planes: Planes, nbytes: int) -> Any:
    """The values of all units, zero where there is no entry, as bytes."""
    import torch

    dense = torch.zeros(nbytes + nbytes % 2, dtype=torch.uint8)
    _library().to_dense(_addresses(planes), nbytes, dense.data_ptr())
    return dense
