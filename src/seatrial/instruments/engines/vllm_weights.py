"""What one vLLM worker really computes with, in checkpoint layout, and what it can prove: map, fingerprints, coverage, version.

On a GPU a parameter holds its weights, and they are read from it. On a CPU vLLM packs them away after loading:
- a linear layer keeps a copy behind `cpu_linear`, which is read back through the layer's own forward with unit vectors ("forward"). That
  shows every bit but the sign of a zero, and makes a whole row non-finite if one weight in it is;
- experts are permuted in place. The permutation is learned by letting vLLM pack element numbers in twins (fresh models of the same
  configuration), and undone; then the module's output is compared with plain torch on the weights that were read ("compare").

- A parameter that is read from memory proves nothing about a module that uses a copy of its own, so embeddings and norms are run as well.
- A tied weight that the engine packed under a second name counts as a copy of its own: it must be right as well.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.refit import map_learner, tensor_coverage
from seatrial.instruments.refit.map_learner import bits

ROWS = 256  # unit vectors per forward
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

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of every packed tensor, as in a checkpoint
    permuted: dict[str, Any] = field(default_factory=dict)
    """For each place of a packed tensor, its place in checkpoint layout; -1 for padding. Absent: read by forward."""


class Photograph:
    """The weights in checkpoint layout at one moment, under their runtime names. Stands in for a module that is only read."""

    def __init__(self, tensors: Mapping[str, Any], methods: Mapping[str, str]) -> None:
        self.tensors, self.methods = dict(tensors), dict(methods)

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:  # as modules have it
        yield from self.tensors.items()

    def named_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:  # as modules have it
        yield from ()


def packs() -> bool:
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
    base, count = EXACT[str(value.dtype)], 1
    while base**count <= value.numel():
        count += 1
    return count


def _embeds(module: Any) -> bool:
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


def unproven_names(model: Any) -> set[str]:
    """Runtime names of experts whose output cannot be compared: whether a kernel reads them as they lie is not known."""
    return {f"{name}.{part}" for name, _, comparable in experts(model) if not comparable for part in ("w13_weight", "w2_weight")}


def disagreeing_layers(model: Any, seen: Photograph) -> dict[str, float]:
    """Weights of experts with which plain torch does not give what the module gives: runtime name -> relative deviation.

    A reload may leave experts in a layout that their kernel does not expect. Their bits alone cannot show that.
    """
    wrong: dict[str, float] = {}
    for name, layer, comparable in experts(model):
        first, second = f"{name}.w13_weight", f"{name}.w2_weight"
        gaps = _layer_gaps(layer, seen.tensors[first], seen.tensors[second]) if comparable else []
        limits = CLOSE_ON_GPU if seen.tensors[first].is_cuda else CLOSE
        bad = [gap for gap in gaps if not gap <= limits[str(seen.tensors[first].dtype)]]  # NaN is a disagreement
        if bad:
            wrong[first] = wrong[second] = bad[0]
    return wrong


def _layer_gaps(layer: Any, up: Any, down: Any) -> list[float]:
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


ROWS_AT_ONCE = 8192  # rows that are looked up at a time
CLOSE_OUTPUTS = {"torch.float64": 1e-5, "torch.float32": 1e-5, "torch.float16": 1e-4, "torch.bfloat16": 1e-4}
"""How far a norm of ones may be from its weights, relative to each; half of the last bit of fp16 and bf16 is more."""


def disagreeing_outputs(model: Any, held: dict[str, Any]) -> dict[str, float]:
    """Runtime names with which a module does not compute: name -> deviation. `held`: the weights by runtime name."""
    import torch

    wrong: dict[str, float] = {}
    with torch.no_grad():
        for name, layer in model.named_modules():
            weight, gap = held.get(f"{name}.weight"), None
            # By name: what is derived from these may compute something else.
            kind = type(layer).__name__ if weight is not None else ""
            if kind == "VocabParallelEmbedding" and hasattr(layer.quant_method, "embedding"):
                gap = _embedding(layer, weight)
            elif kind == "RMSNorm" and layer.has_weight and layer.variance_size_override is None:
                gap = _norm(layer, weight)
            if gap is not None:
                wrong[f"{name}.weight"] = max(gap, wrong.get(f"{name}.weight", 0.0))
    return wrong


def _embedding(layer: Any, weight: Any) -> float | None:
    """The largest difference between what is looked up and what is held; None if there is none."""
    import torch

    for start in range(0, len(weight), ROWS_AT_ONCE):
        part = weight[start : start + ROWS_AT_ONCE]
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
        if not gap <= CLOSE_OUTPUTS[str(weight.dtype)]:  # NaN is a disagreement
            return float(gap)
    return None


_PROOFS: weakref.WeakKeyDictionary[Any, Proof] = weakref.WeakKeyDictionary()


def proof_of(model: Any, config: Any) -> Proof:
    if model not in _PROOFS:
        _PROOFS[model] = Proof(model, config)
    return _PROOFS[model]


def reference_of(path: str) -> dict[str, Any]:
    """The tensors of a safetensors file, or of all such files in a directory; the same name twice is an error."""
    from safetensors.torch import load_file

    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    found: dict[str, Any] = {}
    for file in files:
        part = load_file(file)
        twice = sorted(found.keys() & part.keys())
        if twice:
            raise ValueError(f"{file}: {twice[0]} stands in another file of {path}, too")
        found |= part
    if not found:
        raise ValueError(f"{path}: no safetensors in it; name the file, or the directory of the checkpoint")
    return found


class Proof:
    """See the module."""

    def __init__(self, model: Any, config: Any) -> None:
        self._model, self.config = weakref.ref(model), config
        self.version, self.incarnation = 0, f"{os.getpid()}-{time.time_ns()}"
        self.refused: dict[str, Any] | None = None  # why the last payload was refused
        self.map: map_learner.Map | None = None
        self.layout = Layout()
        self._ties: dict[str, str] = {}  # runtime names over the memory of another one, before vLLM packed anything
        self._watch: tensor_coverage.LoaderWatch | None = None
        self._loose: tuple[str, ...] = ()  # runtime tensors that no exported element explains: they must keep their bits

    @property
    def model(self) -> Any:
        model = self._model()
        if model is None:
            raise RuntimeError("the model is gone")
        return model

    def holds(self, model: Any) -> bool:
        return self._model() is model

    def learn(self, reference: Mapping[str, Any], through: str, load: map_learner.Load | None = None) -> dict[str, Any]:
        """Learn the coordinate map: on a `twin`, or on the `live` model, which is put back bit for bit. Of the reference only
        names, shapes and dtypes count. `load`: how the live model is loaded, where that is not vLLM's own reload.
        """
        import torch

        before = fingerprint.model(self.model)
        if through == "twin":
            # The configuration is this worker's own; what a layout needs twins for is used up by learning it.
            self.layout = learn(lambda: twin(self.config), lambda made: processed(made, self.config))
            learner = twin(self.config)
            self.map = map_learner.learn(learner, learner.load_weights, reference)
        elif through == "live":
            self.layout, learner = Layout(), self.model
            device = next(self.model.parameters()).device
            # Only layouts are needed: one element each, stretched, so that ids are made on the device and the weights stay on the host.
            shapes = {name: torch.empty((), dtype=value.dtype, device=device).expand(value.shape) for name, value in reference.items()}
            with _without_caches(self.model):
                self.map = map_learner.learn(self.model, load or self.load, shapes)
        else:
            raise ValueError(f"seatrial_map: through {through!r}; known: twin, live")
        restored = fingerprint.model(self.model) == before
        self._watch = tensor_coverage.LoaderWatch(self.see(), self.map)
        self._watch.module = None  # where weights are packed, a photograph is a second copy of them
        sorted_ = tensor_coverage.classify(learner, self.map, {})
        self._ties = sorted_.shared
        self._loose = (*sorted_.constant, *(name for name, owner in self._ties.items() if owner in sorted_.constant))
        del learner
        gc.collect()  # the layers of a twin refer to themselves by their loaders: its weights would stay
        return {
            "through": through,
            "elements": sum(value.numel() for value in reference.values()),
            "runs": self.map.count,
            "restored": restored,
            "misplaced": tensor_coverage.misplaced(self.map),
            **{key: dict(getattr(self.map, key)) for key in ("unwritten", "unconsumed", "duplicates", "opaque", "casts")},
            "packed": {name: "compare" if name in self.layout.permuted else "forward" for name in self.layout.shapes},
        }

    def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load as vLLM itself reloads: layer by layer, processed again, back into the memory that the engine uses."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with set_current_vllm_config(self.config):
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(weights)
            finally:
                finalize_layerwise_reload(self.model, self.config.model_config)

    def learned(self) -> map_learner.Map:
        """The map; an error that says what to do when there is none."""
        if self.map is None:
            raise RuntimeError("seatrial: there is no coordinate map of this model: call seatrial_map first")
        return self.map

    def see(self) -> Photograph:
        return photograph(self.model, self.layout)

    def look(self) -> None:
        """Take note of what a load changed, for the coverage."""
        if self._watch is not None:
            self._watch.look(self.see())

    def coverage(self, replica: str = "0") -> dict[str, Any]:
        self.look()
        learned = self.learned()
        assert self._watch is not None
        return tensor_coverage.classify(self.model, learned, self._watch.touched, self._watch.moved, self._ties).row(replica, [])

    def copies(self, seen: Photograph) -> dict[str, str]:
        """Runtime names that were tied to a mapped one and have memory of their own: packed, or untied by a reload."""
        held, mapped = seen.tensors, self.learned().tables
        tied = {name: owner for name, owner in self._ties.items() if owner in mapped and held[name].shape == held[owner].shape}
        return {name: owner for name, owner in tied.items() if held[name].data_ptr() != held[owner].data_ptr()}

    def gathered(self, seen: Photograph, reference: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Any]]:
        """Exported names that are wholly here with their live tensors, one after the other; once more for each tied copy."""
        import torch

        for view, used in self._views(seen):
            forwarded = {name for runtime, names in used.held.items() if view.methods[runtime] == "forward" for name in names}
            for name in used.homes:
                made = used.gather(view, name)
                if made is None:
                    continue
                if reference is not None and name in forwarded:  # the sign of a zero does not show: taken as sent
                    sent = reference[name].to(made)
                    made = torch.where((made == 0) & (sent == 0), sent, made)
                if reference is not None and name in used.casts and _same_after_cast(made, reference[name]):
                    made = reference[name]  # held in another dtype, and right: what was sent is what counts as held
                yield name, made

    def hashes(self, seen: Photograph, reference: Mapping[str, Any] | None = None) -> dict[str, str]:
        """The fingerprint of every exported name that is wholly here; copies that disagree give one that no weights have.

        A buffer that changed though no load explains it is there under its runtime name, which nobody sent.
        """
        names: list[str] = []

        def numbered() -> Iterator[tuple[str, Any]]:  # a tied name comes once for each copy
            for name, tensor in self.gathered(seen, reference):
                names.append(name)
                yield str(len(names)), tensor

        values = list(fingerprint.tensors(numbered()).values())
        found: dict[str, str] = {}
        for name, value in zip(names, values, strict=True):
            if found.setdefault(name, value) != value:
                found[name] = f"torn-{found[name]}-{value}"
        found |= {name: f"output-off-{gap:g}" for name, (_, gap) in self._disagreeing(seen).items() if name in found}
        moved = {name: f"moved-{value}" for name, value in self._moved(seen).items()}
        return {name: found[name] for name in self.learned().ids.names if name in found} | moved

    def _moved(self, seen: Photograph) -> dict[str, str]:
        """Runtime tensors that changed since the map was learned, although nothing that is exported reaches them: name and hash.

        Rotary tables and other buffers that a reload damages. Nobody can say what they should be now.
        """
        assert self._watch is not None
        first, places = self._watch.history[0], dict[tuple[Any, ...], str]()
        for name in self._loose:  # layers share their tables as long as nobody breaks that: each is hashed once
            value = seen.tensors[name]
            places.setdefault((value.data_ptr(), value.shape, value.stride(), first[name]), name)
        now = fingerprint.tensors((name, seen.tensors[name]) for name in places.values())
        return {name: value for name, value in now.items() if value != first[name]}

    def _disagreeing(self, seen: Photograph) -> dict[str, tuple[str, float]]:
        """Exported names whose module gives another output than plain torch: runtime name and deviation."""
        if self.config is None and next(experts(self.model), None) is None:  # no engine, no kernels of its own
            return {}
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config):
            gaps = disagreeing_outputs(self.model, seen.tensors) | disagreeing_layers(self.model, seen)
        return {name: (runtime, gap) for runtime, gap in gaps.items() for name in self.learned().held.get(runtime, ())}

    def _views(self, seen: Photograph) -> list[tuple[Photograph, map_learner.Map]]:
        """What to look at through which part of the map: the weights, then each tied copy in the place of its owner."""
        known = self.learned()
        views = [(seen, known)]
        for name, owner in self.copies(seen).items():
            view = Photograph({**seen.tensors, owner: seen.tensors[name]}, {**seen.methods, owner: seen.methods[name]})
            views.append((view, dataclasses.replace(known, tables={owner: known.tables[owner]})))
        return views

    def methods(self, seen: Photograph) -> dict[str, str]:
        """By which method each exported name is proven; the weakest one counts. A name that no method proves is left out."""
        found: dict[str, str] = {}
        unproven = {name for runtime in unproven_names(self.model) for name in self.learned().held.get(runtime, ())}
        for view, used in self._views(seen):
            for runtime, names in used.held.items():
                for name in names:
                    method = view.methods[runtime]
                    found[name] = max(found.get(name, "read"), method, key=("read", "forward", "compare").index)
        return {name: method for name, method in found.items() if name not in unproven}

    def wrong(self, seen: Photograph, reference: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What differs from the reference, element for element, also where this rank holds only parts."""
        found: dict[str, dict[str, Any]] = {}
        plain, copies = _Unsigned(reference), self.copies(seen)
        for view, used in self._views(seen):
            for runtime, table in used.tables.items():
                method = view.methods[runtime]
                one = dataclasses.replace(used, tables={runtime: table})
                for name, wrong in one.compare(view, plain if method == "forward" else reference).items():
                    where = next((copy for copy, owner in copies.items() if owner == runtime and view is not seen), runtime)
                    found.setdefault(name, _row(wrong.count, wrong.first, wrong.total, where, method))
        for name, (runtime, gap) in self._disagreeing(seen).items():
            found.setdefault(name, {**_row(0, 0, 0, runtime, "compare"), "output_gap": gap})
        return found | {name: {**_row(0, 0, 0, name, "read"), "moved": True} for name in self._moved(seen)}


@contextmanager
def _without_caches(model: Any) -> Iterator[None]:
    """Attention layers hold their KV caches as plain tensors: most of a GPU, which learning a map would save and restore as well."""
    kept = [(part, vars(part)["kv_cache"]) for part in model.modules() if "kv_cache" in vars(part)]
    for part, _ in kept:
        part.kv_cache = None
    try:
        yield
    finally:
        for part, cache in kept:
            part.kv_cache = cache


def _same_after_cast(held: Any, sent: Any) -> bool:
    return held.dtype != sent.dtype and fingerprint.tensor_hash(held) == fingerprint.tensor_hash(sent.to(held))


class _Unsigned(dict[str, Any]):
    """A reference without negative zeros, made one tensor at a time."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value + 0.0 if value.is_floating_point() else value


def _row(count: int, first: int, total: int, runtime: str, method: str) -> dict[str, Any]:
    return {"count": count, "first": first, "total": total, "runtime": runtime, "method": method}
