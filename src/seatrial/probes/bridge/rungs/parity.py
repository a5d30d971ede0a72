"""Rung parity: the Megatron model gives transformers' logits, in float32 and in bfloat16; and where they part, if they do.

Tolerances are not here. What the judge calibrates them by is: how far transformers itself is, in the same precision on the same device,
from transformers in the next higher one. (Norms and rotary angles of transformers are float32 even in its float64 model.)
A router that must choose between nearly equal experts may choose another one in bfloat16; positions after such a choice are then
compared apart from those that no such choice reached.
"""

from __future__ import annotations

from typing import Any

from seatrial.probes.bridge import forward, locate, weights
from seatrial.probes.bridge.rank import Rank
from seatrial.probes.bridge.session import Session, tokens, unwrapped


def run(rank: Rank) -> None:
    """Both precisions; then the places in between."""
    import torch
    from megatron.core.transformer.module import Float16Module

    session = rank.session()
    chunks = evaluated(session.build())
    ids = tokens(forward.vocabulary(session))
    exact, plain = forward.reference(session, ids, "float64"), forward.reference(session, ids, "float32")
    made, routes = _routed(session, chunks, ids)
    everywhere = torch.ones(ids.shape, dtype=torch.bool)
    rank.write("parity", routers=len(routes), **_figures("float32", made, plain, exact, everywhere))

    half = rank.session("bfloat16")
    halved = evaluated(half.build(mixed_precision_wrapper=Float16Module))
    made, halved_routes = _routed(half, halved, ids)
    untouched = _untouched(routes, halved_routes, everywhere)
    halved_hf = forward.reference(half, ids, "bfloat16")
    rank.write("parity", routers=len(halved_routes), **_figures("bfloat16", made, halved_hf, plain, untouched))

    exported, disk = session.export(chunks), weights.on_disk(rank.directory)
    rank.write("located", **locate.first(session, chunks, ids, exported, disk))


def evaluated(chunks: list[Any]) -> list[Any]:
    """The chunks in evaluation mode."""
    return [chunk.eval() for chunk in chunks]


def _figures(dtype: str, made: Any, plain: Any, reference: Any, untouched: Any) -> dict[str, Any]:
    """Megatron against transformers, and both against transformers in higher precision."""
    kept = untouched.flatten()

    def of(value: Any) -> Any:
        return value.flatten(0, 1).cpu()[kept]

    return {
        "dtype": dtype,
        "shape": list(made.shape),
        "wanted_shape": list(reference.shape),
        "megatron": forward.distance(made, plain),
        "megatron_error": forward.distance(made, reference),
        "hf_error": forward.distance(plain, reference),
        "untouched": forward.distance(of(made), of(reference)) if bool(kept.any()) else None,
        "rerouted": int((~kept).sum()),
    }


def _routed(session: Session, chunks: list[Any], ids: Any) -> tuple[Any, list[Any]]:
    """Logits, and which experts each position went to, layer by layer; (row, position, expert)."""
    import torch

    routes: list[Any] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        routes.append(output[1].reshape(ids.shape[1], ids.shape[0], -1).transpose(0, 1).cpu())

    routers = [module for chunk in chunks for name, module in unwrapped(chunk).named_modules() if name.endswith(".mlp.router")]
    handles = [module.register_forward_hook(keep) for module in routers]
    try:
        with torch.no_grad():
            return forward.logits(session, chunks, ids), routes
    finally:
        for handle in handles:
            handle.remove()


def _untouched(one: list[Any], two: list[Any], everywhere: Any) -> Any:
    """Positions that go the same way in both precisions, and so does all that they attend to."""
    flipped = ~everywhere
    for left, right in zip(one, two, strict=True):
        flipped = flipped | (left != right).any(-1)
    return flipped.cumsum(-1) == 0
