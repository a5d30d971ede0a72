"""The difference of two states of a tensor, exact to the bit, of any dtype: encode, apply, revert.

Specification:
- A unit is a u16 of the raw little-endian bytes; an odd last byte is padded with 0. A row is 256 units. An entry is a unit with a
  value: for the kind "difference" zigzag16 of (current - base) mod 2^16, for "overwrite" the current bits.
- Entries are the units that changed, and every unit of a row in which 255 or more did. n is their number; `changed` counts only
  units that did change.
- Modes, by n: "same" without a change; "sparse" while n * 8 < units: `counts` u8 per row (255: all units the row has), `offsets`
  u8 per entry, ascending in a row, `values` int16 per entry; "bitmap" while n * 16 < units * 15: the same entries as one bit per
  unit, lowest bit first, and `values`; else "dense": the values of all units, as bytes (uint8, two per unit).
- On a wire, `gaps` (uint8) stand for counts and offsets: the units between an entry and the one before it, 255 for each 255 of
  them and then the rest. They take fewer bits, most of all once compressed, but cannot be applied in parallel.
- Only a difference has an inverse. Overwriting may be repeated.
- What does not fit its target is refused before anything is written: sizes and dtypes always, counts too, and on a CPU also offsets. A
  GPU skips entries past the end. So what comes over a wire as gaps is decoded and checked on the CPU (`from_gaps`).

`encode` refreshes the base in the same pass; `revert(base, coded)` undoes that for a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from seatrial.instruments.bits import gpu, native, plain
from seatrial.instruments.bits.plain import Sums

Kind = Literal["difference", "overwrite"]
Mode = Literal["same", "sparse", "bitmap", "dense"]
KINDS = ("difference", "overwrite")
GPU_OPERATIONS = {1: "add", -1: "subtract", 0: "overwrite"}


@dataclass(frozen=True)
class Coded:
    """What changed in one tensor. Planes that the mode does not use are None."""

    mode: Mode
    nbytes: int
    changed: int
    counts: Any = None
    offsets: Any = None
    values: Any = None
    bitmap: Any = None
    dense: Any = None


def mode_of(entries: int, units: int) -> Mode:
    """The mode for this many entries of a tensor with so many units."""
    if not entries:
        return "same"
    if entries * 8 < units:
        return "sparse"
    return "bitmap" if entries * 16 < units * 15 else "dense"


def encode(current: Any, base: Any, kind: Kind = "difference") -> tuple[Coded, Sums]:
    """What changed from `base` to `current`, and the sums of `current`. `base` becomes `current`."""
    return encode_many([(current, base)], kind)[0]


def encode_many(pairs: Sequence[tuple[Any, Any]], kind: Kind = "difference") -> list[tuple[Coded, Sums]]:
    """`encode` for many pairs of current and base; those on one CUDA device are one call there."""
    for current, base in pairs:
        _check_pair(current, base, kind)
    found: dict[int, tuple[Coded, Sums]] = {}
    on_gpu: dict[int, list[int]] = {}
    for index, (current, base) in enumerate(pairs):
        if gpu.usable(current) and gpu.usable(base):
            on_gpu.setdefault(current.device.index, []).append(index)
        else:
            now, old = plain.flat(current), plain.flat(base)
            planes, changed, sums = _kernels(now).encode(now, old, kind == "overwrite")
            found[index] = (_pack(planes, changed, now, kind), sums)
    for chosen in on_gpu.values():
        plan = gpu.KernelPlan([pairs[index][0] for index in chosen], [pairs[index][1] for index in chosen])
        made = plan.encode(kind == "overwrite")
        for index, own, changed, sums in zip(chosen, plan.planes(made), made.changed, made.sums, strict=True):
            found[index] = (_pack(plain.Planes(*own), changed, pairs[index][0], kind), sums)
    return [found[index] for index in range(len(pairs))]


def gaps_of(coded: Coded) -> Any:
    """The gaps of a sparse coding, on the CPU; with its values they are all that a wire needs."""
    if coded.mode != "sparse":
        raise ValueError(f"delta: mode {coded.mode!r} has no gaps")
    planes = plain.Planes(*(plane.cpu() for plane in (coded.counts, coded.offsets, coded.values)))
    return _kernels(planes.counts).to_gaps(planes, coded.nbytes)


def from_gaps(gaps: Any, values: Any, nbytes: int, changed: int) -> Coded:
    """The sparse coding with these gaps and values, on the CPU; ValueError if they do not fit each other and the size."""
    import torch

    given, held = _plane("gaps", gaps, torch.uint8, "cpu"), _plane("values", values, torch.int16, "cpu")
    return Coded("sparse", nbytes, changed, *_kernels(given).from_gaps(given, held, nbytes))


def apply(target: Any, coded: Coded, kind: Kind) -> None:
    """Bring `target`, which holds the base, to the encoded state, in place."""
    _check_kind(kind)
    _write(target, coded, 0 if kind == "overwrite" else 1)


def revert(target: Any, coded: Coded, kind: Kind = "difference") -> None:
    """Bring `target`, which holds the encoded state, back to the base, in place."""
    _check_kind(kind)
    if kind == "overwrite":
        raise ValueError("an overwrite has no inverse: keep the old bytes, or encode a difference")
    _write(target, coded, -1)


def _kernels(data: Any) -> Any:
    """The module with the kernels for these bytes; on a GPU, those for what is not sparse."""
    return native if data.device.type == "cpu" and native.library() is not None else plain


def _pack(planes: plain.Planes, changed: int, current: Any, kind: Kind) -> Coded:
    import torch

    nbytes = current.nbytes
    mode = mode_of(planes.values.numel(), -(-nbytes // 2))
    if mode == "same":
        return Coded(mode, nbytes, changed)
    if mode == "sparse":
        return Coded(mode, nbytes, changed, *planes)
    if mode == "bitmap":
        return Coded(mode, nbytes, changed, values=planes.values, bitmap=_kernels(current).to_bitmap(planes, nbytes))
    if kind == "difference":
        return Coded(mode, nbytes, changed, dense=_kernels(current).to_dense(planes, nbytes))
    data = plain.flat(current)
    return Coded(mode, nbytes, changed, dense=torch.cat([data, data.new_zeros(nbytes % 2)]))


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"delta: the kind {kind!r} is none of {', '.join(KINDS)}")


def _check_pair(current: Any, base: Any, kind: str) -> None:
    _check_kind(kind)
    for what, tensor in (("current", current), ("base", base)):
        _check_layout(what, tensor)
    if current.dtype != base.dtype or current.shape != base.shape or current.device != base.device:
        said = [f"{tensor.dtype}{tuple(tensor.shape)} on {tensor.device}" for tensor in (current, base)]
        raise ValueError(f"delta: current is {said[0]}, but base is {said[1]}")
    if current.numel() and current.data_ptr() == base.data_ptr():
        raise ValueError("delta: current and base share their memory: no change would ever be seen")


def _check_layout(what: str, tensor: Any) -> None:
    plain.check_memory(tensor)
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"delta: {what} ({tensor.dtype}{tuple(tensor.shape)}) is not contiguous: give its .contiguous() copy")


def _write(target: Any, coded: Coded, sign: int) -> None:
    """What a CPU can check is checked before the first bit is written. A GPU's kernels check counts themselves."""
    _check_layout("target", target)
    data = plain.flat(target)
    if data.numel() != coded.nbytes:
        raise ValueError(f"delta: the target has {data.numel()} bytes, the encoded tensor has {coded.nbytes}")
    if coded.mode == "same":
        return
    planes = _planes(coded, data)
    if not isinstance(planes, plain.Planes):
        _kernels(data).apply_dense(data, planes, sign)
    elif gpu.usable(data):
        plan = gpu.KernelPlan([data])
        plan.apply(plan.joined([planes]), GPU_OPERATIONS[sign])
    else:
        _kernels(data).apply(data, planes, sign)


