"""A stand-in for a serving engine (no engine is installed here): torch modules with vLLM-like layouts and their own `load_weights`.

Two tensor-parallel ranks; fused qkv and gate_up; stacked experts (w13, w2); a padded, sharded vocabulary; tied or untied head;
A = -exp(A_log); a non-persistent rotary buffer that the loader recomputes; a routing bias held as a buffer; optionally fp8
down projections with a scale; a draft head (mtp) that is exported and not consumed. Faults are subclasses of `Rank`;
those that begin only after the first loads look at `armed`.
`served` is what the engine computes with: the slots read back by the layout's own meaning, joined over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Weights = dict[str, torch.Tensor]
RANKS = 2
FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2), "gate_proj": ("gate_up_proj", 0)}
FUSED["up_proj"] = ("gate_up_proj", 1)


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the last layer has experts, the others are dense."""

    hidden: int = 32
    heads: int = 4
    inner: int = 48
    experts: int = 4
    layers: int = 3
    vocab: int = 50
    padded: int = 64
    tied: bool = False
    fp8: bool = False
    dtype: Any = torch.bfloat16


def policy(shape: Shape, seed: int = 0) -> Weights:
    """The export of a policy: names and shapes as in a checkpoint."""
    draw = torch.Generator().manual_seed(seed)

    def made(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=draw) / math.sqrt(size[-1])).to(shape.dtype)

    hidden, inner = shape.hidden, shape.inner
    weights: Weights = {"model.embed_tokens.weight": made(shape.vocab, hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        weights[f"{at}.input_layernorm.weight"] = 1 + made(hidden)
        weights |= {f"{at}.self_attn.{part}_proj.weight": made(hidden, hidden) for part in "qkvo"}
        weights[f"{at}.ssm.A_log"] = made(hidden).float()
        blocks = [f"{at}.mlp"] if layer < shape.layers - 1 else [f"{at}.mlp.experts.{expert}" for expert in range(shape.experts)]
        for block in blocks:
            weights[f"{block}.gate_proj.weight"], weights[f"{block}.up_proj.weight"] = made(inner, hidden), made(inner, hidden)
            weights[f"{block}.down_proj.weight"] = made(hidden, inner)
    at = f"model.layers.{shape.layers - 1}"
    weights[f"{at}.mlp.gate.weight"] = made(shape.experts, hidden)
    weights[f"{at}.mlp.gate.e_score_correction_bias"] = made(shape.experts).float()
    weights["model.norm.weight"] = 1 + made(hidden)
    if not shape.tied:
        weights["lm_head.weight"] = made(shape.vocab, hidden)
    weights["mtp.fc.weight"] = made(hidden, hidden)
    return weights


def trained(weights: Weights, seed: int, size: float = 1e-3) -> Weights:
    """The export after one more update; every tensor changes."""
    draw = torch.Generator().manual_seed(1000 + seed)
    return {name: (value + size * torch.randn(value.shape, generator=draw)).to(value.dtype) for name, value in weights.items()}


class Part(nn.Module):  # type: ignore[misc]
    """A bag of parameters and buffers."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, value in tensors.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))


class Rank(nn.Module):  # type: ignore[misc]
    """One tensor-parallel rank of the engine."""

    def __init__(self, shape: Shape, rank: int) -> None:
        super().__init__()
        self.shape, self.rank, self.armed = shape, rank, False
        hidden, inner, dtype = shape.hidden, shape.inner // RANKS, shape.dtype
        half = hidden // RANKS
        self.model = Part()
        self.model.embed_tokens = Part(weight=torch.zeros(shape.padded // RANKS, hidden, dtype=dtype))
        self.model.norm = Part(weight=torch.zeros(hidden, dtype=dtype))
        self.model.layers = nn.ModuleList()
        for layer in range(shape.layers):
            block = Part()
            block.input_layernorm = Part(weight=torch.zeros(hidden, dtype=dtype))
            block.self_attn = Part()
            block.self_attn.qkv_proj = Part(weight=torch.zeros(3 * half, hidden, dtype=dtype))
            block.self_attn.o_proj = Part(weight=torch.zeros(hidden, half, dtype=dtype))
            block.self_attn.rotary = Part()
            block.self_attn.rotary.register_buffer("inv_freq", rotary(shape), persistent=False)
            block.ssm = Part(A=torch.zeros(hidden))
            block.mlp = self._dense(hidden, inner) if layer < shape.layers - 1 else self._experts(hidden, inner)
            self.model.layers.append(block)
        self.lm_head = Part(weight=torch.zeros(shape.padded // RANKS, hidden, dtype=dtype))
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _dense(self, hidden: int, inner: int) -> Part:
        made = Part()
        made.gate_up_proj = Part(weight=torch.zeros(2 * inner, hidden, dtype=self.shape.dtype))
        made.down_proj = Part(weight=torch.zeros(hidden, inner, dtype=torch.float8_e4m3fn if self.shape.fp8 else self.shape.dtype))
        if self.shape.fp8:
            made.down_proj.register_parameter("weight_scale", nn.Parameter(torch.ones(1), requires_grad=False))
        return made

    def _experts(self, hidden: int, inner: int) -> Part:
        made, count = Part(), self.shape.experts
        w13 = torch.zeros(count, 2 * inner, hidden, dtype=self.shape.dtype)
        made.experts = Part(w13_weight=w13, w2_weight=torch.zeros(count, hidden, inner, dtype=self.shape.dtype))
        made.gate = Part(weight=torch.zeros(count, hidden, dtype=self.shape.dtype))
        made.gate.register_buffer("e_score_correction_bias", torch.zeros(count))
        return made

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As engines do: one name at a time, each to its slot; returns what was loaded."""
        own = dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())
        loaded = set()
        for name, value in weights:
            with torch.no_grad():
                if self.consume(own, name, value):
                    loaded.add(name)
        for layer in self.model.layers:
            layer.self_attn.rotary.inv_freq = rotary(self.shape)
        return loaded

    def consume(self, own: Weights, name: str, value: torch.Tensor) -> bool:
        """Write one exported tensor; False if it is none of ours."""
        if name.startswith("mtp.") or (self.shape.tied and name == "lm_head.weight"):
            return False
        owner, _, leaf = name.rpartition(".")
        block, _, part = owner.rpartition(".")
        if ".experts." in name:
            self.expert(own, block, part, value)
        elif part in FUSED:
            fused, _ = FUSED[part]
            self.fuse(own[f"{block}.{fused}.weight"], self.slot(part), 3 if fused == "qkv_proj" else 2, self.shard(value, 0))
        elif leaf == "A_log":
            own[f"{owner}.A"].copy_(-torch.exp(value.float()))
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = own[name].shape[0]
            mine = value[self.rank * rows : (self.rank + 1) * rows]
            own[name][: len(mine)].copy_(mine)
        elif part in ("o_proj", "down_proj"):
            self.row(own, name, self.shard(value, 1))
        else:
            own[name].copy_(value)
        return True

    def slot(self, part: str) -> int:
        """Which slot of its fused tensor a part has."""
        return FUSED[part][1]

    def reads(self, part: str) -> int:
        """Which slot the kernels take for a part."""
        return FUSED[part][1]

    def shard(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share along a dimension."""
        return value.chunk(RANKS, dim)[self.rank]

    def fuse(self, target: torch.Tensor, slot: int, slots: int, value: torch.Tensor) -> None:
        """Copy one part into its slot."""
        target.chunk(slots, 0)[slot].copy_(value)

    def expert(self, own: Weights, block: str, part: str, value: torch.Tensor) -> None:
        """Copy one matrix of one expert."""
        stack, _, index = block.rpartition(".")
        if part == "down_proj":
            own[f"{stack}.w2_weight"][self.place(int(index))].copy_(self.shard(value, 1))
        else:
            self.fuse(own[f"{stack}.w13_weight"][self.place(int(index))], self.slot(part), 2, self.shard(value, 0))

    def place(self, expert: int) -> int:
        """Where an expert is stacked."""
        return expert

    def row(self, own: Weights, name: str, value: torch.Tensor) -> None:
        """A row-parallel matrix, quantised where the engine keeps fp8."""
        if own[name].dtype != torch.float8_e4m3fn:
            own[name].copy_(value)
            return
        bits, scale = quantise(value)
        own[name].copy_(bits)
        self.scale(own[f"{name}_scale"], scale)

    def scale(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Write the scale of a quantised matrix."""
        target.copy_(value)


def rotary(shape: Shape) -> torch.Tensor:
    """The frequencies that every load computes afresh."""
    size = shape.hidden // shape.heads
    return 1.0 / 10000 ** (torch.arange(0, size, 2) / size)


def quantise(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 bits and their scale, one per matrix."""
    scale = value.float().abs().amax().reshape(1) / 448.0
    return (value.float() / scale).to(torch.float8_e4m3fn), scale


def engine(shape: Shape, kind: type[Rank] = Rank) -> list[Rank]:
    """Both ranks."""
    return [kind(shape, rank) for rank in range(RANKS)]


def served(ranks: Sequence[Rank]) -> Weights:
    """What the engine computes with, under export names (A instead of A_log)."""
    made: Weights = {}
    shape, states = ranks[0].shape, [dict(rank.named_parameters(remove_duplicate=False)) | dict(rank.named_buffers()) for rank in ranks]
    for name in states[0]:
        owner, _, leaf = name.rpartition(".")
        block, _, part = owner.rpartition(".")
        values = [state[name].detach() for state in states]
        if part in ("qkv_proj", "gate_up_proj"):
            for key, (fused, _) in FUSED.items():
                if fused == part:
                    slot = ranks[0].reads(key)
                    made[f"{block}.{key}.weight"] = torch.cat([value.chunk(3 if part == "qkv_proj" else 2, 0)[slot] for value in values])
        elif leaf == "w13_weight":
            for expert in range(shape.experts):
                for key in ("gate_proj", "up_proj"):
                    slot = ranks[0].reads(key)
                    made[f"{owner}.{expert}.{key}.weight"] = torch.cat([value[expert].chunk(2, 0)[slot] for value in values])
        elif leaf == "w2_weight":
            made |= {
                f"{owner}.{index}.down_proj.weight": torch.cat([value[index] for value in values], 1) for index in range(shape.experts)
            }
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            made[name] = torch.cat(values)[: shape.vocab]
        elif part in ("o_proj", "down_proj") and leaf == "weight":
            scales = [state.get(f"{name}_scale", torch.ones(1)) for state in states]
            made[name] = torch.cat([value.float() * scale if shape.fp8 else value for value, scale in zip(values, scales, strict=True)], 1)
        elif leaf not in ("inv_freq", "weight_scale"):
            made[name] = values[0]
    return made


def logprobs(weights: Weights, shape: Shape, seed: int = 7) -> list[list[float]]:
    """Log-probabilities of fixed random sequences under these weights, in fp32."""
    w = {name: value.float() for name, value in weights.items()}
    tokens = torch.randint(0, shape.vocab, (8, 16), generator=torch.Generator().manual_seed(seed))
    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        h = nn.functional.rms_norm(x, (shape.hidden,), w[f"{at}.input_layernorm.weight"])
        x = x + attend(h, [w[f"{at}.self_attn.{part}_proj.weight"] for part in "qkvo"], shape.heads)
        decay = w[f"{at}.ssm.A"] if f"{at}.ssm.A" in w else -torch.exp(w[f"{at}.ssm.A_log"])
        x = x * torch.exp(0.1 * decay)
        h = nn.functional.rms_norm(x, (shape.hidden,))
        if f"{at}.mlp.gate.weight" in w:
            share = torch.softmax(h @ w[f"{at}.mlp.gate.weight"].T + w[f"{at}.mlp.gate.e_score_correction_bias"], -1)
            outputs = [feed(h, w, f"{at}.mlp.experts.{expert}") for expert in range(shape.experts)]
            x = x + sum(share[..., index, None] * output for index, output in enumerate(outputs))
        else:
            x = x + feed(h, w, f"{at}.mlp")
    x = nn.functional.rms_norm(x, (shape.hidden,), w["model.norm.weight"])
    scores = torch.log_softmax(x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T, -1)
    chosen: list[list[float]] = scores[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0].tolist()
    return chosen


def attend(h: torch.Tensor, weights: Sequence[torch.Tensor], heads: int) -> torch.Tensor:
    """Causal attention."""
    q, k, v = (torch.stack((h @ weight.T).chunk(heads, -1), 1) for weight in weights[:3])
    return torch.cat(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).unbind(1), -1) @ weights[3].T


def feed(h: torch.Tensor, w: Weights, block: str) -> torch.Tensor:
    """One gated feed-forward block."""
    gate, up = (h @ w[f"{block}.{part}.weight"].T for part in ("gate_proj", "up_proj"))
    return (nn.functional.silu(gate) * up) @ w[f"{block}.down_proj.weight"].T
