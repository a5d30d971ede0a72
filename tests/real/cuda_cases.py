"""Cases of test_bits on a GPU: every value is that of the CPU, bit for bit. Without a CUDA device each of them says so."""

from __future__ import annotations

from typing import Any
from unittest import SkipTest

import torch

from seatrial.instruments.bits import delta, fingerprint, gpu
from tests.real.bits_cases import DTYPES, random_bits, raw, refused, same
from tests.real.delta_cases import KINDS, changed_at

ABSENT = "no CUDA device"
SIZES = (0, 1, 3, 255, 256, 257, 4099, 8192, 8193, 8192 * 9 + 5)
"""Around rows, tiles and several tiles of two-byte elements."""
SHARES = (0.0, 0.001, 0.05, 0.5, 1.0)
torch.manual_seed(7)


def device() -> Any:
    """Where the cases run."""
    if not torch.cuda.is_available():
        raise SkipTest(ABSENT)
    return torch.device("cuda", 0)


def states(share: float) -> list[tuple[Any, Any]]:
    """Base and current of several dtypes and sizes, on the CPU."""
    made = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
        for size in SIZES:
            base = random_bits(dtype, size)
            made.append((base, changed_at(base, torch.rand(base.nbytes // 2) < share)))
    odd = random_bits(torch.uint8, 40001)
    other = odd.clone()
    other[torch.rand(odd.shape) < share] ^= 3
    return [*made, (odd, other)]


def planes_of(coded: delta.Coded) -> list[bytes | None]:
    """Everything that a coding holds."""
    held = (coded.counts, coded.offsets, coded.values, coded.bitmap, coded.dense)
    return [None if plane is None else raw(plane.cpu()) for plane in held]


def case_sums_on_a_gpu_are_those_of_the_cpu() -> None:
    there = device()
    held = [random_bits(dtype, size) for dtype in DTYPES for size in SIZES]
    assert fingerprint.sums([tensor.to(there) for tensor in held]) == fingerprint.sums(held)
    whole = random_bits(torch.bfloat16, 130, 90)
    views = (whole.t(), whole[::2], whole[:, 3:17], whole[1:], whole.view(-1)[1:], whole.expand(2, 130, 90))
    moved = whole.to(there)
    there_too = (moved.t(), moved[::2], moved[:, 3:17], moved[1:], moved.view(-1)[1:], moved.expand(2, 130, 90))
    assert fingerprint.sums(there_too) == fingerprint.sums(views)
    number = random_bits(torch.complex64, 100)
    assert fingerprint.sums([number.to(there).conj()]) == fingerprint.sums([number.conj()])


def case_encoding_on_a_gpu_is_that_of_the_cpu() -> None:
    there = device()
    for share in SHARES:
        for kind in KINDS:
            held = states(share)
            here = delta.encode_many([(now, old.clone()) for old, now in held], kind)
            bases = [old.to(there) for old, _ in held]
            found = delta.encode_many([(now.to(there), base) for (_, now), base in zip(held, bases, strict=True)], kind)
            for (coded, sums), (expected, its_sums), base, (_, now) in zip(found, here, bases, held, strict=True):
                said = (share, kind, now.dtype, now.shape)
                assert (coded.mode, coded.nbytes, coded.changed, sums) == (expected.mode, expected.nbytes, expected.changed, its_sums), said
                assert planes_of(coded) == planes_of(expected), said
                assert same(base.cpu(), now), said


def case_applying_and_reverting_on_a_gpu_is_that_of_the_cpu() -> None:
    there = device()
    for share in SHARES:
        for kind in KINDS:
            held = states(share)
            coded = [made for made, _ in delta.encode_many([(now, old.clone()) for old, now in held], kind)]
            targets = [old.to(there) for old, _ in held]
            for target, made in zip(targets, coded, strict=True):
                delta.apply(target, made, kind)
            assert all(same(target.cpu(), now) for target, (_, now) in zip(targets, held, strict=True)), (share, kind)
            if kind == "difference":
                for target, made in zip(targets, coded, strict=True):
                    delta.revert(target, made)
                assert all(same(target.cpu(), old) for target, (old, _) in zip(targets, held, strict=True)), share


def case_only_empty_tensors_on_a_gpu_are_no_work() -> None:
    there = device()
    nothing = [torch.empty(0, 5, device=there), torch.empty(0, dtype=torch.bfloat16, device=there)]
    plan = gpu.KernelPlan(nothing, [tensor.clone() for tensor in nothing])
    for _ in range(20):  # memory that was used before, and is not zero
        torch.full((1 << 16,), -1, dtype=torch.int32, device=there)
        made = plan.encode(overwrite=False)
        assert (made.ends, made.changed, made.sums) == ([0, 0], [0, 0], [(0, 0), (0, 0)])
        assert [plane.numel() for own in plan.planes(made) for plane in own] == [0] * 6
        plan.apply(made, "add")
    assert plan.sums() == [(0, 0), (0, 0)]


def case_a_tensor_without_its_memory_is_refused_on_a_gpu() -> None:
    freed = torch.randn(100, 100, device=device())
    part, turned = freed[50:], freed.t()
    freed.untyped_storage().resize_(0)
    for tensor in (freed, part, turned):
        assert not gpu.usable(tensor)
        for call in (fingerprint.tensor_hash, lambda held: gpu.KernelPlan([held]), lambda held: gpu.sums([held])):
            assert "gather it with full_tensor() first" in refused(call, tensor, kind=TypeError)
