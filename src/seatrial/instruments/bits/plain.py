"""The hash's constants and the reference kernels in plain torch, on any device; the C and CUDA kernels must give the same values.

- The hash of some bytes is two 64-bit sums over blocks of 16 KiB: NH (of UMAC) twice with shifted keys, mixed with the position. Two
  different inputs have the same sums with a probability of about 2^-64. It finds faults; it resists no adversary who knows the keys.
- Kernels work on flat contiguous uint8 tensors (`flat`) whose sizes agree. They are slow; machines without a compiler use them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

BLOCK_BYTES = 16384
WORDS = BLOCK_BYTES // 4
SHIFT = 4  # by how many words the keys of the second sum are shifted
SEED = 0x5EA7_2141_0F1E_ECE5
GAMMA = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # what a block's position is multiplied with, for each sum
MASK = (1 << 64) - 1

Sums = tuple[int, int]


def table() -> tuple[int, ...]:
    """The keys, of 32 bits each: the high halves of splitmix64."""
    state, keys = SEED, []
    for _ in range(WORDS + SHIFT):
        state = (state + GAMMA[0]) & MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        keys.append((mixed ^ (mixed >> 31)) >> 32)
    return tuple(keys)


TABLE = table()


def signed(value: int) -> int:
    """The same 64 bits as a signed number: torch has no unsigned arithmetic."""
    return value - (1 << 64) if value >> 63 else value


ROW_UNITS = 256
FULL = 255  # the count of a row that stores all of its units
BLOCKS_AT_ONCE = 64


class Planes(NamedTuple):
    """The entries of a tensor, row by row."""

    counts: Any
    offsets: Any
    values: Any


def in_memory(tensor: Any) -> bool:
    """Whether every element has an address here. A freed storage may still have one, from its offset: so its size is asked, too."""
    if not tensor.numel():
        return True
    if not tensor.data_ptr():
        return False
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return bool((last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes())


def check_memory(tensor: Any) -> None:
    """TypeError for a tensor whose bytes are not here: kernels that get addresses would read somewhere else, or crash."""
    if not in_memory(tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise TypeError(
            f"a {kind} of {tensor.dtype}{tuple(tensor.shape)} on {tensor.device} has no memory of its own, or less than it needs "
            "(DTensor, meta tensor, storage freed by FSDP): gather it with full_tensor() first, or within summon_full_params()"
        )


def flat(tensor: Any) -> Any:
    """The bytes of a tensor, as they lie in memory when it is contiguous; shares its memory if it is."""
    check_memory(tensor)
    import torch

    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def add_sums(data: Any, first_block: int, sums: Sums) -> Sums:
    """The sums with the blocks of `data` added, of which the first has this position."""
    import torch

    size, step = data.numel(), BLOCKS_AT_ONCE * BLOCK_BYTES
    for start in range(0, size, step):
        part = data[start : start + step]
        blocks = -(-part.numel() // BLOCK_BYTES)
        padded = torch.zeros(blocks * BLOCK_BYTES, dtype=torch.uint8, device=data.device)
        padded[: part.numel()] = part
        words = padded.view(torch.int32).view(blocks, WORDS).to(torch.int64)
        place = torch.arange(1, blocks + 1, device=data.device) + (first_block + start // BLOCK_BYTES)
        sums = (_add(words, place, 0, sums[0]), _add(words, place, 1, sums[1]))
    return sums


def _add(words: Any, place: Any, which: int, so_far: int) -> int:
    keyed = (words + _keys(str(words.device))[which * SHIFT :][:WORDS]) & 0xFFFFFFFF
    mixed = (keyed[:, 0::2] * keyed[:, 1::2]).sum(1) + place * signed(GAMMA[which])
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ _high(mixed)) * signed(factor)
    return (so_far + int((mixed ^ _high(mixed)).sum())) & MASK


def _high(value: Any) -> Any:
    """A logical shift by 33: torch shifts the sign in."""
    return (value >> 33) & 0x7FFFFFFF


@functools.cache
def _keys(device: str) -> Any:
    import torch

    return torch.tensor(TABLE, dtype=torch.int64, device=device)


def encode(current: Any, base: Any, overwrite: bool) -> tuple[Planes, int, Sums]:
    """Entries, the number of changed units, and the sums of `current`; `base` becomes `current`."""
    import torch

    now, old = _units(current), _units(base)
    total = now.numel()
    rows = -(-total // ROW_UNITS)
    grid = torch.zeros(rows * ROW_UNITS, dtype=torch.bool, device=now.device)
    grid[:total] = now != old
    changed = int(grid.sum())
    counts = grid.view(rows, ROW_UNITS).sum(1).clamp_(max=FULL)
    places = (grid.view(rows, ROW_UNITS) | (counts == FULL)[:, None]).view(-1)[:total].nonzero().view(-1)
    difference = now[places] - old[places]
    values = now[places] if overwrite else (difference << 1) ^ (difference >> 15)
    base.copy_(current)
    return Planes(counts.to(torch.uint8), (places % ROW_UNITS).to(torch.uint8), values), changed, add_sums(current, 0, (0, 0))


def check(planes: Planes, nbytes: int) -> None:
    """ValueError if the planes do not fit each other and a tensor of so many bytes."""
    _places(planes, nbytes)


def apply(target: Any, planes: Planes, sign: int) -> None:
    """Set (sign 0), add to (1) or subtract from (-1) the units of the entries, in place."""
    _write(target, _places(planes, target.numel()), planes.values, sign)


def apply_dense(target: Any, dense: Any, sign: int) -> None:
    """The same for all units; `dense` has two bytes for each."""
    _write(target, slice(None), _units(dense), sign)


def to_bitmap(planes: Planes, nbytes: int) -> Any:
    """Which units are entries: one bit per unit, lowest first."""
    import torch

    units = -(-nbytes // 2)
    bits = torch.zeros(-(-units // 8) * 8, dtype=torch.uint8, device=planes.counts.device)
    bits[_places(planes, nbytes)] = 1
    return (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def from_bitmap(bitmap: Any, values: Any, nbytes: int) -> Planes:
    """The planes of which `to_bitmap` makes this bitmap; ValueError if there are none."""
    import torch

    bits = (bitmap[:, None] >> torch.arange(8, dtype=torch.uint8, device=bitmap.device)) & 1
    places = bits.view(-1).nonzero().view(-1)
    return _from_places(places, values, nbytes)


def to_gaps(planes: Planes, nbytes: int) -> Any:
    """How many units lie between entries: a byte below 255 ends an entry, 255 adds as many."""
    import torch

    places = _places(planes, nbytes)
    between = torch.diff(places, prepend=places.new_full((1,), -1)) - 1
    ends = (between // 255 + 1).cumsum(0)
    gaps = torch.full((int(ends[-1]) if ends.numel() else 0,), 255, dtype=torch.uint8, device=places.device)
    gaps[ends - 1] = (between % 255).to(torch.uint8)
    return gaps


def from_gaps(gaps: Any, values: Any, nbytes: int) -> Planes:
    """The planes of which `to_gaps` makes these gaps; ValueError if there are none."""
    ends = gaps != 255
    if gaps.numel() and not bool(ends[-1]):
        raise ValueError("the gaps end within an entry")
    return _from_places((gaps.long() + ends).cumsum(0)[ends] - 1, values, nbytes)


def to_dense(planes: Planes, nbytes: int) -> Any:
    """The values of all units, zero where there is no entry, as bytes."""
    import torch

    dense = torch.zeros(-(-nbytes // 2), dtype=torch.int16, device=planes.values.device)
    dense[_places(planes, nbytes)] = planes.values
    return dense.view(torch.uint8)


def _units(data: Any) -> Any:
    """The 16-bit units of some bytes, an odd last byte padded with zero; shares their memory where it can."""
    import torch

    size = data.numel()
    if size % 2 == 0 and data.data_ptr() % 2 == 0 and data.storage_offset() % 2 == 0:
        return data.view(torch.int16)
    padded = torch.zeros(size + size % 2, dtype=torch.uint8, device=data.device)
    padded[:size] = data
    return padded.view(torch.int16)


def _places(planes: Planes, nbytes: int) -> Any:
    """The index of the unit of every entry."""
    import torch

    units = -(-nbytes // 2)
    rows = torch.arange(planes.counts.numel(), device=planes.counts.device)
    held = (units - rows * ROW_UNITS).clamp_(max=ROW_UNITS)
    entries = torch.where(planes.counts == FULL, held, planes.counts.to(torch.int64))
    wanted = int(entries.sum())
    if len(rows) != -(-units // ROW_UNITS) or wanted != planes.offsets.numel() or wanted != planes.values.numel():
        raise ValueError(
            f"{len(rows)} rows that ask for {wanted} entries, {planes.offsets.numel()} offsets and {planes.values.numel()} values "
            f"are not of one tensor with {nbytes} bytes"
        )
    places = rows.repeat_interleave(entries) * ROW_UNITS + planes.offsets
    if wanted and (int(places[-1]) >= units or bool((places[1:] <= places[:-1]).any())):
        raise ValueError("offsets do not ascend within their rows, or lie past the end of the tensor")
    return places


def _from_places(places: Any, values: Any, nbytes: int) -> Planes:
    """The planes with entries at these places; ValueError if no encoder makes them."""
    import torch

    units = -(-nbytes // 2)
    if places.numel() and int(places[-1]) >= units:
        raise ValueError(f"an entry at unit {int(places[-1])} of {units}")
    counts = torch.bincount(places // ROW_UNITS, minlength=-(-units // ROW_UNITS)).clamp_(max=FULL).to(torch.uint8)
    planes = Planes(counts, (places % ROW_UNITS).to(torch.uint8), values)
    check(planes, nbytes)
    return planes


def _write(target: Any, places: Any, values: Any, sign: int) -> None:
    import torch

    held = _units(target)
    difference = ((values >> 1) & 0x7FFF) ^ -(values & 1)
    held[places] = values if sign == 0 else held[places] + sign * difference
    if held.data_ptr() != target.data_ptr():
        target.copy_(held.view(torch.uint8)[: target.numel()])
