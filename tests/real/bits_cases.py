"""Cases of test_bits about the hash and the fingerprint: run in an environment with torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from seatrial.instruments.bits import delta, fingerprint, native, plain
from seatrial.instruments.refit import payload
from seatrial.instruments.refit.weight_transfer import Consumer, Producer
from tests.instruments import bits_reference as reference

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64),
)
SIZES = (0, 1, 2, 3, 7, 255, 256, 257, 1000, 4099)
torch.manual_seed(7)


@contextmanager
def without_c() -> Iterator[None]:
    os.environ["SEATRIAL_NATIVE"] = "0"
    try:
        assert native.library() is None
        yield
    finally:
        del os.environ["SEATRIAL_NATIVE"]


def random_bits(dtype: Any, *shape: int) -> Any:
    """Any bit pattern, NaN of all kinds among them; a bool has only two."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def raw(tensor: Any) -> bytes:
    return bytes(plain.flat(tensor).tolist())


def sums_both_ways(tensor: Any) -> tuple[int, int]:
    (found,) = fingerprint.sums([tensor])
    with without_c():
        assert fingerprint.sums([tensor]) == [found], tensor.dtype
    return found


def same(left: Any, right: Any) -> bool:
    return bool(torch.equal(plain.flat(left), plain.flat(right)))


def refused(call: Any, *arguments: Any, kind: type[Exception] = ValueError) -> str:
    try:
        call(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError("not refused")


def case_the_c_kernels_are_used() -> None:
    assert native.library() is not None, native.why_not()


def case_every_dtype_hashes_as_the_specification_says() -> None:
    for dtype in DTYPES:
        for size in SIZES if dtype in (torch.bfloat16, torch.uint8) else (0, 3, 4099):
            tensor = random_bits(dtype, size)
            assert sums_both_ways(tensor) == reference.sums(raw(tensor)), (dtype, size)
    scalar = random_bits(torch.float32)
    assert sums_both_ways(scalar) == reference.sums(raw(scalar))
    assert sums_both_ways(torch.empty(3, 0, dtype=torch.bfloat16)) == (0, 0)
    large = random_bits(torch.bfloat16, 8192 * 70 + 5)  # more than plain torch takes at once
    assert sums_both_ways(large) == reference.sums(raw(large))


def case_layouts_and_views_hash_as_their_contiguous_copy() -> None:
    whole = random_bits(torch.bfloat16, 130, 90)
    for view in (whole.t(), whole[::2], whole[:, 3:17], whole[5:], whole.reshape(65, 2, 90).permute(2, 0, 1), whole.expand(2, 130, 90)):
        assert sums_both_ways(view) == sums_both_ways(view.clone(memory_format=torch.contiguous_format))
    assert sums_both_ways(whole.t()) != sums_both_ways(whole)
    data = random_bits(torch.uint8, 50001)
    for start in (1, 2, 3, 5):  # addresses that no wider type may have
        assert sums_both_ways(data[start:]) == sums_both_ways(data[start:].clone())
    number = random_bits(torch.complex64, 100)
    assert sums_both_ways(number.conj()) == sums_both_ways(number.conj().resolve_conj().clone()) != sums_both_ways(number)
    parameter = torch.nn.Parameter(torch.randn(5, 5))
    assert sums_both_ways(parameter) == sums_both_ways(parameter.detach())


def case_nan_payloads_and_signed_zeros_count() -> None:
    for bits in ((0x7FC0, 0x7FC1), (0x7F81, 0x7FC1), (0x7FC0, -0x40), (0, -0x8000)):
        one, two = (torch.full((500,), value, dtype=torch.int16).view(torch.bfloat16) for value in bits)
        assert sums_both_ways(one) != sums_both_ways(two)
        single = one.clone()
        single[499] = two[0]
        assert fingerprint.tensor_hash(single) != fingerprint.tensor_hash(one)
        coded, _ = delta.encode(two, one)
        assert coded.changed == 500
        assert same(one, two)


def case_what_order_blind_sums_miss_is_seen() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        whole = random_bits(dtype, 64, 1024)
        swapped = torch.cat([whole[32:], whole[:32]])  # gate and up, whole blocks of the hash
        rolled = whole.view(-1).roll(1).view(64, 1024)
        reversed_ = whole.view(-1).flip(0).view(64, 1024)
        found = {sums_both_ways(tensor) for tensor in (whole, swapped, rolled, reversed_, whole.t())}
        assert len(found) == 5
    layers = {f"layers.{index}.weight": random_bits(torch.bfloat16, 40, 40) for index in range(4)}
    shifted = {f"layers.{(index + 1) % 4}.weight": value for index, value in enumerate(layers.values())}
    assert len(fingerprint.differing(fingerprint.tensors(layers.items()), fingerprint.tensors(shifted.items()))) == 4
    flips = random_bits(torch.uint8, 20000)
    before = sums_both_ways(flips)
    for place in (0, 3, 4, 16383, 16384, 19999):
        for bit in (1, 128):
            flips[place] ^= bit
            assert all(a != b for a, b in zip(sums_both_ways(flips), before, strict=True)), (place, bit)
            flips[place] ^= bit


def case_a_tensor_hashes_like_the_stream_of_its_bytes() -> None:
    tensor = random_bits(torch.float32, 12345)
    for context in (nullcontext, without_c):
        for step in (1000, 16384, 99999):
            with context():
                stream = fingerprint.Stream()
                for start in range(0, len(raw(tensor)), step):
                    stream.update(raw(tensor)[start : start + step])
                assert stream.finish() == fingerprint.sums([tensor])[0] == reference.sums(raw(tensor))


def case_fingerprints_keep_names_order_and_refuse_duplicates() -> None:
    named = [(name, random_bits(torch.float32, 10)) for name in ("b", "a", "c")]
    assert list(fingerprint.tensors(iter(named))) == ["b", "a", "c"]
    assert "'a' occurs twice" in refused(fingerprint.tensors, [*named, named[1]])
    flat = torch.zeros(6)
    hashes = {fingerprint.tensor_hash(value) for value in (flat, flat.view(2, 3), flat.view(3, 2), flat.to(torch.int32), torch.zeros(7))}
    assert len(hashes) == 5, "dtype and shape count, also where the bits do not differ"


def case_a_tensor_without_its_memory_is_refused() -> None:
    """By every front, before an address is used: each of these was a segmentation fault."""
    freed, good = torch.randn(100, 100), torch.zeros(100, 100)
    part, turned, coded = freed[50:], freed.t(), delta.encode(torch.ones(100, 100), good.clone())[0]
    freed.untyped_storage().resize_(0)
    assert part.data_ptr(), "the address of nothing, with the offset added"
    short = torch.randn(100, 100)
    short.untyped_storage().resize_(39_999)
    for tensor in (freed, part, short, torch.empty(100, 100, device="meta"), turned, torch.nn.Parameter(part)):
        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            *((call, (tensor,)) for call in (fingerprint.tensor_hash, plain.flat, payload.to_bytes)),
            (fingerprint.tensors, ({"x": tensor}.items(),)),
            *((delta.encode, pair) for pair in ((tensor, good), (good, tensor))),
            *((call, (tensor, coded, "difference")) for call in (delta.apply, delta.revert)),
            (Producer, ({"x": tensor},)),
            (Producer({"x": good}).prepare, ({"x": tensor}, "full")),
            (lambda held: Consumer(held).state(), ({"x": tensor},)),
        ]
        for context in (nullcontext, without_c):
            for call, given in calls:
                with context():
                    said = refused(call, *given, kind=TypeError)
                assert "has no memory of its own" in said
                assert f"{type(tensor).__qualname__} of torch.float32" in said
                assert "gather it with full_tensor() first" in said
    emptied = torch.empty(0, 5)
    emptied.untyped_storage().resize_(0)
    assert sums_both_ways(emptied) == (0, 0), "nothing needs no memory"


