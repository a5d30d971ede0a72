"""The hash of exact bits: two 64-bit sums per tensor, the same from every device, dtype, layout, chunking and implementation.

Specification (constants in `keys`):
- Input: the raw little-endian bytes of the contiguous tensor, padded with zeros to a multiple of 16384. Words w are u32, 4096 of
  them in block b = 0, 1, …; K is the key table.
- A_j(b) = Σ over even i of ((w[i] + K[i+4j]) mod 2^32) * ((w[i+1] + K[i+1+4j]) mod 2^32)  mod 2^64, for j = 0, 1.
- S_j = Σ_b fmix64(A_j(b) + (b+1) * GAMMA_j)  mod 2^64, with murmur3's fmix64. No input: (0, 0).

The padding makes inputs equal that differ by zeros at their end: whoever compares sums compares lengths too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seatrial.probes.bits import cpu, gpu, native, plain
from seatrial.probes.bits.keys import BLOCK_BYTES, Sums

PIECE = 16 * BLOCK_BYTES
"""How much of a stream is hashed at once: small enough for a core's cache."""


def sums(tensors: Sequence[Any]) -> list[Sums]:
    """The sums of each tensor. Those on one CUDA device are one call there."""
    found: dict[int, Sums] = {}
    on_gpu: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        plain.check_memory(tensor)
        if tensor.is_cuda:
            on_gpu.setdefault(tensor.device.index, []).append(index)
        else:
            data = plain.flat(tensor.cpu())
            found[index] = (plain if native.library() is None else cpu).add_sums(data, 0, (0, 0))
    for chosen in on_gpu.values():
        found.update(zip(chosen, gpu.sums([tensors[index] for index in chosen]), strict=True))
    return [found[index] for index in range(len(tensors))]


class Stream:
    """The sums of bytes that come in pieces. Needs no torch where there is a C compiler."""

    def __init__(self) -> None:
        self._sums: Sums = (0, 0)
        self._blocks = 0
        self._rest = bytearray()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes."""
        view = memoryview(data).cast("B")
        if self._rest:
            missing = BLOCK_BYTES - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) < BLOCK_BYTES:
                return
            self._add(bytes(self._rest))
            self._rest.clear()
        whole = len(view) - len(view) % BLOCK_BYTES
        for start in range(0, whole, PIECE):
            self._add(bytes(view[start : min(start + PIECE, whole)]))
        self._rest += view[whole:]

    def finish(self) -> Sums:
        """The sums of everything so far; more may follow."""
        return self._added(bytes(self._rest)) if self._rest else self._sums

    def _add(self, blocks: bytes) -> None:
        self._sums = self._added(blocks)
        self._blocks += len(blocks) // BLOCK_BYTES

    def _added(self, data: bytes) -> Sums:
        library = native.library()
        if library is not None:
            return library.add_sums(data, len(data), self._blocks, self._sums)
        import torch

        return plain.add_sums(torch.frombuffer(bytearray(data), dtype=torch.uint8), self._blocks, self._sums)
