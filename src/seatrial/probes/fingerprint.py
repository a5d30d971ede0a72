"""Fingerprints over exact bits: of tensors, models, optimizer states and random number generators.

Runs inside a loop's interpreter: standard library and, lazily, torch. Contract:
- one hash per name over dtype, shape and every bit, so that NaN payloads and -0.0 count;
- independent of device, memory layout and chunking;
- `digest` folds a mapping into one value that depends on every name and on their order.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

CHUNK = 1 << 24


def tensor_hash(tensor: Any) -> str:
    """The hash of one tensor: dtype, shape, bits."""
    import torch

    whole = tensor.detach().to("cpu").contiguous()
    state = hashlib.blake2b(f"{whole.dtype}{tuple(whole.shape)}".encode(), digest_size=16)
    if whole.numel():
        data = memoryview(whole.reshape(-1).view(torch.uint8).numpy())
        for start in range(0, len(data), CHUNK):
            state.update(data[start : start + CHUNK])
    return state.hexdigest()


def tensors(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Hash every named tensor, in the given order. The same name twice is an error: one of them would be lost."""
    result: dict[str, str] = {}
    for name, tensor in named:
        if name in result:
            raise ValueError(f"fingerprint: the name {name!r} occurs twice")
        result[name] = tensor_hash(tensor)
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
