"""What a vLLM worker really computes with, brought back into checkpoint layout. Runs inside the worker.

On a GPU a parameter holds its weights, and they are read from it. On a CPU vLLM packs them away after loading:
- a linear layer keeps a copy behind `cpu_linear`, which is read back through the layer's own forward with unit vectors
  ("forward"). That shows every bit but the sign of a zero, and makes a whole row non-finite if one weight in it is;
- experts are permuted in place. The permutation is learned by letting vLLM pack element numbers, and undone; then the module's
  output is compared with plain torch on the weights that were read ("compare").
What is packed how is learned from twins: fresh models of the same configuration, built and processed by vLLM's own code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from seatrial.probes import fingerprint

ROWS = 256
"""Unit vectors per forward."""
EXACT = {"torch.float64": 1 << 24, "torch.float32": 1 << 24, "torch.float16": 1 << 11, "torch.bfloat16": 1 << 8}
"""Whole numbers below this are exact."""
CLOSE = {"torch.float64": 1e-4, "torch.float32": 1e-4, "torch.float16": 1e-2, "torch.bfloat16": 5e-2}
"""How far the output of experts may be from plain torch, relative to its largest value. A wrong layout is off by about 1."""
CLOSE_ON_GPU = {**CLOSE, "torch.float32": 2e-2}
"""Expert kernels multiply fp32 with the precision of TF32 there: 0.002 was measured on right weights."""


class CannotRead(RuntimeError):
    """Weights that no method brings back; names them."""


@dataclass
class Layout:
    """How runtime tensors keep their weights; empty when all of them hold them plainly."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of every packed tensor, as in a checkpoint."""
    permuted: dict[str, Any] = field(default_factory=dict)
    """For each place of a packed tensor, its place in checkpoint layout; -1 for padding. Absent: read by forward."""


class Photograph:
    """The weights in checkpoint layout at one moment, under their runtime names. Stands in for a module that is only read."""

    def __init__(self, tensors: Mapping[str, Any], methods: Mapping[str, str]) -> None:
        self.tensors, self.methods = dict(tensors), dict(methods)

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:  # noqa: ARG002  # as modules have it
        """Every tensor, as a module gives them."""
        yield from self.tensors.items()

    def named_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:  # noqa: ARG002  # as modules have it
        """None: buffers are among the parameters."""
        yield from ()


def packs() -> bool:
    """Whether this vLLM packs weights away."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def twin(config: Any) -> Any:
    """A fresh model of the same configuration, built by vLLM, of which the engine knows nothing."""
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model

    own = copy.copy(config)
    own.compilation_config = copy.copy(config.compilation_config)
    for name, value in vars(own.compilation_config).items():
        if name.startswith("static_") and isinstance(value, (dict, list)):
            setattr(own.compilation_config, name, type(value)())  # layers register here by name, and must not meet the live ones
    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        return initialize_model(own)
    finally:
        torch.set_default_dtype(before)


def processed(model: Any, config: Any) -> None:
    """Let vLLM do with a model what it does after loading."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    with set_current_vllm_config(config):
        process_weights_after_loading(model, config.model_config, next(model.parameters()).device)


def learn(build: Callable[[], Any], process: Callable[[Any], None]) -> Layout:
    """How processing keeps each parameter. One twin of random numbers shows what comes back as it was; only the rest is numbered."""
    import torch

    layout, fresh, draw = Layout(), build(), torch.Generator().manual_seed(1)
    raw = _numeric(fresh)
    shapes = {name: tuple(value.shape) for name, value in raw.items()}
    for value in raw.values():
        value.data.random_(0, EXACT[str(value.dtype)], generator=draw if value.device.type == "cpu" else None)
    before = fingerprint.tensors(raw.items())
    process(fresh)
    owners, after = dict(fresh.named_modules(remove_duplicate=False)), dict(fresh.named_parameters(remove_duplicate=False))
    changed = []
    for name, shape in shapes.items():
        owner = owners[name.rpartition(".")[0]]
        if len(shape) == 2 and hasattr(owner, "cpu_linear") and not _embeds(owner):
            layout.shapes[name] = shape
        elif fingerprint.tensor_hash(after[name]) != before[name]:
            changed.append(name)
    del fresh, raw, owners, after
    for name, places in _numbered(build, process, changed).items():
        if not torch.equal(places, torch.arange(torch.Size(shapes[name]).numel())):
            layout.shapes[name], layout.permuted[name] = shapes[name], places
    return layout


def _numeric(model: Any) -> dict[str, Any]:
    """Parameters that can hold numbers. Buffers are left alone: rotary tables are shared with the live model."""
    return {name: value for name, value in model.named_parameters(remove_duplicate=False) if str(value.dtype) in EXACT}


def _numbered(build: Callable[[], Any], process: Callable[[Any], None], names: list[str]) -> dict[str, Any]:
    """For each place of these parameters after processing, the number of its element before, -1 for none: a twin per digit."""
    import torch

    places: dict[str, Any] = dict.fromkeys(names, -1)
    step = steps = 0
    while names and step <= steps:
        fresh = build()
        raw = {name: value for name, value in _numeric(fresh).items() if name in names}
        bases, steps = {name: EXACT[str(value.dtype)] for name, value in raw.items()}, max(map(_digits, raw.values())) - 1
        for name, value in raw.items():
            numbers = torch.arange(1, value.numel() + 1).div(bases[name] ** step, rounding_mode="floor") % bases[name]
            value.data.copy_(numbers.reshape(value.shape))
        process(fresh)
        after = dict(fresh.named_parameters(remove_duplicate=False))
        for name in names:
            places[name] = places[name] + after[name].detach().reshape(-1).to(torch.int64) * bases[name] ** step
        step += 1
    return places


