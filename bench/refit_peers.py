"""The delta codecs of others, re-implemented on a CPU from what is known of them; `refit_cpu.py` measures them beside ours.

Each has `encode(currents, policy) -> payload`, after which the policy's baseline holds the currents, `decode(generator, payload)` and
`size(payload)` in bytes. All keep to what their original does per tensor; what only a GPU or a network adds is left out.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import torch

INTS = {2: torch.int16, 4: torch.int32}


class Codec:
    """Both sides of a codec are copies of the weights, unless it says otherwise; making them is not timed."""

    def policy(self, bases: Sequence[Any]) -> Any:
        return [base.clone() for base in bases]

    def generator(self, bases: Sequence[Any]) -> Any:
        return [base.clone() for base in bases]

    def held(self, side: Any) -> Sequence[Any]:
        """The tensors that a side holds."""
        found: Sequence[Any] = side
        return found


class SparseIndices(Codec):
    """NeMo-RL, the revision that its e2e skill describes: an additive difference in bf16, int32 indices of a whole group."""

    name = "R1 sparse_indices (additive)"

    def encode(self, currents: Sequence[Any], bases: Sequence[Any]) -> Any:
        delta = torch.cat([base.view(-1) for base in bases])  # the span of the baseline that is brought beside the weights
        starts = torch.tensor([0, *(current.numel() for current in currents)]).cumsum(0)
        for current, part in zip(currents, delta.split([current.numel() for current in currents]), strict=True):
            torch.sub(current.view(-1), part, out=part)
        places = delta.nonzero().view(-1)
        values = delta[places]
        owner = torch.bucketize(places, starts[1:], right=True)
        local = (places - starts[owner]).to(torch.int32)
        counts = torch.bincount(owner, minlength=len(currents)).tolist()
        for current, base in zip(currents, bases, strict=True):
            base.copy_(current)
        return list(zip(local.split(counts), values.split(counts), strict=True))

    def decode(self, targets: Sequence[Any], payload: Any) -> None:
        for target, (places, values) in zip(targets, payload, strict=True):
            scratch = torch.zeros(target.numel(), dtype=target.dtype)
            scratch.index_copy_(0, places.to(torch.int64), values)
            target.view(-1).add_(scratch)

    def size(self, payload: Any) -> int:
        return sum(places.nbytes + values.nbytes for places, values in payload)


class Head(Codec):
    """NeMo-RL at HEAD: XOR of the bits, gaps of u16 or u32, torch.save, zstd-1, blake2b; the baseline is refreshed from the entries."""

    name = "R2 NeMo-RL HEAD (XOR)"

    def __init__(self, zstandard: Any) -> None:
        self.zstandard = zstandard

    def entries(self, currents: Sequence[Any], bases: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Gaps and values of every tensor."""
        made = []
        for current, base in zip(currents, bases, strict=True):
            now, old = (tensor.view(-1).view(INTS[tensor.element_size()]) for tensor in (current, base))
            places = now.ne(old).nonzero().view(-1)
            values = now[places] ^ old[places]
            gaps = torch.diff(places, prepend=places.new_full((1,), -1))
            wide = torch.uint16 if not gaps.numel() or int(gaps.max()) < 1 << 16 else torch.uint32
            made.append((gaps.to(wide), values))
            old[places] = now[places]
        return made

    def encode(self, currents: Sequence[Any], bases: Sequence[Any]) -> Any:
        stream = io.BytesIO()
        torch.save(self.entries(currents, bases), stream)
        body = self.zstandard.ZstdCompressor(level=1).compress(stream.getvalue())
        return body, hashlib.blake2b(body, digest_size=16).digest()

    def decode(self, targets: Sequence[Any], payload: Any) -> None:
        body, digest = payload
        assert hashlib.blake2b(body, digest_size=16).digest() == digest
        entries = torch.load(io.BytesIO(self.zstandard.ZstdDecompressor().decompress(body)))
        kind = INTS[targets[0].element_size()]
        scratch = torch.empty(max(target.numel() for target in targets), dtype=kind)
        for target, (gaps, values) in zip(targets, entries, strict=True):
            held, part = target.view(-1).view(kind), scratch[: target.numel()].zero_()
            part[gaps.to(torch.int64).cumsum(0) - 1] = values
            mask = part.ne(0)
            held.masked_scatter_(mask, held.masked_select(mask) ^ part.masked_select(mask))

    def size(self, payload: Any) -> int:
        return len(payload[0]) + len(payload[1])


class Overwrite(Codec):
    """verl's delta_sharded: int32 positions and the new values; NaN stands for "not sent" on the other side."""

    name = "R3 verl delta_sharded"

    def encode(self, currents: Sequence[Any], bases: Sequence[Any]) -> Any:
        made = []
        for current, base in zip(currents, bases, strict=True):
            now, old = (tensor.view(-1).view(INTS[tensor.element_size()]) for tensor in (current, base))
            places = (now != old).nonzero().view(-1)
            made.append((places.to(torch.int32), current.view(-1)[places]))
            base.copy_(current)
        return made

    def decode(self, targets: Sequence[Any], payload: Any) -> None:
        for target, (places, values) in zip(targets, payload, strict=True):
            scratch = torch.full((target.numel(),), float("nan"), dtype=target.dtype)
            scratch.index_copy_(0, places.to(torch.int64), values)
            held = target.view(-1)
            held.copy_(torch.where(scratch.isnan(), held, scratch))

    def size(self, payload: Any) -> int:
        return sum(places.nbytes + values.nbytes for places, values in payload)
