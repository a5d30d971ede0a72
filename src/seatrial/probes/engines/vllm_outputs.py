"""Whether modules of a vLLM model compute with the weights that their parameters hold. Runs inside the worker.

A parameter that is read from memory proves nothing about a module that uses a copy of its own: kept from an earlier load, cached,
or captured. Embeddings and norms are read that way on every device. An embedding must give its rows bit for bit, and a norm of
ones is its weights, scaled. Linear layers and experts are read or compared in vllm_reader.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from seatrial.probes.refit.mapping import bits

ROWS = 8192
"""Rows that are looked up at a time."""
CLOSE = {"torch.float64": 1e-5, "torch.float32": 1e-5, "torch.float16": 1e-4, "torch.bfloat16": 1e-4}
"""How far a norm of ones may be from its weights, relative to each; half of the last bit of fp16 and bf16 is more."""


def disagreeing(model: Any, held: dict[str, Any]) -> dict[str, float]:
    """Runtime names with which a module does not compute: name -> deviation. `held`: the weights by runtime name."""
    import torch

    wrong: dict[str, float] = {}
    with torch.no_grad():
        for name, gap in _gaps(model, held):
            if gap is not None:
                wrong[name] = max(gap, wrong.get(name, 0.0))
    return wrong


def _gaps(model: Any, held: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    for name, layer in model.named_modules():
        weight = held.get(f"{name}.weight")
        if weight is None:
            continue
        # By name: what is derived from these may compute something else.
        if type(layer).__name__ == "VocabParallelEmbedding" and hasattr(layer.quant_method, "embedding"):
            yield f"{name}.weight", _embedding(layer, weight)
        elif type(layer).__name__ == "RMSNorm" and layer.has_weight and layer.variance_size_override is None:
            yield f"{name}.weight", _norm(layer, weight)


def _embedding(layer: Any, weight: Any) -> float | None:
    """The largest difference between what is looked up and what is held; None if there is none."""
    import torch

    for start in range(0, len(weight), ROWS):
        part = weight[start : start + ROWS]
        found = layer.quant_method.embedding(layer, torch.arange(start, start + len(part), device=weight.device))
        if found.shape != part.shape or found.dtype != part.dtype:
            return float("inf")
        if not torch.equal(bits(found), bits(part)):
            return float((found.float() - part.float()).abs().max())
    return None


def _norm(layer: Any, weight: Any) -> float | None:
    """The largest relative difference between the weights and a norm of ones, alone and with a residual; None if it is small."""
    import torch

    plain = weight.double() * (1 + layer.variance_epsilon) ** -0.5
    for residual in (None, torch.zeros(1, len(weight), dtype=weight.dtype, device=weight.device)):
        ones = torch.ones(1, len(weight), dtype=weight.dtype, device=weight.device)
        answer = layer(ones) if residual is None else layer(ones, residual)[0]
        gap = ((answer[0].double() - plain).abs() / plain.abs().clamp(min=1e-30)).max()
        if not gap <= CLOSE[str(weight.dtype)]:  # NaN is a disagreement
            return float(gap)
    return None
