"""Tensors as the bytes of a payload, and back.

Planes by mode: raw: the bytes of the tensor; sparse: gaps, low bytes of the values, high bytes; bitmap: bits, low, high; dense: one
value per unit; same: none. Low and high bytes are apart because a compressor finds more in them that way. Gaps are smaller than counts
and offsets even uncompressed. They are coded and decoded on the CPU, also for a GPU: the bytes of a payload are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from seatrial.probes.bits import plain
from seatrial.probes.bits.delta import Coded, from_gaps, gaps_of, mode_of
from seatrial.probes.refit.errors import RefitRefused
from seatrial.probes.refit.header import Entry
from seatrial.probes.refit.payload import Data, Payload


def flat(tensor: Any) -> Any:
    """The bytes of a contiguous tensor, sharing its memory."""
    import torch

    plain.check_memory(tensor)
    return tensor.detach().view(-1).view(torch.uint8)


def to_bytes(tensor: Any) -> memoryview:
    """The bytes of a contiguous tensor; without a copy if it is on the CPU."""
    return memoryview(flat(tensor).cpu().numpy())


def from_bytes(data: memoryview, device: Any) -> Any:
    """Bytes as a tensor; without a copy if they may be written to and stay on the CPU."""
    import torch

    if not len(data):
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8).to(device)


def dtype_name(tensor: Any) -> str:
    """`bfloat16` and the like."""
    return str(tensor.dtype).removeprefix("torch.")


def of_coded(coded: Coded) -> list[memoryview]:
    """The planes of a coded tensor."""
    if coded.mode == "same":
        return []
    if coded.mode == "dense":
        return [to_bytes(coded.dense)]
    halves = flat(coded.values).view(-1, 2)
    split = [to_bytes(halves[:, side].contiguous()) for side in (0, 1)]
    return [to_bytes(gaps_of(coded) if coded.mode == "sparse" else coded.bitmap), *split]


def fit(entry: Entry, nbytes: int) -> bool:
    """Whether the planes have lengths that a tensor of so many bytes can have in this mode; nothing is decoded for it."""
    units, lengths = -(-nbytes // 2), [length for _, length in entry.planes]
    if len(lengths) < 2:
        return sum(lengths) == {"same": 0, "raw": nbytes, "dense": 2 * units}[entry.mode]
    first, low, high = lengths
    places = first >= low if entry.mode == "sparse" else first == -(-units // 8)
    return places and low == high and mode_of(low, units) == entry.mode


def to_coded(entry: Entry, nbytes: int, payload: Payload, device: Any) -> Coded:
    """A coded tensor from the planes of a payload, whose lengths fit; a sparse one is on the CPU, and refused if it is not well-formed."""
    import torch

    sparse = entry.mode == "sparse"
    planes = [from_bytes(payload.plane(place), "cpu" if sparse else device) for place in entry.planes]
    if entry.mode == "same":
        return Coded("same", nbytes, 0)
    if entry.mode == "dense":
        return Coded("dense", nbytes, entry.changed, dense=planes[0])
    first, low, high = planes
    values = torch.stack((low, high), 1).view(torch.int16).view(-1)
    if not sparse:
        return Coded("bitmap", nbytes, entry.changed, bitmap=first, values=values)
    try:
        return from_gaps(first, values, nbytes, entry.changed)
    except ValueError as error:
        raise RefitRefused("corrupt", (entry.name,), detail=str(error)) from error


def uncounted(current: Any, base: Any) -> int | None:
    """How many elements differ in any bit; None for elements of two bytes, which the coding counts itself."""
    import torch

    size = current.element_size()
    if size == 2:
        return None
    if not current.numel():
        return 0
    kind = {1: torch.uint8, 4: torch.int32, 8: torch.int64}.get(size)
    if kind is not None:
        return int(torch.count_nonzero(current.detach().view(-1).view(kind) != base.detach().view(-1).view(kind)))
    return int((flat(current) != flat(base)).view(-1, size).any(1).sum())


def nonfinite(tensor: Any) -> int:
    """How many elements are NaN or infinite. A sum is finite only if all of its parts are, and is much cheaper than a look at each."""
    import torch

    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    if torch.isfinite(wide.sum()):
        return 0
    return int(torch.count_nonzero(~torch.isfinite(wide)))


def buckets(chunks: Iterable[Data], size: int) -> Iterator[memoryview]:
    """The same bytes in buckets of `size`; only the last may be smaller. A tensor may lie in several."""
    bucket, filled = bytearray(size), 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while len(rest):
            part = rest[: size - filled]
            bucket[filled : filled + len(part)] = part
            filled, rest = filled + len(part), rest[len(part) :]
            if filled == size:
                yield memoryview(bucket)
                filled = 0
    if filled:
        yield memoryview(bucket)[:filled]
