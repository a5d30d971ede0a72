"""Rungs parity, tp, pp, ep, cp and sp: logits and gradients are those of transformers, on one rank and on two.

- Tolerances are the judge's. Whether a model can be divided is said by its HF configuration, never by the provider under test. Both ranks
  first build the whole model; then the world is divided and the parallel model is built from the checkpoint.
- Equal logits say nothing about gradients, so Megatron and transformers each take one plain step down the gradient. What the Bridge
  exports then must be what transformers holds.
"""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.instruments.bridge import forward, training
from seatrial.instruments.bridge.rungs import ALONE, BridgeSession, Missing, NotApplicable, Rank, Sizes, tokens, unwrapped
from seatrial.instruments.bridge.rungs_loop import experts_of
from seatrial.instruments.bridge.training import Batch, listed

RATE = 100.0
"""Of the plain step: so large that rounding of the weights does not hide the gradient. Nothing is computed with them afterwards."""
NOISE = 16.0
"""How many times the noise of float32 (transformers against itself in float64) two gradients of a tensor may be apart; measured: 1.6."""
SHARE = 1e-4
"""Of the tensor's largest gradient, in addition, as norms and rotary angles of transformers are float32 even then."""
ROUNDING = 1e-7
"""Of the largest gradient of all, in addition: what is zero by its nature, as behind a softmax, is rounding in both."""


def compared(session: BridgeSession, given: Batch, place: Path, sizes: Sizes = ALONE) -> dict[str, Any]:
    """Fields of a fact: the gradients of each tensor, the worst first. Every rank calls it; `place` is a directory of its own."""
    import torch

    # Transformers keeps the gradient of the padding's embedding at zero: no token of the batch is padding.
    before = session.hf()
    padding = before.config.get_text_config().pad_token_id
    spared = torch.where(given.ids == (-1 if padding is None else padding), (given.ids + 1) % forward.vocabulary(session), given.ids)
    given = Batch(spared, given.advantages)
    exported, stored = session.export(_descended(session, given, sizes)), training.on_disk(session.directory)
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


def _descended(session: BridgeSession, given: Batch, sizes: Sizes) -> list[Any]:
    """A model after the step; Megatron's own schedule and its own end of a backward pass put the gradients of all ranks together."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads

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
    forward.scheduled(chunks, step, *ids.shape, forward_only=False)
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


def run_parity(rank: Rank) -> None:
    import torch
    from megatron.core.transformer.module import Float16Module

    session = rank.session()
    chunks = [chunk.eval() for chunk in session.build()]
    ids = tokens(forward.vocabulary(session))
    exact, plain = forward.reference(session, ids, "float64"), forward.reference(session, ids, "float32")
    made, routes = _routed(session, chunks, ids)
    everywhere = torch.ones(ids.shape, dtype=torch.bool)
    rank.write("parity", routers=len(routes), **_figures("float32", made, plain, exact, everywhere))

    half = rank.session("bfloat16")
    halved = [chunk.eval() for chunk in half.build(mixed_precision_wrapper=Float16Module)]
    made, halved_routes = _routed(half, halved, ids)
    untouched = _untouched(routes, halved_routes, everywhere)
    halved_hf = forward.reference(half, ids, "bfloat16")
    rank.write("parity", routers=len(halved_routes), **_figures("bfloat16", made, halved_hf, plain, untouched))

    exported, disk = session.export(chunks), training.on_disk(rank.directory)
    rank.write("located", **forward.first(session, chunks, ids, exported, disk))


def _figures(dtype: str, made: Any, plain: Any, reference: Any, untouched: Any) -> dict[str, Any]:
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


def _routed(session: BridgeSession, chunks: list[Any], ids: Any) -> tuple[Any, list[Any]]:
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


SIZES = {"tp": Sizes(tp=2), "pp": Sizes(pp=2), "ep": Sizes(ep=2), "cp": Sizes(cp=2), "sp": Sizes(tp=2, sp=True)}
ROWS, WIDTH = 4, 16
"""The width divides by twice the ranks, as context parallel needs it."""


def run_parallel(rank: Rank) -> None:
    import torch
    from megatron.core import parallel_state

    sizes, session = SIZES[rank.rung], rank.session()
    config = rank.config()
    _applies(config, sizes)
    provider = session.provider()
    ids = tokens(forward.vocabulary(session), ROWS, WIDTH)
    alone = [chunk.eval() for chunk in session.build(provider=provider)]
    with torch.no_grad():
        single = forward.logits(session, alone, ids)
    whole = _parameters(alone)
    parallel_state.destroy_model_parallel()

    chunks = [chunk.eval() for chunk in _built(session, sizes)]
    with torch.no_grad():
        made = forward.logits(session, chunks, ids)
    plain, exact = forward.reference(session, ids, "float32"), forward.reference(session, ids, "float64")
    stored, exported = training.on_disk(rank.directory), session.export(chunks)
    mine = {
        "rank": rank.rank,
        "parameters": _parameters(chunks),
        "export": training.compare_checkpoints(exported, stored, session.torch_dtype(), training.tied(rank.config())),
        "single": forward.distance(made, single),
        "transformers": forward.distance(made, plain),
        "located": forward.first(session, chunks, ids, exported, stored),
    }
    experts = experts_of(config)
    if trains(vars(sizes), experts):
        mine["gradients"] = compared(session, training.batch(session), rank.out / f"descended-{rank.rank}", sizes)
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


def _built(session: BridgeSession, sizes: Sizes) -> list[Any]:
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
    from megatron.core import parallel_state

    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "sp": bool(chunks[0].config.sequence_parallel),
    }
