"""Where two forward passes part: the first module of Megatron whose output is not that of its transformers counterpart.

Both models run once with hooks. Modules are paired by a table in the order in which they run; a pair that one side lacks, or whose
shapes do not match, is left out and counted. Since everything before the first wrong pair agrees, that module had the right inputs.
The noise at each place is measured, not assumed: it is how far transformers in float32 is from transformers in float64 there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from seatrial.probes.bridge import forward, suspicion
from seatrial.probes.bridge.session import Session, unwrapped

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
class Seen:
    """One place in both models."""

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


def first(session: Session, chunks: list[Any], tokens: Any, exported: dict[str, Any], disk: dict[str, Any]) -> dict[str, Any]:
    """The first place where the models part, what kind of difference it is, and how many places were compared.

    Every rank of a parallel model calls it: sharded outputs are gathered. Ranks of other stages have other places.
    """
    plain = forward.plain_hf(session, "float32")
    hf, exact = _run_hf(plain, tokens.to(session.device)), _run_hf(forward.plain_hf(session, "float64"), tokens.to(session.device))
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
    found = {
        "compared": len(seen),
        "off": len(wrong),
        "left_out": left_out[:20],
        "split": split,
        "first": None,
        "kind": "",
        "suspicion": "",
    }
    if wrong:
        found["first"] = vars(wrong[0])
        found["kind"] = suspicion.kind(_module(chunks, wrong[0].megatron), wrong[0].hf, wrong[0].what, exported, disk)
        found["suspicion"] = suspicion.settings(chunks, plain, wrong[0].megatron, wrong[0].hf, wrong[0].what)
    return found


def _module(chunks: list[Any], name: str) -> Any:
    return dict(unwrapped(chunks[0]).named_modules()).get(name)


def _places(chunks: list[Any], hf: Any) -> list[tuple[Seen, Pair]]:
    """Every pair of modules of this rank's part of the model, in the order of the forward pass."""
    names = dict(hf.named_modules())
    base = next((name.removesuffix("layers") for name in names if name == "layers" or name.endswith(".layers")), "model.")
    made = [(Seen("embedding", f"{base}embed_tokens", None, ""), Pair("embedding", ()))]
    for chunk in chunks:
        for name, module in unwrapped(chunk).named_modules():
            if name.startswith("decoder.layers.") and name.count(".") == 2:
                made += _layer(
                    name, dict(module.named_modules()), module.layer_number - 1, f"{base}layers.{module.layer_number - 1}", names
                )
    norm = next((name for name in (f"{base}norm", f"{base}final_layernorm") if name in names), f"{base}norm")
    made.append((Seen("decoder.final_layernorm", norm, None, ""), Pair("decoder.final_layernorm", ())))
    made.append((Seen("output_layer", "lm_head", None, ""), Pair("output_layer", ())))
    return made


def _layer(name: str, modules: dict[str, Any], number: int, hf_name: str, hf_modules: dict[str, Any]) -> list[tuple[Seen, Pair]]:
    made = []
    twice = f"{hf_name}.pre_feedforward_layernorm" in hf_modules or f"{hf_name}.input_layernorm" not in hf_modules
    for pair in LAYER:
        theirs = next((f"{hf_name}.{part}".rstrip(".") for part in pair.hf if f"{hf_name}.{part}".rstrip(".") in hf_modules), None)
        if theirs is None or pair.megatron not in modules or (twice and pair.megatron in NORMED_TWICE and pair.side == "out"):
            continue
        if type(modules[pair.megatron]).__name__ != "IdentityOp":
            what = pair.what or (f"the {pair.part} part" if pair.part else "")
            made.append((Seen(f"{name}.{pair.megatron}".rstrip("."), theirs, number, what), pair))
    return made


def _hooked(model: Any, keep: Callable[[str, str, Any], None], run: Callable[[], Any]) -> None:
    """Run a model and keep what goes into and comes out of every module."""
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


def _run_megatron(session: Session, chunks: list[Any], tokens: Any) -> dict[tuple[str, str], Any]:
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
    _hooked(unwrapped(chunk), keep, lambda: forward.logits(session, chunks, tokens))
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
    """A sharded output put together, and along which axis: 1 positions (sequence parallel), 2 features (tensor parallel), 0 none.

    Padding is cut off.
    """
    import torch
    from megatron.core import parallel_state

    size, split = parallel_state.get_tensor_model_parallel_world_size(), 0
    for axis in (1, 2):
        if size > 1 and value.shape[axis] * size == want.shape[axis]:
            parts = [torch.empty_like(value) for _ in range(size)]
            torch.distributed.all_gather(parts, value.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            value, split = torch.cat(parts, axis), axis
    return (value[..., : want.shape[-1]] if value.shape[:2] == want.shape[:2] else value), split
