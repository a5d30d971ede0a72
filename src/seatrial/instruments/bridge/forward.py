"""One forward pass of a model that may be spread over ranks, with whole logits on every rank; and where two passes part, and why.

- Tensor parallel: Megatron gathers the vocabulary, and its padding is cut off. Pipeline: Megatron's own schedule runs the stages.
  Context parallel: the sequence is cut as Megatron cuts it, and put together again. On a single rank the result can be differentiated.
- `first` names the first module of Megatron whose output is not that of its transformers counterpart: a table pairs modules, hooks keep
  their outputs, and the noise at each place is how far transformers in float32 is from transformers in float64 there.
- A module that differs although its inputs agree is explained by its parameters, their place, its function or a setting that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from seatrial.instruments.bridge.rungs import BridgeSession, unwrapped


def logits(session: BridgeSession, chunks: list[Any], tokens: Any) -> Any:
    """Logits (row, position, vocabulary) of token ids (row, position), in the precision that the model gives."""
    import torch
    from megatron.core import parallel_state

    whole = tokens.to(session.device)
    positions = torch.arange(whole.shape[1], device=session.device).expand(whole.shape)
    mine = _my_places(whole.shape[1])
    inputs, positions = whole[:, mine], positions[:, mine]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        made = _through_stages(session, chunks, inputs, positions)
    else:
        (chunk,) = chunks
        made = chunk(inputs, positions, None, runtime_gather_output=True)
    return _whole_sequence(made, mine)[..., : vocabulary(session)]


def logprobs(session: BridgeSession, chunks: list[Any], rows: Sequence[Sequence[int]], start: int) -> Any:
    """Log-probabilities (row, token) of the tokens from position `start` on, each given what stands before it."""
    import torch

    tokens = torch.tensor(rows, device=session.device)
    given = logits(session, chunks, tokens[:, :-1])[:, start - 1 :].float()
    return torch.log_softmax(given, -1).gather(-1, tokens[:, start:, None]).squeeze(-1)


def reference(session: BridgeSession, tokens: Any, dtype: str) -> Any:
    import torch

    model = plain_hf(session, dtype)
    with torch.no_grad():
        return model(input_ids=tokens.to(session.device), use_cache=False).logits


def plain_hf(session: BridgeSession, dtype: str) -> Any:
    """The transformers model without fused kernels."""
    model = session.hf(dtype)
    model.set_experts_implementation("eager")
    return model


def distance(made: Any, wanted: Any) -> dict[str, Any]:
    """How far logits are from others. `margin`: by how much the others prefer their next token where these choose another one."""
    made, wanted = made.detach().double().cpu(), wanted.detach().double().cpu()
    apart = (made - wanted).abs()
    chosen, best = made.argmax(-1), wanted.argmax(-1)
    lost = wanted.max(-1).values - wanted.gather(-1, chosen[..., None])[..., 0]
    cosine = (made * wanted).sum(-1) / (made.norm(dim=-1) * wanted.norm(dim=-1))
    return {
        "max": float(apart.max()),
        "mean": float(apart.mean()),
        "median": float(apart.max(-1).values.median()),
        "agree": float((chosen == best).double().mean()),
        "margin": float(lost.max()),
        "cosine": float(cosine.min()),
        "scale": float(wanted.abs().max()),
        "positions": chosen.numel(),
    }


def vocabulary(session: BridgeSession) -> int:
    """How many tokens the HF configuration names; a Megatron model may have more rows, as padding."""
    from transformers import AutoConfig

    found: int = AutoConfig.from_pretrained(session.directory, local_files_only=True).get_text_config().vocab_size
    return found


def _my_places(width: int) -> list[int]:
    """The positions that this context-parallel rank has: one piece from the front and its mirror from the back, so that work is even."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if width % (2 * size) and size > 1:
        raise ValueError(f"{width} positions do not divide into {2 * size} pieces: context parallel over {size} ranks needs that")
    if size == 1:
        return list(range(width))
    piece = width // (2 * size)
    return [place * piece + offset for place in (rank, 2 * size - 1 - rank) for offset in range(piece)]


