"""Fingerprints over exact bits: of byte streams, tensors, models, optimizer states and random number generators.

Runs inside a loop's interpreter: standard library and, lazily, torch. The hash is two 64-bit sums per tensor, the same for every
device, layout, chunking and implementation. Specification (constants in `plain`):

- Input: the raw little-endian bytes of the contiguous tensor, padded with zeros to a multiple of 16384. Words w are u32, 4096 of
  them in block b = 0, 1, …; K is the key table.
- A_j(b) = Σ over even i of ((w[i] + K[i+4j]) mod 2^32) * ((w[i+1] + K[i+1+4j]) mod 2^32)  mod 2^64, for j = 0, 1.
- S_j = Σ_b fmix64(A_j(b) + (b+1) * GAMMA_j)  mod 2^64, with murmur3's fmix64. No input: (0, 0).

Inputs that differ by zeros at their end have equal sums: compare lengths as well. A fingerprint covers dtype, shape and every bit of
each name, so NaN payloads and -0.0 count.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seatrial.instruments.bits import gpu, native, plain
from seatrial.instruments.bits.plain import BLOCK_BYTES, Sums

PIECE = 16 * BLOCK_BYTES  # how much of a stream is hashed at once: small enough for a core's cache


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
            found[index] = (plain if native.library() is None else native).add_sums(data, 0, (0, 0))
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


BATCH_BYTES = 1 << 30


def tensor_hash(tensor: Any) -> str:
    """The hash of one tensor: dtype, shape, bits."""
    return from_sums(tensor, sums([tensor])[0])


def from_sums(tensor: Any, sums: tuple[int, int]) -> str:
    """The same for a tensor whose sums are known, from encoding it."""
    state = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    for value in sums:
        state.update(value.to_bytes(8, "little"))
    return state.hexdigest()


def tensors(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Hash every named tensor, in the given order. The same name twice is an error: one of them would be lost.

    Those on a GPU are hashed together, a gigabyte at a time: an iterable may make its tensors as it goes, but must not reuse their
    memory. Those on a CPU are hashed one by one.
    """
    result: dict[str, str] = {}
    waiting: dict[str, Any] = {}

    def hash_waiting() -> None:
        found = sums(list(waiting.values()))
        result.update({name: from_sums(tensor, sums) for (name, tensor), sums in zip(waiting.items(), found, strict=True)})
        waiting.clear()

    size = 0
    for name, tensor in named:
        if name in result:
            raise ValueError(f"fingerprint: the name {name!r} occurs twice")
        result[name] = ""  # keeps its place in the order
        waiting[name] = tensor
        size += tensor.numel() * tensor.element_size()
        if not tensor.is_cuda or size >= BATCH_BYTES:
            hash_waiting()
            size = 0
    hash_waiting()
    return result


def model(module: Any) -> dict[str, str]:
    """Hash all parameters and buffers of a module; tied ones appear under each of their names."""
    return tensors(named_state(module))


def named_state(module: Any) -> Iterator[tuple[str, Any]]:
    """Every parameter and buffer, tied ones under each name, non-persistent buffers included."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def state(value: Any, name: str = "") -> dict[str, str]:
    """Hash a nested state (an optimizer's or scheduler's state_dict): tensors by bits, everything else by repr."""
    if isinstance(value, Mapping):
        parts = [state(child, f"{name}.{key}" if name else str(key)) for key, child in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [state(child, f"{name}[{index}]") for index, child in enumerate(value)]
    elif hasattr(value, "detach"):
        return {name: tensor_hash(value)}
    else:
        # An array's repr is abbreviated, so its bytes are taken.
        data = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
        return {name: hashlib.blake2b(data, digest_size=16).hexdigest()}
    return {key: item for part in parts for key, item in part.items()}


def generators() -> dict[str, str]:
    """Hash the states of the random number generators of this process: Python, NumPy, torch (CPU and CUDA)."""
    import numpy
    import torch

    result = {
        "python": digest(state(random.getstate())),
        "numpy": digest(state(numpy.random.get_state())),
        "torch": tensor_hash(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        for index, value in enumerate(torch.cuda.get_rng_state_all()):
            result[f"cuda{index}"] = tensor_hash(value)
    return result


def digest(hashes: Mapping[str, str]) -> str:
    """One hash over all names and hashes, in order."""
    folded = hashlib.blake2b(digest_size=16)
    for name, value in hashes.items():
        folded.update(f"{name}\0{value}\n".encode())
    return folded.hexdigest()


def differing(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    """Names whose hashes differ or that only one side has, in the order of the left side."""
    names = [name for name, value in left.items() if right.get(name) != value]
    return names + [name for name in right if name not in left]


@dataclass(frozen=True)
class HashTree:
    """The hashes of tensors, folded into their layers and these into the model. A mismatch of the root names the tensor."""

    root: str
    layers: dict[str, str]
    tensors: dict[str, str]

    def differing(self, other: HashTree) -> list[str]:
        """Names of tensors that differ or that only one side has; only layers that differ are looked into."""
        apart = set(differing(self.layers, other.layers))
        left, right = ({name: value for name, value in tree.tensors.items() if layer(name) in apart} for tree in (self, other))
        return differing(left, right)


def layer(name: str) -> str:
    """The layer of a tensor: its name up to the outermost number, or else without its last part."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1] or parts)


def tree(hashes: Mapping[str, str]) -> HashTree:
    """Fold the hashes by layer. Names may come in any order: both sides of a refit list them in their own."""
    members: dict[str, dict[str, str]] = {}
    for name in sorted(hashes):
        members.setdefault(layer(name), {})[name] = hashes[name]
    layers = {name: digest(held) for name, held in members.items()}
    return HashTree(digest(layers), layers, dict(hashes))