def _plane(name: str, plane: Any, dtype: Any, device: Any) -> Any:
    if plane is None or plane.dtype != dtype or plane.dim() != 1:
        raise ValueError(f"delta: the plane {name!r} is missing or is not a flat {dtype}")
    return plane.to(device).contiguous()


def _planes(coded: Coded, data: Any) -> Any:
    """The checked planes of a sparse or bitmap coding, or the values of a dense one, beside the bytes they are for."""
    import torch

    def beside(name: str, dtype: Any) -> Any:
        return _plane(name, getattr(coded, name), dtype, data.device)

    if coded.mode == "dense":
        dense = beside("dense", torch.uint8)
        if dense.numel() != coded.nbytes + coded.nbytes % 2:
            raise ValueError(f"delta: {dense.numel()} bytes of values for a tensor of {coded.nbytes} bytes")
        return dense
    values, units = beside("values", torch.int16), -(-coded.nbytes // 2)
    if coded.mode == "sparse":
        planes = plain.Planes(beside("counts", torch.uint8), beside("offsets", torch.uint8), values)
        if not gpu.usable(data):
            _kernels(data).check(planes, coded.nbytes)
        return planes
    if coded.mode != "bitmap":
        raise ValueError(f"delta: unknown mode {coded.mode!r}")
    bitmap = beside("bitmap", torch.uint8)
    if bitmap.numel() != -(-units // 8):
        raise ValueError(f"delta: a bitmap of {bitmap.numel()} bytes for {units} units")
    return _kernels(data).from_bitmap(bitmap, values, coded.nbytes)