def _digits(value: Any) -> int:
    """How many digits the number of the last element has."""
    base, count = EXACT[str(value.dtype)], 1
    while base**count <= value.numel():
        count += 1
    return count


def _embeds(module: Any) -> bool:
    """Whether a module only looks its weights up, from the parameter itself."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


def photograph(model: Any, layout: Layout) -> Photograph:
    """Bring every parameter and buffer into checkpoint layout."""
    owners, tensors, methods = dict(model.named_modules(remove_duplicate=False)), {}, {}
    for name, value in fingerprint.named_state(model):
        if name not in layout.shapes:
            tensors[name], methods[name] = value.detach(), "read"
        elif name in layout.permuted:
            tensors[name], methods[name] = _unpacked(name, value.detach(), layout), "compare"
        else:
            tensors[name], methods[name] = _forwarded(name, owners[name.rpartition(".")[0]], layout.shapes[name], value), "forward"
    return Photograph(tensors, methods)


def _unpacked(name: str, value: Any, layout: Layout) -> Any:
    """Undo a permutation; an element that no place holds would be a hole, and is an error."""
    places = layout.permuted[name]
    if value.numel() != places.numel():
        raise CannotRead(f"{name}: {value.numel()} elements are packed, {places.numel()} were when its layout was learned")
    held = places >= 0
    result = value.new_empty(layout.shapes[name])
    if int(held.sum()) != result.numel() or len(places[held].unique()) != result.numel():
        raise CannotRead(f"{name}: packing is no permutation of its {result.numel()} elements")
    result.view(-1)[places[held]] = value.reshape(-1)[held]
    return result


def _forwarded(name: str, layer: Any, shape: tuple[int, ...], value: Any) -> Any:
    """The matrix that a layer multiplies with, column by column."""
    import torch

    result = torch.empty(shape, dtype=value.dtype, device=value.device)
    for start in range(0, shape[1], ROWS):
        stop = min(start + ROWS, shape[1])
        units = torch.zeros(stop - start, shape[1], dtype=value.dtype, device=value.device)
        units[torch.arange(stop - start), torch.arange(start, stop)] = 1
        answer = layer.quant_method.apply(layer, units, None)
        if tuple(answer.shape) != (stop - start, shape[0]):
            raise CannotRead(f"{name}: the layer answers {tuple(answer.shape)} to {tuple(units.shape)}, its weights are {shape}")
        result[:, start:stop] = answer.t()
        # One row alone: engines have kernels for few rows, which may have weights of their own.
        result[:, start] = layer.quant_method.apply(layer, units[:1], None)[0]
    return result.add_(0.0)  # no negative zeros


def experts(model: Any) -> Iterator[tuple[str, Any, bool]]:
    """Modules with fused experts: name, module, and whether their output can be compared with plain torch."""
    for name, layer in model.named_modules():
        if hasattr(layer, "w13_weight") and hasattr(layer, "w2_weight"):
            method = layer.quant_method
            plain = type(method).__name__ == "UnquantizedFusedMoEMethod" and not method.is_monolithic
            activation = getattr(layer.activation, "value", layer.activation)
            yield name, layer, plain and activation == "silu" and layer.expert_map is None and not hasattr(layer, "w13_bias")


def unproven(model: Any) -> set[str]:
    """Runtime names of experts whose output cannot be compared: whether a kernel reads them as they lie is not known."""
    return {f"{name}.{part}" for name, _, comparable in experts(model) if not comparable for part in ("w13_weight", "w2_weight")}


def disagreeing(model: Any, seen: Photograph) -> dict[str, float]:
    """Weights of experts with which plain torch does not give what the module gives: runtime name -> relative deviation.

    A reload may leave experts in a layout that their kernel does not expect. Their bits alone cannot show that.
    """
    wrong: dict[str, float] = {}
    for name, layer, comparable in experts(model):
        first, second = f"{name}.w13_weight", f"{name}.w2_weight"
        gaps = _gaps(layer, seen.tensors[first], seen.tensors[second]) if comparable else []
        limits = CLOSE_ON_GPU if seen.tensors[first].is_cuda else CLOSE
        bad = [gap for gap in gaps if not gap <= limits[str(seen.tensors[first].dtype)]]  # NaN is a disagreement
        if bad:
            wrong[first] = wrong[second] = bad[0]
    return wrong


def _gaps(layer: Any, up: Any, down: Any) -> list[float]:
    """For each expert, how far the module is from plain torch."""
    import torch

    given = torch.randn(4, up.shape[-1], generator=torch.Generator().manual_seed(1)).to(up)
    ones = torch.ones(len(given), 1, device=up.device)
    gaps = []
    for expert in range(up.shape[0]):
        ids = torch.full((len(given), 1), expert, dtype=torch.int32, device=up.device)
        answer = layer.quant_method.apply(layer, given.clone(), ones, ids, None, None).float()
        gate, value = (given.float() @ up[expert].float().t()).chunk(2, dim=-1)
        plain = (torch.nn.functional.silu(gate) * value) @ down[expert].float().t()
        gaps.append(float((answer - plain).abs().max() / plain.abs().max()))
    return gaps