def _whole_sequence(made: Any, mine: list[int]) -> Any:
    import torch
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return made
    group = parallel_state.get_context_parallel_group()
    places = [torch.empty(len(mine), dtype=torch.long, device=made.device) for _ in range(size)]
    torch.distributed.all_gather(places, torch.tensor(mine, device=made.device), group=group)
    pieces = [torch.empty_like(made) for _ in range(size)]
    torch.distributed.all_gather(pieces, made.contiguous(), group=group)
    return torch.cat(pieces, 1)[:, torch.cat(places).argsort()]


def scheduled(chunks: list[Any], step: Callable[..., Any], rows: int, width: int, **options: Any) -> Any:
    """Megatron's own schedule over the stages of a pipeline, for one batch."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    iterators = [None] * len(chunks)
    sizes = {"num_microbatches": 1, "seq_length": width, "micro_batch_size": rows}
    return get_forward_backward_func()(forward_step_func=step, data_iterator=iterators, model=chunks, **sizes, **options)


def _through_stages(session: BridgeSession, chunks: list[Any], inputs: Any, positions: Any) -> Any:
    """Megatron's forward-only schedule; every stage gets what the last one made."""
    import torch
    from megatron.core import parallel_state

    def collect(output: Any, non_loss_data: bool) -> Any:
        return output if non_loss_data else (output.sum(), {})

    def step(_data: Any, chunk: Any) -> tuple[Any, Any]:
        return chunk(inputs, positions, None, runtime_gather_output=True), collect

    width = inputs.shape[1] * parallel_state.get_context_parallel_world_size()
    made = scheduled(chunks, step, inputs.shape[0], width, forward_only=True, collect_non_loss_data=True)
    box: list[Any] = [made[0].detach().cpu() if parallel_state.is_pipeline_last_stage() else None]
    source = parallel_state.get_pipeline_model_parallel_last_rank()
    torch.distributed.broadcast_object_list(box, src=source, group=parallel_state.get_pipeline_model_parallel_group())
    return box[0].to(session.device)


EPSILONS = ("eps", "variance_epsilon", "epsilon")


def unequal(exported: dict[str, Any], disk: dict[str, Any], below: str = "") -> list[str]:
    """Tensors of the checkpoint that the export lacks or changes, and names that only the export has; whatever precision is on disk."""
    import torch

    names = [name for name in {**disk, **exported} if name.startswith(below)]
    both = [name for name in names if name in disk and name in exported]
    same = {name for name in both if torch.equal(disk[name].to(exported[name].dtype), exported[name])}
    return [name for name in names if name not in same]


def kind(module: Any, hf_name: str, what: str, exported: dict[str, Any], disk: dict[str, Any]) -> str:
    """What is wrong with the module of Megatron, as far as its own weight and the export can tell. The export alone proves no innocence:
    weights that were exchanged on import are exchanged back by it."""
    own = [name for name in disk if name.startswith(f"{hf_name}.")]
    if not own and hf_name.endswith("lm_head"):
        return "place of the parameters, or function: the head has none of its own, it is tied to the embedding"
    if not own or (what and "part" not in what and "layer" not in what):
        return "function: no parameters take part between what agrees and what does not"
    wrong = unequal(exported, disk, f"{hf_name}.")
    if wrong:
        return f"parameters: {', '.join(wrong[:3])}" + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    if _holds(module, disk.get(f"{hf_name}.weight")):
        return "function: the parameters are those of the checkpoint"
    return "place of the parameters, or function: the export gives them back as they were in the checkpoint"


def _holds(module: Any, stored: Any) -> bool:
    """Whether the module has this very weight; fused and divided ones have another shape, and nothing is said about them."""
    import torch

    mine: Any = getattr(module, "weight", None)
    if stored is None or mine is None or mine.shape != stored.shape:
        return False
    return bool(torch.equal(mine.detach().cpu(), stored.to(mine.dtype)))