def case_a_sharded_tensor_is_hashed_once_it_is_gathered() -> None:
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        whole = torch.randn(64, 64)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert "DTensor of torch.float32(64, 64)" in refused(fingerprint.tensor_hash, sharded, kind=TypeError)
        assert fingerprint.tensor_hash(sharded.full_tensor()) == fingerprint.tensor_hash(whole)
    finally:
        distributed.destroy_process_group()


def case_the_tree_names_the_tensor() -> None:
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.experts.1.w", "model.layers.0.q", "model.layers.10.q", "lm_head.weight", "s")
    held = {name: random_bits(torch.bfloat16, 20) for name in names}
    one = fingerprint.tree(fingerprint.tensors(held.items()))
    assert set(one.layers) == {"model.embed_tokens", "model.layers.0", "model.layers.10", "lm_head", "s"}
    again = fingerprint.tree(fingerprint.tensors(reversed(held.items())))
    assert (again.root, again.differing(one)) == (one.root, [])
    held["model.layers.0.q"][3] *= -1
    two = fingerprint.tree(fingerprint.tensors(held.items()))
    assert two.root != one.root
    assert one.differing(two) == ["model.layers.0.q"]
    del held["lm_head.weight"]
    assert one.differing(fingerprint.tree(fingerprint.tensors(held.items()))) == ["model.layers.0.q", "lm_head.weight"]
