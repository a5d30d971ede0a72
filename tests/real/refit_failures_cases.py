"""Every way a refit can fail ends in a refusal with every bit as it was; the next one arrives.

Runs inside a loop's environment (see inside.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from seatrial.instruments.bits import delta
from seatrial.instruments.refit import payload
from seatrial.instruments.refit.payload_header import TRANSPORTS
from seatrial.instruments.refit.weight_transfer import Consumer
from tests.real.refit_world import KINDS, World, broken, flat, raised, recovers, refused, weights


def cuts(data: bytes) -> Iterator[int]:
    """Lengths at and beside every boundary of a payload."""
    header = payload.read(data).header
    start = payload.PREAMBLE.size
    edges = {0, 8, 16, 24, 40, start, start + header.body, (start + header.body + len(data)) // 2, len(data)}
    edges |= {start + place + length for entry in header.tensors for place, length in entry.planes}
    return iter(sorted({edge + by for edge in edges for by in (-1, 0, 1) if 0 <= edge + by < len(data)}))


def case_truncated_at_every_boundary() -> None:
    for transport, kind in KINDS:
        world = World()
        world.refit("full")
        world.train()
        root = world.producer.root
        data = world.producer.prepare(world.policy, transport, kind)
        assert isinstance(data, bytes)
        before = world.snapshot()
        tried = 0
        for length in cuts(data):
            refused("truncated", world.consumer.apply, data[:length])
            tried += 1
        assert tried > 30
        refused("corrupt", world.consumer.apply, data + b"\0")
        world.check_unchanged(before)
        recovers(world, root)


def case_truncated_file(tmp: Path) -> None:
    world = World()
    root = world.producer.root
    path = world.producer.prepare(world.policy, "packed", path=tmp / "weights")
    assert isinstance(path, Path)
    whole = path.stat().st_size
    for length in (whole - 1, whole // 2, 10, 0):
        os.truncate(path, length)
        broken(world, "truncated", path)
    recovers(world, root)


def case_one_flipped_bit_anywhere() -> None:
    for transport in TRANSPORTS:
        world = World({"w": torch.randn(300).bfloat16(), "v": torch.randn(5)})
        world.refit("full")
        world.train(0.02)
        root = world.producer.root
        data = world.producer.prepare(world.policy, transport)
        assert isinstance(data, bytes)
        before = world.snapshot()
        for index in range(len(data)):
            flipped = bytearray(data)
            flipped[index] ^= 1 << index % 8
            refused("corrupt truncated", world.consumer.apply, flipped)
        world.check_unchanged(before)
        recovers(world, root)


def case_replay() -> None:
    for transport, kind in KINDS:
        world = World()
        world.refit("full")
        world.train()
        data = world.producer.prepare(world.policy, transport, kind)
        world.producer.commit(world.consumer.apply(data).root, 2)
        broken(world, "replay", data)
        world.train()
        world.refit("sparse")
        broken(world, "replay", data)
        world.check_equal()


def case_version_gap() -> None:
    for kind in ("difference", "overwrite"):
        world = World()
        world.refit("full")
        world.train()
        lost = world.producer.prepare(world.policy, "sparse", kind)
        other = Consumer({name: tensor.clone() for name, tensor in world.live.items()}, 1)
        world.producer.commit(other.apply(lost).root, 2)
        world.train()
        root = world.producer.root
        error = broken(world, "gap", world.producer.prepare(world.policy, "sparse", kind))
        assert "version 3 builds on version 2, version 1 is held" in str(error)
        recovers(world, root)


def case_wrong_base() -> None:
    for kind in ("difference", "overwrite"):
        for spoil in ("one bit", "swapped layers"):
            world = World()
            world.refit("full")
            world.train()
            root = world.producer.root
            data = world.producer.prepare(world.policy, "sparse", kind)
            if spoil == "one bit":
                flat(world.live["single"])[5] ^= 1
                names = ["single"]
            else:
                names = ["model.layers.0.weight", "model.layers.1.weight"]
                one, two = (world.live[f"model.layers.{index}.weight"] for index in (0, 1))
                kept = one.clone()
                one.copy_(two)
                two.copy_(kept)
            error = broken(world, "wrong-base", data)
            assert sorted(error.names) == names
            assert f"builds on root {root}" in str(error)
            recovers(world, root)


class Fragile(Consumer):
    """Fails at one of its writes: before it, or in the middle of a tensor."""

    def __init__(self, given: Any, version: int, fails_at: int, torn: bool, error: BaseException) -> None:
        super().__init__(given, version)
        self.left, self.torn, self.error = fails_at, torn, error

    def _write(self, target: Any, entry: Any, given: Any, ready: Any) -> None:
        self.left -= 1
        if self.left < 0:
            if self.torn:
                flat(target)[: flat(target).numel() // 2] ^= 85
            raise self.error
        super()._write(target, entry, given, ready)


def case_consumer_fails_in_the_middle() -> None:
    for transport, kind in KINDS:
        for fails_at in (0, 1, 3, 5):
            for torn, error in ((False, OSError("no space left")), (True, KeyboardInterrupt())):
                world = World()
                world.refit("full")
                world.train(0.05)
                data = world.producer.prepare(world.policy, transport, kind)
                before, root = world.snapshot(), world.producer.root
                fragile = Fragile(world.live, 1, fails_at, torn, error)
                assert raised(type(error), fragile.apply, data) is error
                world.check_unchanged(before)
                assert fragile.version == 1
                recovers(world, root)


class NoMemory:
    """Passes some calls on, then has no memory: before its work, or after it, when the base is up to date already."""

    def __init__(self, calls: int, late: bool) -> None:
        self.real, self.calls, self.late = delta.encode, calls, late

    def __call__(self, *given: Any) -> Any:
        self.calls -= 1
        made = self.real(*given) if self.calls >= 0 or self.late else None
        if self.calls < 0:
            raise MemoryError("undo")
        return made


def case_no_memory_for_the_undo_loses_nothing() -> None:
    for transport, kind in KINDS:
        for calls in (0, 1, 5):
            for late in (False, True):
                world = World()
                world.refit("full")
                world.train(0.05)
                data = world.producer.prepare(world.policy, transport, kind)
                before, root = world.snapshot(), world.producer.root
                with mock.patch.object(delta, "encode", NoMemory(calls, late)):
                    assert str(raised(MemoryError, world.consumer.apply, data)) == "undo"
                world.check_unchanged(before)
                assert world.consumer.version == 1
                recovers(world, root)


def case_planes_that_do_not_fit_are_refused() -> None:
    """A payload whose sums are right and whose content is not: a broken encoder, not a broken wire."""
    world = World({"w": torch.randn(5000).bfloat16()})
    world.refit("full")
    world.train(0.01)
    root = world.producer.root

    def shifted(coded: Any) -> list[memoryview]:
        return [memoryview(bytes(reversed(bytes(plane)))) for plane in real(coded)]

    real = payload.of_coded
    with mock.patch.object(payload, "of_coded", shifted):
        data = world.producer.prepare(world.policy, "sparse")
    broken(world, "corrupt mismatch", data)
    recovers(world, root)


def misfits(planes_: list[memoryview]) -> Iterator[tuple[str, list[bytes]]]:
    """What may be wrong with the planes of a sparse tensor of 5000 units, while its sums are right."""
    gaps, low, high = map(bytes, planes_)
    yield "a gap is missing", [gaps[1:], low, high]
    yield "a value is missing", [gaps, low[1:], high[1:]]
    yield "its values have two lengths", [gaps, low, high[1:]]
    yield "the gaps end within an entry", [gaps + b"\xff", low, high]
    yield "past the end", [b"\xff" * 20 + gaps, low, high]
    yield "nothing", [b"", b"", b""]
    yield "as many as a bitmap has", [b"\0" * 700, b"\0" * 700, b"\0" * 700]


def case_a_sparse_misfit_is_refused_before_anything_is_written() -> None:
    """Also if it is the last of several tensors."""
    real, tried = payload.of_coded, 0
    for number in range(7):
        for codec in ("none", "zlib", "zstd"):
            world = World({"v": torch.randn(3000).bfloat16(), "w": torch.randn(5000).bfloat16()}, codec=codec)
            world.refit("full")
            world.train(0.01)
            root = world.producer.root

            def wrong(coded: Any, number: int = number) -> list[memoryview]:
                made = real(coded)
                return made if coded.nbytes != 10_000 else [memoryview(plane) for plane in [*misfits(made)][number][1]]

            with mock.patch.object(payload, "of_coded", wrong):
                data = world.producer.prepare(world.policy, "sparse")
            with mock.patch.object(Consumer, "_write", side_effect=AssertionError("written")):
                assert broken(world, "corrupt", data).names == ("w",), number
            recovers(world, root)
            tried += 1
    assert tried == 21


def case_hashes_of_the_base_must_fold_into_its_root() -> None:
    world = World()
    world.refit("full")
    world.train()
    root, real = world.producer.root, world.producer.hashes
    world.producer.hashes = real | {"single": "0" * 32}
    with mock.patch.object(type(world.producer), "root", root):
        data = world.producer.prepare(world.policy, "sparse", "difference")
    world.producer.hashes = real
    assert "its base hashes do not fold into its base root" in str(broken(world, "corrupt", data))
    recovers(world, root)


def case_a_zstd_frame_is_what_it_says() -> None:
    import zstandard

    def read(content: bytes, size: int) -> bytes:
        return payload._decoder("zstd")(memoryview(content), size)

    whole = zstandard.ZstdCompressor(level=1).compress(b"abc" * 100)
    assert read(whole, 300) == b"abc" * 100
    for content, size in ((whole, 299), (whole, 301), (whole + b"\0", 300), (whole + whole, 300), (whole[:-1], 300), (b"", 300)):
        refused("corrupt", read, content, size)
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(b"abc" * 100)
    refused("corrupt", read, unsized, 300)


def case_a_write_that_does_nothing_is_a_mismatch() -> None:
    for transport, kind in KINDS:
        world = World()
        world.refit("full")
        world.train()
        root = world.producer.root
        data = world.producer.prepare(world.policy, transport, kind)
        with mock.patch.object(Consumer, "_write", return_value=None):
            error = broken(world, "mismatch", data)
        assert "model.layers.0.weight" in error.names
        assert "mask" not in error.names, "it did not change"
        recovers(world, root)


def case_commit_needs_the_generators_own_root() -> None:
    for transport, kind in KINDS:
        world = World()
        world.refit("full")
        world.train()
        root = world.producer.root
        data = world.producer.prepare(world.policy, transport, kind)
        applied = world.consumer.apply(data)
        flat(world.live["single"])[0] ^= 1
        refused("mismatch", world.producer.commit, world.consumer.state()["root"], applied.version)
        assert (world.producer.version, world.producer.prepared) == (1, None)
        assert world.producer.root == root
        recovers(world, root)
        data = world.producer.prepare(world.policy, transport, kind)
        refused("mismatch", world.producer.commit, world.consumer.apply(data).root, 17)
        recovers(world, world.producer.root)


class FullDisk:
    """Passes some calls on, then has no space left."""

    def __init__(self, real: Callable[..., Any], calls: int) -> None:
        self.real, self.calls = real, calls

    def __call__(self, *given: Any) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise OSError(28, "No space left on device")
        return self.real(*given)


def case_failed_write_restores_the_baseline(tmp: Path) -> None:
    for transport, kind in KINDS:
        for calls in (0, 1, 5):
            world = World()
            world.refit("full")
            world.train()
            root = world.producer.root
            # Small groups, so that some tensors are done when the disk is full.
            with (
                mock.patch("seatrial.instruments.refit.weight_transfer.BUCKET", 100),
                mock.patch.object(delta, "encode_many", FullDisk(delta.encode_many, calls)),
            ):
                error = raised(OSError, world.producer.prepare, world.policy, transport, kind, tmp / "weights")
            assert error.errno == 28
            assert not list(tmp.iterdir()), "no file, and no part of one"
            recovers(world, root)


class Suicidal(Consumer):
    """Gone in the middle of a load, by the kernel's strongest signal."""

    def _write(self, target: Any, entry: Any, given: Any, ready: Any) -> None:
        if entry.name == "single":
            os.kill(os.getpid(), signal.SIGKILL)
        super()._write(target, entry, given, ready)


def case_dead_consumer(tmp: Path) -> None:
    for transport, kind in KINDS:
        world = World()
        world.refit("full")
        world.train()
        root = world.producer.root
        data = world.producer.prepare(world.policy, transport, kind, tmp / "weights")
        child = os.fork()
        if not child:
            Suicidal(world.live, 1).apply(data)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert world.producer.version == 1
        world.live = weights(seed=5)
        world.consumer = Consumer(world.live)
        recovers(world, root)
        assert world.consumer.version == 4, "a new generator begins at 0; version 2 died with the old one"