def unequal_settings(ours: Any, hf: Any, megatron_name: str, hf_name: str, what: str) -> Iterator[str]:
    """Settings of the two modules that differ, in words."""
    mine, theirs = dict(ours.named_modules()).get(megatron_name), dict(hf.named_modules()).get(hf_name)
    one, two = _epsilon(mine), _epsilon(theirs)
    if one is not None and two is not None and one != two:
        yield f"epsilon is {one:g}, in transformers {two:g}"
    if "rotary" in what:
        yield from _rotary(ours, hf)
        attention = dict(hf.named_modules())[hf_name.rpartition(".")[0]]
        core = dict(ours.named_modules())[megatron_name.rpartition(".")[0]].core_attention
        one, two = getattr(core, "softmax_scale", None), getattr(attention, "scaling", None)
        if isinstance(one, float) and isinstance(two, float) and abs(one - two) > 1e-6 * abs(two):
            yield f"softmax scale is {one:g}, in transformers {two:g}"
    if what == "activation":
        block = dict(hf.named_modules())[hf_name.rpartition(".")[0]]
        yield from _activation(ours.config, getattr(block, "act_fn", None))


def _epsilon(module: Any) -> float | None:
    found = next((getattr(module, name) for name in EPSILONS if hasattr(module, name)), None)
    return found if isinstance(found, float) else None


def _rotary(ours: Any, hf: Any) -> Iterator[str]:
    """The frequencies that angles are made of; a base that is wrong shows in all but the first."""
    import torch

    mine = getattr(getattr(ours, "rotary_pos_emb", None), "inv_freq", None)
    theirs = next((module.inv_freq for module in hf.modules() if torch.is_tensor(getattr(module, "inv_freq", None))), None)
    if mine is None or theirs is None:
        return
    if mine.shape != theirs.shape:
        yield f"{mine.numel()} rotary frequencies, in transformers {theirs.numel()}"
    elif not torch.allclose(mine.cpu().float(), theirs.cpu().float(), rtol=1e-5, atol=0):
        yield f"the last rotary frequency is {float(mine[-1]):g}, in transformers {float(theirs[-1]):g}: base or scaling of the angles"


def _activation(config: Any, theirs: Any) -> Iterator[str]:
    import torch

    if theirs is None:
        return
    numbers = torch.linspace(-4, 4, 33)
    one, two = config.activation_func(numbers), theirs(numbers)
    if not torch.allclose(one, two, atol=1e-4):
        name = getattr(config.activation_func, "__name__", config.activation_func)
        yield f"activation is {name}, in transformers {type(theirs).__name__}"


NOISE = 16.0
"""How many times the noise of float32 two implementations may be apart; seven clean families were measured at up to 1.43 times."""
RELATIVE = 2e-6
"""Of the largest value, in addition, as transformers casts to float32 in places and its noise is then too small; measured: 1e-6."""


@dataclass(frozen=True)
class Pair:
    """Modules of a layer that do the same: `in` or `out` says which side of them is compared."""

    megatron: str
    hf: tuple[str, ...]
    """The first that the layer has."""
    side: str = "out"
    part: str = ""
    """Of a fused projection."""
    what: str = ""
    """In words, where the module's name does not say it."""


ROTARY = "attention itself: rotary embedding, scale, mask, softmax"
LAYER = (
    Pair("input_layernorm", ("input_layernorm",)),
    Pair("self_attention.linear_qkv", ("self_attn.q_proj",), part="q"),
    Pair("self_attention.linear_qkv", ("self_attn.k_proj",), part="k"),
    Pair("self_attention.linear_qkv", ("self_attn.v_proj",), part="v"),
    Pair("self_attention.q_layernorm", ("self_attn.q_norm", "self_attn.q_layernorm")),
    Pair("self_attention.k_layernorm", ("self_attn.k_norm", "self_attn.k_layernorm")),
    Pair("self_attention.linear_proj", ("self_attn.o_proj", "self_attn.dense"), side="in", what=ROTARY),
    Pair("self_attention.linear_proj", ("self_attn.o_proj", "self_attn.dense")),
    Pair("pre_mlp_layernorm", ("pre_feedforward_layernorm", "post_attention_layernorm")),
    Pair("mlp.router", ("mlp.gate", "mlp.router")),
    Pair("mlp.linear_fc1", ("mlp.gate_proj",), part="gate"),
    Pair("mlp.linear_fc1", ("mlp.up_proj",), part="up"),
    Pair("mlp.linear_fc2", ("mlp.down_proj",), side="in", what="activation"),
    Pair("mlp", ("mlp", "block_sparse_moe")),
    Pair("", ("",), what="the whole layer"),
)
NORMED_TWICE = ("self_attention.linear_proj", "mlp")
"""What some families norm again before the residual: whether Megatron does it inside of these modules is the family's choice."""


