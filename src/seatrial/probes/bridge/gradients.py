"""Gradients of Megatron against those of transformers, tensor by tensor, for a model that may be spread over ranks.

Equal logits say nothing about gradients: a parameter that is frozen or detached, or whose gradient ranks forget to add up, computes as
ever. So one plain step down the gradient is taken by Megatron and by transformers. What the Bridge exports then is what transformers holds.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from seatrial.probes.bridge import forward, training, weights
from seatrial.probes.bridge.session import ALONE, Session, Sizes, unwrapped
from seatrial.probes.bridge.training import Batch
from seatrial.probes.bridge.weights import listed

RATE = 100.0
"""Of the plain step: so large that rounding of the weights does not hide the gradient. Nothing is computed with them afterwards."""
NOISE = 16.0
"""How many times the noise of float32 (transformers against itself in float64) two gradients of a tensor may be apart; measured: 1.6."""
SHARE = 1e-4
"""Of the tensor's largest gradient, in addition, as norms and rotary angles of transformers are float32 even then."""
ROUNDING = 1e-7
"""Of the largest gradient of all, in addition: what is zero by its nature, as behind a softmax, is rounding in both."""


def compared(session: Session, given: Batch, place: Path, sizes: Sizes = ALONE) -> dict[str, Any]:
    """Fields of a fact: the gradients of each tensor, the worst first. Every rank calls it; `place` is a directory of its own."""
    import torch

    # Transformers keeps the gradient of the padding's embedding at zero: no token of the batch is padding.
    before = session.hf()
    padding = before.config.get_text_config().pad_token_id
    spared = torch.where(given.ids == (-1 if padding is None else padding), (given.ids + 1) % forward.vocabulary(session), given.ids)
    given = Batch(spared, given.advantages)
    exported, stored = session.export(_descended(session, given, sizes)), weights.on_disk(session.directory)
    # Padding of the vocabulary that is kept is seen elsewhere.
    cut = {name: value[: len(stored[name])] if name in stored and value.dim() else value for name, value in exported.items()}
    made = training.in_transformers(session, cut, place)
    shutil.rmtree(place)
    after, exact = forward.plain_hf(session, "float32"), forward.plain_hf(session, "float64")
    for model in (after, exact):
        given.loss(model(given.ids.to(session.device), use_cache=False).logits).backward()
        _down(model, "grad")
    start, found, wanted, best = (
        {name: value.detach() for name, value in each.named_parameters()} for each in (before, made, after, exact)
    )
    rows = []
    for name, value in wanted.items():
        size, noise = training.distance(value, start[name]) / RATE, training.distance(value, best[name]) / RATE
        rows.append({"name": name, "apart": training.distance(found[name], value) / RATE, "size": size, "noise": noise})
    largest = max(row["size"] for row in rows)
    rows.sort(key=lambda row: row["apart"] / (allowed(row["size"], row["noise"], largest) or 1.0), reverse=True)
    return {"tensors": len(rows), "largest": largest, "worst": listed(rows)}


def allowed(size: float, noise: float, largest: float) -> float:
    """How far apart two gradients of a tensor may be: by its largest one, its noise, and the largest one of all tensors."""
    return NOISE * noise + SHARE * size + ROUNDING * largest


def _descended(session: Session, given: Batch, sizes: Sizes) -> list[Any]:
    """A model after the step; Megatron's own schedule and its own end of a backward pass put the gradients of all ranks together."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    provider = session.provider(sizes, **training.UNBALANCED)
    wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunks = session.build(sizes, provider=provider, wrap_with_ddp=True, ddp_config=wrapping)
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    ids = given.ids.to(session.device)
    positions = torch.arange(ids.shape[1], device=session.device).expand(ids.shape)

    def step(_data: Any, chunk: Any) -> tuple[Any, Any]:
        return chunk(ids, positions, None, runtime_gather_output=True), lambda made: (
            given.loss(made[..., : forward.vocabulary(session)]),
            {},
        )

    for chunk in chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[None] * len(chunks),
        model=chunks,
        num_microbatches=1,
        seq_length=ids.shape[1],
        micro_batch_size=ids.shape[0],
        forward_only=False,
    )
    for chunk in chunks:
        _down(unwrapped(chunk), "main_grad")
    return chunks


def _down(model: Any, gradient: str) -> None:
    """One step down the gradient, without any optimizer; what has no gradient stays."""
    import torch

    with torch.no_grad():
        for value in model.parameters():
            found = getattr(value, gradient, None)
            if found is not None:
                value.sub_(RATE * found)
