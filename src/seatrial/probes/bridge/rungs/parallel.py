"""Rungs tp, pp, ep, cp and sp: a model on two ranks imports, exports and computes what the same model on one rank does.

Whether a model can be divided so, its HF configuration says, never the provider under test. Both ranks first build the whole model, each
alone, for the logits of a single rank; then the world is divided again and the parallel model is built from the checkpoint. That it
really is divided is a fact too: parameters per rank, and the sizes that Megatron reports.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.probes.bridge import forward, gradients, locate, training, weights
from seatrial.probes.bridge.rank import Missing, NotApplicable, Rank
from seatrial.probes.bridge.rungs.loop import experts_of
from seatrial.probes.bridge.rungs.parity import evaluated
from seatrial.probes.bridge.session import Session, Sizes, tokens

SIZES = {"tp": Sizes(tp=2), "pp": Sizes(pp=2), "ep": Sizes(ep=2), "cp": Sizes(cp=2), "sp": Sizes(tp=2, sp=True)}
ROWS, WIDTH = 4, 16
"""The width divides by twice the ranks, as context parallel needs it."""


def run(rank: Rank) -> None:
    """One rank alone, then two."""
    import torch
    from megatron.core import parallel_state

    sizes, session = SIZES[rank.rung], rank.session()
    config = rank.config()
    _applies(config, sizes)
    provider = session.provider()
    ids = tokens(forward.vocabulary(session), ROWS, WIDTH)
    alone = evaluated(session.build(provider=provider))
    with torch.no_grad():
        single = forward.logits(session, alone, ids)
    whole = _parameters(alone)
    parallel_state.destroy_model_parallel()

    chunks = evaluated(_built(session, sizes))
    with torch.no_grad():
        made = forward.logits(session, chunks, ids)
    plain, exact = forward.reference(session, ids, "float32"), forward.reference(session, ids, "float64")
    stored, exported = weights.on_disk(rank.directory), session.export(chunks)
    mine = {
        "rank": rank.rank,
        "parameters": _parameters(chunks),
        "export": weights.compare(exported, stored, session.torch_dtype(), weights.tied(rank.config())),
        "single": forward.distance(made, single),
        "transformers": forward.distance(made, plain),
        "located": locate.first(session, chunks, ids, exported, stored),
    }
    experts = experts_of(config)
    if trains(vars(sizes), experts):
        mine["gradients"] = gradients.compared(session, training.batch(session), rank.out / f"descended-{rank.rank}", sizes)
    everyone: list[Any] = [None] * rank.world
    torch.distributed.all_gather_object(everyone, mine)
    hf = forward.distance(plain, exact)
    rank.write(
        "parallel",
        experts=experts,
        asked=vars(sizes),
        sizes=_sizes(chunks),
        whole=whole,
        ranks=everyone,
        hf_error=hf,
        shape=list(made.shape),
    )


def trains(sizes: Mapping[str, Any], experts: int) -> bool:
    """Whether gradients are compared: not of pieces of a sequence; and Megatron trains no experts with tensor parallel alone."""
    return sizes.get("cp") == 1 and not (experts and sizes.get("tp") == 2 and not sizes.get("sp"))


def _applies(config: Any, sizes: Sizes) -> None:
    """Whether the model of this HF configuration can be divided so; Megatron itself refuses what is named here."""
    heads, layers, experts = config.num_attention_heads, config.num_hidden_layers, experts_of(config)
    groups = getattr(config, "num_key_value_heads", None) or heads
    if sizes.tp > 1 and heads % sizes.tp:
        raise NotApplicable(f"{heads} attention heads cannot be divided among {sizes.tp} ranks")
    if sizes.tp > 1 and groups % sizes.tp:
        raise NotApplicable(f"{groups} key/value heads cannot be divided among {sizes.tp} ranks")
    if sizes.pp > 1 and layers % sizes.pp:
        raise NotApplicable(f"{layers} layers cannot be divided among {sizes.pp} stages")
    if sizes.ep > 1 and not experts:
        raise NotApplicable("the model has no experts")
    if sizes.ep > 1 and experts % sizes.ep:
        raise NotApplicable(f"{experts} experts cannot be divided among {sizes.ep} ranks")


def _built(session: Session, sizes: Sizes) -> list[Any]:
    """The parallel model. Megatron's local attention refuses context parallel: then what it wants instead is what is missing."""
    try:
        return session.build(sizes)
    except (AssertionError, ImportError) as error:
        text = str(error)
        if "TEDotProductAttention" not in text and "Transformer Engine" not in text:
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        file = "/".join(Path(place.filename).parts[-4:])
        raise Missing(f"Transformer Engine: {file}:{place.lineno}: {text}") from error


def _parameters(chunks: list[Any]) -> int:
    return sum(value.numel() for chunk in chunks for value in chunk.parameters())


def _sizes(chunks: list[Any]) -> dict[str, Any]:
    """How Megatron itself says that the world is divided."""
    from megatron.core import parallel_state

    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "sp": bool(chunks[0].config.sequence_parallel),
    }
