"""Cases of test_bits about the delta coding: run in an environment with torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from seatrial.instruments.bits import delta, fingerprint, gpu, native, plain
from tests.instruments import bits_reference as reference
from tests.real.bits_cases import DTYPES, random_bits, raw, refused, same, without_c

KINDS: tuple[delta.Kind, ...] = ("difference", "overwrite")
torch.manual_seed(7)


def changed_at(tensor: Any, places: Any) -> Any:
    """A copy with other units at these places."""
    copy = tensor.clone()
    units = plain.flat(copy).view(torch.int16)
    units[places] += torch.randint(1, 300, units[places].shape, dtype=torch.int16)
    return copy


def case_both_kernels_encode_as_the_specification_says() -> None:
    for nbytes in (1, 2, 511, 512, 513, 16383, 16384, 40001):
        base = random_bits(torch.uint8, nbytes)
        current = torch.where(torch.rand(nbytes) < 0.03, random_bits(torch.uint8, nbytes), base)
        for overwrite in (False, True):
            counts, offsets, values, changed = reference.planes(raw(current), raw(base), overwrite)
            for kernels in (native, plain):
                held = base.clone()
                planes, found, sums = kernels.encode(current, held, overwrite)
                assert (planes.counts.tolist(), planes.offsets.tolist()) == (counts, offsets), (kernels, nbytes)
                assert [value & 0xFFFF for value in planes.values.tolist()] == values
                assert (found, sums) == (changed, reference.sums(raw(current)))
                assert same(held, current)
                bitmap, dense = plain.to_bitmap(planes, nbytes), plain.to_dense(planes, nbytes)
                assert same(bitmap, native.to_bitmap(planes, nbytes))
                assert same(dense, native.to_dense(planes, nbytes))
                gaps = plain.to_gaps(planes, nbytes)
                assert gaps.tolist() == reference.gaps(counts, offsets, nbytes)
                assert same(gaps, native.to_gaps(planes, nbytes))
                for again in (kernels.from_bitmap(bitmap, planes.values, nbytes), kernels.from_gaps(gaps, planes.values, nbytes)):
                    assert all(same(a, b) for a, b in zip(again, planes, strict=True))


def there_and_back(current: Any, base: Any, mode: str | None = None) -> None:
    """Encode both ways, apply and revert each with both kernels: bit for bit, and the same planes."""
    for kind in KINDS:
        refreshed, old = base.clone(), base.clone()
        coded, sums = delta.encode(current, refreshed, kind)
        assert mode in (None, coded.mode), (mode, coded.mode)
        assert (sums, coded.nbytes) == (fingerprint.sums([current])[0], current.numel() * current.element_size())
        assert same(refreshed, current)
        with without_c():
            slow, slow_sums = delta.encode(current, old, kind)
            assert (slow.mode, slow.changed, slow_sums) == (coded.mode, coded.changed, sums)
            for plane in ("counts", "offsets", "values", "bitmap", "dense"):
                one, two = getattr(slow, plane), getattr(coded, plane)
                assert (one is None) == (two is None)
                assert one is None or (one.dtype == two.dtype and torch.equal(one, two)), plane
        if coded.mode == "sparse":
            sent = delta.from_gaps(delta.gaps_of(coded), coded.values, coded.nbytes, coded.changed)
            assert torch.equal(sent.counts, coded.counts)
            assert torch.equal(sent.offsets, coded.offsets)
        for context in (nullcontext, without_c):
            with context():
                target = base.clone()
                delta.apply(target, coded, kind)
                assert same(target, current)
                if kind == "difference":
                    delta.revert(target, coded)
                    assert same(target, base)


def case_every_density_goes_there_and_back() -> None:
    for size in (30000, 30001):
        base = random_bits(torch.bfloat16, size)
        there_and_back(base.clone(), base, "same")
        one = base.clone()
        one.view(torch.int16)[size - 1] += 1
        there_and_back(one, base, "sparse")
        modes = ((0.001, "sparse"), (0.01, "sparse"), (0.1, "sparse"), (0.5, "bitmap"), (0.9, "bitmap"), (0.97, "dense"), (1.0, "dense"))
        for share, mode in modes:
            chosen = torch.rand(size) < share
            there_and_back(changed_at(base, chosen), base, mode)
            there_and_back(torch.where(chosen, random_bits(torch.bfloat16, size), base), base, None)


def case_every_dtype_goes_there_and_back() -> None:
    for dtype in DTYPES:
        for shape in ((0,), (), (1,), (3,), (5, 7), (999,)):
            base = random_bits(dtype, *shape)
            there_and_back(random_bits(dtype, *shape), base)
            there_and_back(torch.where(torch.rand(shape) < 0.05, random_bits(dtype, *shape), base), base)
    data = random_bits(torch.uint8, 6001)  # addresses that no unit may have
    there_and_back(torch.where(torch.rand(6000) < 0.02, 0, data[1:]).to(torch.uint8), data[1:])
    other = data.clone()
    other[3000] ^= 1
    there_and_back(other[1:], data[1:], "sparse")


def case_full_rows_and_partial_rows() -> None:
    for size in (256 * 40, 256 * 40 + 1, 256 * 40 + 254, 256 * 40 + 255):
        base = random_bits(torch.int16, size)
        for many in (254, 255, 256):
            there_and_back(changed_at(base, slice(512, 512 + many)), base, "sparse")
            there_and_back(changed_at(base, slice(513, min(513 + many, 768))), base, "sparse")
        there_and_back(changed_at(base, slice(256 * 40, size)), base, "sparse" if size > 256 * 40 else "same")
        spread = torch.rand(size) < 0.5
        spread[512:767] = True
        spread[767] = False  # a row with 255 changes, as a bitmap
        there_and_back(changed_at(base, spread), base, "bitmap")
        coded, _ = delta.encode(changed_at(base, slice(512, 767)), base.clone())
        assert (coded.counts[2], coded.changed, len(coded.values), int(coded.values[255])) == (255, 255, 256, 0)


def case_overwriting_twice_is_overwriting_once_and_has_no_inverse() -> None:
    base = random_bits(torch.bfloat16, 5000)
    for share in (0.01, 0.5, 1.0):
        current = changed_at(base, torch.rand(5000) < share)
        coded, _ = delta.encode(current, base.clone(), "overwrite")
        target = base.clone()
        for _ in range(2):
            delta.apply(target, coded, "overwrite")
            assert same(target, current)
        assert "no inverse" in refused(delta.revert, target, coded, "overwrite")
        assert same(target, current)


def case_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    base, current = random_bits(torch.bfloat16, 60, 50), random_bits(torch.bfloat16, 60, 50)
    kept = base.clone()
    assert "is not contiguous" in refused(delta.encode, current.t(), base.t())
    assert "base (torch.bfloat16(50, 60)) is not contiguous" in refused(delta.encode, current.view(50, 60), base.t())
    assert "but base is" in refused(delta.encode, current[:59], base)
    assert "but base is" in refused(delta.encode, current, base.view(torch.float16))
    assert "share their memory" in refused(delta.encode, base, base)
    assert "the kind 'xor'" in refused(delta.encode, current, base, "xor")
    assert same(base, kept)
    coded, _ = delta.encode(current, base.clone())
    for target in (base[:59], base[0], torch.cat([base, base])):
        before = target.clone()
        assert "bytes, the encoded tensor has 6000" in refused(delta.apply, target, coded, "difference")
        assert "bytes, the encoded tensor has 6000" in refused(delta.revert, target, coded)
        assert same(target, before)
    assert "is not contiguous" in refused(delta.apply, base.t(), coded, "difference")
    assert "the kind ''" in refused(delta.apply, base, coded, "")
    assert same(base, kept)


def broken(sparse: Any, bitmap: Any, dense: Any) -> Iterator[Any]:
    """Everything that a lost or changed byte of a plane may give."""
    for plane in ("counts", "offsets", "values"):
        yield replace(sparse, **{plane: getattr(sparse, plane)[:-1]})
        yield replace(sparse, **{plane: None})
    more, fewer, high = sparse.counts.clone(), sparse.counts.clone(), sparse.offsets.clone()
    more[3] += 1
    fewer[3] -= 1
    high[-1] = 255  # the last row is not whole
    swapped = sparse.offsets.clone()
    swapped[:2] = swapped[:2].flip(0)
    doubled = sparse.offsets.clone()
    doubled[1] = doubled[0]
    yield from (replace(sparse, counts=more), replace(sparse, counts=fewer), replace(sparse, offsets=high))
    yield from (replace(sparse, offsets=swapped), replace(sparse, offsets=doubled), replace(sparse, values=sparse.values.float()))
    yield from (replace(sparse, mode="bitmap"), replace(bitmap, mode="sparse"), replace(bitmap, mode="dense"), replace(sparse, mode="zip"))
    past = bitmap.bitmap.clone()
    past[-1] |= 128
    yield replace(bitmap, bitmap=past, values=torch.cat([bitmap.values, bitmap.values[:1]]))
    yield from (replace(bitmap, bitmap=past), replace(bitmap, bitmap=bitmap.bitmap[:-1]), replace(bitmap, values=bitmap.values[1:]))
    yield from (replace(dense, dense=dense.dense[:-2]), replace(dense, dense=dense.dense.view(torch.int16)))


def case_broken_planes_are_refused_and_nothing_is_written() -> None:
    base = random_bits(torch.bfloat16, 256 * 30 + 100)
    chosen = torch.rand(base.numel()) < 0.05
    chosen[:3] = True
    sparse, bitmap, dense = (
        delta.encode(changed_at(base, where), base.clone())[0] for where in (chosen, chosen | (torch.rand(base.numel()) < 0.4), slice(None))
    )
    assert [coded.mode for coded in (sparse, bitmap, dense)] == ["sparse", "bitmap", "dense"]
    target = base.clone()
    for coded in broken(sparse, bitmap, dense):
        assert refused(delta.apply, target, coded, "difference")
        with without_c():
            assert refused(delta.apply, target, coded, "difference")
        assert same(target, base)
    missing = torch.zeros_like(bitmap.bitmap)
    missing[:32], missing[5] = 255, 254  # 255 of 256 units: an encoder would store the whole row
    wrong = replace(bitmap, bitmap=missing, values=torch.zeros(255, dtype=torch.int16))
    assert refused(delta.apply, target, wrong, "difference")
    with without_c():
        assert refused(delta.apply, target, wrong, "difference")
    assert same(target, base)


def case_broken_gaps_are_refused() -> None:
    base = random_bits(torch.bfloat16, 256 * 30 + 100)
    coded, _ = delta.encode(changed_at(base, torch.rand(base.numel()) < 0.001), base.clone())
    gaps = delta.gaps_of(coded)
    assert 255 in gaps.tolist()
    high = gaps.clone()
    high[(gaps != 255).nonzero()[0]] = 255  # the first entry has lost its end
    assert "has no gaps" in refused(delta.gaps_of, delta.Coded("same", 10, 0))
    assert "'values' is missing or is not a flat" in refused(delta.from_gaps, gaps, coded.values.long(), coded.nbytes, coded.changed)
    lacks_one = torch.tensor([0] * 100 + [1] + [0] * 154, dtype=torch.uint8)  # 255 of the 256 units of the first row
    many = torch.full((31,), 255, dtype=torch.uint8)
    for wrong in (gaps[:-1], torch.cat([gaps, gaps[-1:]]), torch.cat([gaps, many[:1]]), torch.cat([many, gaps]), high, many, lacks_one):
        values = torch.zeros(255, dtype=torch.int16) if wrong is lacks_one else coded.values
        assert refused(delta.from_gaps, wrong, values, coded.nbytes, coded.changed)
        with without_c():
            assert refused(delta.from_gaps, wrong, values, coded.nbytes, coded.changed)


def case_only_empty_tensors_are_no_work_for_a_gpu() -> None:
    """Scratch is never of size zero: without tiles, what somebody else left in it would count."""

    def scratch(size: int, dtype: Any) -> Any:
        return torch.full((max(1, size),), -1, dtype=dtype)

    kernels = SimpleNamespace(device="cpu", empty=scratch, launch=mock.Mock(), keys=None)
    nothing = [torch.empty(0, 5), torch.empty(0, dtype=torch.bfloat16)]
    with mock.patch.object(gpu, "kernels", return_value=kernels), mock.patch.object(gpu, "usable", return_value=True):
        plan = gpu.KernelPlan(nothing, [tensor.clone() for tensor in nothing])
        made = plan.encode(overwrite=False)
        assert (made.ends, made.changed, made.sums) == ([0, 0], [0, 0], [(0, 0), (0, 0)])
        assert [(plane.numel(), plane.dtype) for own in plan.planes(made) for plane in own] == [
            *((0, torch.uint8), (0, torch.uint8), (0, torch.int16)) * 2
        ]
        plan.apply(made, "add")
        entries = torch.zeros(3, dtype=torch.uint8)
        assert "3 offsets" in refused(plan.apply, gpu.Delta(made.counts, entries, entries.short(), [3, 3]), "add")
    kernels.launch.assert_not_called()
