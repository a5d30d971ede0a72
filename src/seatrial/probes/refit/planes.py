"""Tensors as the bytes of a payload, and back.

Planes by mode: raw: the bytes of the tensor; sparse: counts, offsets, low bytes of the values, high bytes; bitmap: bits, low, high;
dense: one value per unit; same: none. Low and high bytes are apart because a compressor finds more in them that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from seatrial.probes.bits.delta import Coded
from seatrial.probes.refit.errors import RefitRefused
from seatrial.probes.refit.header import Entry
from seatrial.probes.refit.payload import Data, Payload


def flat(tensor: Any) -> Any:
    """The bytes of a contiguous tensor, sharing its memory."""
    import torch

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
    first = [coded.counts, coded.offsets] if coded.mode == "sparse" else [coded.bitmap]
    return [*(to_bytes(plane.contiguous()) for plane in first), *split]


def to_coded(entry: Entry, nbytes: int, payload: Payload, device: Any) -> Coded:
    """A coded tensor from the planes of a payload; planes that do not fit each other are refused."""
    import torch

    planes = [from_bytes(payload.plane(place), device) for place in entry.planes]
    if entry.mode == "same":
        return Coded("same", nbytes, 0)
    if entry.mode == "dense":
        return Coded("dense", nbytes, entry.changed, dense=planes[0])
    *first, low, high = planes
    if low.numel() != high.numel():
        raise RefitRefused("corrupt", (entry.name,), detail="its values have two lengths")
    values = torch.stack((low, high), 1).view(torch.int16).view(-1)
    if entry.mode == "bitmap":
        return Coded("bitmap", nbytes, entry.changed, bitmap=first[0], values=values)
    return Coded("sparse", nbytes, entry.changed, counts=first[0], offsets=first[1], values=values)


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