@dataclass
class SeenModules:
    megatron: str
    hf: str
    layer: int | None
    what: str
    difference: float = 0.0
    noise: float = 0.0
    scale: float = 0.0

    def off(self) -> bool:
        """Whether the outputs differ by more than noise; NaN does."""
        return not self.difference <= NOISE * self.noise + RELATIVE * self.scale


def first(session: BridgeSession, chunks: list[Any], tokens: Any, exported: dict[str, Any], disk: dict[str, Any]) -> dict[str, Any]:
    """The first place where the models part, what kind of difference it is, and how many places were compared. Every rank of a parallel
    model calls it: sharded outputs are gathered. Ranks of other stages have other places."""
    plain = plain_hf(session, "float32")
    hf, exact = _run_hf(plain, tokens.to(session.device)), _run_hf(plain_hf(session, "float64"), tokens.to(session.device))
    ours = _run_megatron(session, chunks, tokens)
    seen, left_out, axes = [], [], [0, 0, 0]
    for place, pair in _places(chunks, plain):
        got, want = _part(ours.get((place.megatron, pair.side)), pair.part, chunks), hf.get((place.hf, pair.side))
        if got is None or want is None:
            continue
        got, axis = _gathered(got, want)
        axes[axis] += 1
        if got.shape != want.shape:
            left_out.append(place.megatron)
            continue
        place.difference = float((got.double() - want.double()).abs().max())
        place.noise = float((want.double() - exact[place.hf, pair.side]).abs().max())
        place.scale = float(want.abs().max())
        seen.append(place)
    wrong = [place for place in seen if place.off()]
    split = {"positions": axes[1], "features": axes[2]}
    found = {"compared": len(seen), "off": len(wrong), "left_out": left_out[:20], "split": split}
    found |= {"first": None, "kind": "", "suspicion": ""}
    if wrong:
        found["first"] = vars(wrong[0])
        model = unwrapped(chunks[0])
        module = dict(model.named_modules()).get(wrong[0].megatron)
        found["kind"] = kind(module, wrong[0].hf, wrong[0].what, exported, disk)
        found["suspicion"] = "; ".join(unequal_settings(model, plain, wrong[0].megatron, wrong[0].hf, wrong[0].what))
    return found


def _places(chunks: list[Any], hf: Any) -> list[tuple[SeenModules, Pair]]:
    names = dict(hf.named_modules())
    base = next((name.removesuffix("layers") for name in names if name == "layers" or name.endswith(".layers")), "model.")
    made = [(SeenModules("embedding", f"{base}embed_tokens", None, ""), Pair("embedding", ()))]
    for chunk in chunks:
        for name, module in unwrapped(chunk).named_modules():
            if name.startswith("decoder.layers.") and name.count(".") == 2:
                made += _layer(
                    name, dict(module.named_modules()), module.layer_number - 1, f"{base}layers.{module.layer_number - 1}", names
                )
    norm = next((name for name in (f"{base}norm", f"{base}final_layernorm") if name in names), f"{base}norm")
    made.append((SeenModules("decoder.final_layernorm", norm, None, ""), Pair("decoder.final_layernorm", ())))
    made.append((SeenModules("output_layer", "lm_head", None, ""), Pair("output_layer", ())))
    return made


def _layer(name: str, modules: dict[str, Any], number: int, hf_name: str, hf_modules: dict[str, Any]) -> list[tuple[SeenModules, Pair]]:
    made = []
    twice = f"{hf_name}.pre_feedforward_layernorm" in hf_modules or f"{hf_name}.input_layernorm" not in hf_modules
    for pair in LAYER:
        theirs = next((f"{hf_name}.{part}".rstrip(".") for part in pair.hf if f"{hf_name}.{part}".rstrip(".") in hf_modules), None)
        if theirs is None or pair.megatron not in modules or (twice and pair.megatron in NORMED_TWICE and pair.side == "out"):
            continue
        if type(modules[pair.megatron]).__name__ != "IdentityOp":
            what = pair.what or (f"the {pair.part} part" if pair.part else "")
            made.append((SeenModules(f"{name}.{pair.megatron}".rstrip("."), theirs, number, what), pair))
    return made


def _hooked(model: Any, keep: Callable[[str, str, Any], None], run: Callable[[], Any]) -> None:
    import torch

    def hook(name: str) -> Any:
        def seen(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = next((value for value in (*args, *kwargs.values()) if torch.is_tensor(value)), None)
            keep(name, "in", given)
            keep(name, "out", output)

        return seen

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()


def _run_hf(model: Any, tokens: Any) -> dict[tuple[str, str], Any]:
    """Transformers: (row, position, feature) of each module."""
    rows, width = tokens.shape
    found: dict[tuple[str, str], Any] = {}

    def keep(name: str, side: str, value: Any) -> None:
        value = _routes(value) if name.endswith((".gate", ".router")) and isinstance(value, tuple) else _tensor(value)
        if value is not None and value.shape[0] == rows * width:
            value = value.reshape(rows, width, -1)
        if value is not None and value.dim() >= 3 and value.shape[:2] == (rows, width):
            found[name, side] = value.flatten(2)

    _hooked(model, keep, lambda: model(input_ids=tokens, use_cache=False))
    return found


def _run_megatron(session: BridgeSession, chunks: list[Any], tokens: Any) -> dict[tuple[str, str], Any]:
    """Megatron, whose tensors have the position first."""
    rows = tokens.shape[0]
    found: dict[tuple[str, str], Any] = {}

    def keep(name: str, side: str, value: Any) -> None:
        if isinstance(value, tuple) and name.endswith(("linear_proj", ".mlp")) and value[1] is not None:
            value = value[0] + value[1]  # a bias that the residual's addition would add
        value = _tensor(value)
        if name.endswith(".router") and side == "out" and value is not None:
            value = value.reshape(-1, rows, value.shape[-1])
        if value is not None and value.dim() >= 3 and value.shape[1] == rows:
            found[name, side] = value.transpose(0, 1).flatten(2).clone()  # Megatron adds the residual in place

    (chunk,) = chunks
    _hooked(unwrapped(chunk), keep, lambda: logits(session, chunks, tokens))
    return found


def _tensor(value: Any) -> Any:
    import torch

    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if torch.is_tensor(value) and value.dim() >= 2 else None


def _routes(value: tuple[Any, ...]) -> Any:
    """A router's choice as one weight per expert, from its logits, weights and chosen experts in any order."""
    import torch

    tensors = [part for part in value if torch.is_tensor(part) and part.dim() == 2]
    chosen = next((part for part in tensors if not part.is_floating_point()), None)
    wide = max(tensors, key=lambda part: part.shape[-1])
    if chosen is None or wide.shape == chosen.shape:
        return None
    weights = next((part for part in tensors if part.is_floating_point() and part.shape == chosen.shape), None)
    return None if weights is None else torch.zeros_like(wide).scatter(-1, chosen, weights.to(wide.dtype))


def _part(value: Any, part: str, chunks: list[Any]) -> Any:
    """Queries, keys or values of the fused projection, which has them group by group; or one half of the fused gate and up."""
    if value is None or not part:
        return value
    if part in ("gate", "up"):
        return value.chunk(2, -1)[part == "up"]
    config = unwrapped(chunks[0]).config
    each = config.num_attention_heads // config.num_query_groups
    width = config.kv_channels
    if value.shape[-1] % ((each + 2) * width):
        return None
    groups = value.unflatten(-1, (-1, each + 2, width))
    return {"q": groups[..., :each, :], "k": groups[..., each : each + 1, :], "v": groups[..., each + 1 :, :]}[part].flatten(2)


def _gathered(value: Any, want: Any) -> tuple[Any, int]:
    """A sharded output put together, and along which axis: 1 positions (sequence parallel), 2 features (tensor parallel), 0 none. Padding
    is cut off."""
    import torch
    from megatron.core import parallel_state

    size, split = parallel_state.get_tensor_model_parallel_world_size(), 0
    for axis in (1, 2):
        if size > 1 and value.shape[axis] * size == want.shape[axis]:
            parts = [torch.empty_like(value) for _ in range(size)]
            torch.distributed.all_gather(parts, value.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            value, split = torch.cat(parts, axis), axis
    return (value[..., : want.shape[-1]] if value.shape[:2] == want.shape[:2] else value), split
