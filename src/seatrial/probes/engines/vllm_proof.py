"""What one vLLM worker can prove about its weights: map, fingerprints, comparison, coverage, version. Runs inside the worker.

One `Proof` per model, kept as long as the model lives; the worker extension answers from it, and the transfer backend builds on it.
References are safetensors files, or directories of them, with the weights as the policy exports them.
A tied weight that the engine packed under a second name counts as a copy of its own: it must be right as well.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seatrial.probes import fingerprint
from seatrial.probes.engines import vllm_outputs, vllm_reader
from seatrial.probes.engines.vllm_reader import Layout, Photograph
from seatrial.probes.refit import coordinates, coverage

_PROOFS: weakref.WeakKeyDictionary[Any, Proof] = weakref.WeakKeyDictionary()


def proof_of(model: Any, config: Any) -> Proof:
    """The proof of this model."""
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
        self.refused: dict[str, Any] | None = None
        """Why the last payload was refused."""
        self.map: coordinates.Map | None = None
        self.layout = Layout()
        self._ties: dict[str, str] = {}
        """Runtime names over the memory of another one, before vLLM packed anything."""
        self._watch: coverage.Watch | None = None
        self._loose: tuple[str, ...] = ()
        """Runtime tensors that no exported element explains: they must keep their bits."""

    @property
    def model(self) -> Any:
        """The live model."""
        model = self._model()
        if model is None:
            raise RuntimeError("the model is gone")
        return model

    def holds(self, model: Any) -> bool:
        """Whether this is the proof of that model."""
        return self._model() is model

    def learn(self, reference: Mapping[str, Any], through: str, load: coordinates.Load | None = None) -> dict[str, Any]:
        """Learn the coordinate map: on a `twin`, or on the `live` model, which is put back bit for bit. Of the reference only
        names, shapes and dtypes count. `load`: how the live model is loaded, where that is not vLLM's own reload.
        """
        import torch

        before = fingerprint.model(self.model)
        if through == "twin":
            # The configuration is this worker's own; what a layout needs twins for is used up by learning it.
            self.layout = vllm_reader.learn(lambda: vllm_reader.twin(self.config), lambda made: vllm_reader.processed(made, self.config))
            learner = vllm_reader.twin(self.config)
            self.map = coordinates.learn(learner, learner.load_weights, reference)
        elif through == "live":
            self.layout, learner = Layout(), self.model
            device = next(self.model.parameters()).device
            # Only layouts are needed: one element each, stretched, so that ids are made on the device and the weights stay on the host.
            shapes = {name: torch.empty((), dtype=value.dtype, device=device).expand(value.shape) for name, value in reference.items()}
            with _without_caches(self.model):
                self.map = coordinates.learn(self.model, load or self.load, shapes)
        else:
            raise ValueError(f"seatrial_map: through {through!r}; known: twin, live")
        restored = fingerprint.model(self.model) == before
        self._watch = coverage.Watch(self.see(), self.map)
        self._watch.module = None  # where weights are packed, a photograph is a second copy of them
        sorted_ = coverage.classify(learner, self.map, {})
        self._ties = sorted_.shared
        self._loose = (*sorted_.constant, *(name for name, owner in self._ties.items() if owner in sorted_.constant))
        del learner
        gc.collect()  # the layers of a twin refer to themselves by their loaders: its weights would stay
        return {
            "through": through,
            "elements": sum(value.numel() for value in reference.values()),
            "runs": self.map.count,
            "restored": restored,
            "misplaced": coverage.misplaced(self.map),
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

    def learned(self) -> coordinates.Map:
        """The map; an error that says what to do when there is none."""
        if self.map is None:
            raise RuntimeError("seatrial: there is no coordinate map of this model: call seatrial_map first")
        return self.map

    def see(self) -> Photograph:
        """The live weights, now."""
        return vllm_reader.photograph(self.model, self.layout)

    def look(self) -> None:
        """Take note of what a load changed, for the coverage."""
        if self._watch is not None:
            self._watch.look(self.see())

    def coverage(self, replica: str = "0") -> dict[str, Any]:
        """What became of every runtime tensor and every exported name: the fact."""
        self.look()
        learned = self.learned()
        assert self._watch is not None
        return coverage.classify(self.model, learned, self._watch.touched, self._watch.moved, self._ties).row(replica, [])

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
        if self.config is None and next(vllm_reader.experts(self.model), None) is None:  # no engine, no kernels of its own
            return {}
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config):
            gaps = vllm_outputs.disagreeing(self.model, seen.tensors) | vllm_reader.disagreeing(self.model, seen)
        return {name: (runtime, gap) for runtime, gap in gaps.items() for name in self.learned().held.get(runtime, ())}

    def _views(self, seen: Photograph) -> list[tuple[Photograph, coordinates.Map]]:
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
        unproven = {name for runtime in vllm_reader.unproven(self.model) for name in self.learned().held.get(runtime, ())}
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


class _Unsigned(Mapping[str, Any]):
    """A reference without negative zeros, made one tensor at a time."""

    def __init__(self, reference: Mapping[str, Any]) -> None:
        self._reference = reference

    def __getitem__(self, name: str) -> Any:
        value = self._reference[name]
        return value + 0.0 if value.is_floating_point() else value

    def __contains__(self, name: object) -> bool:
        return name in self._reference

    def __iter__(self) -> Iterator[str]:
        return iter(self._reference)

    def __len__(self) -> int:
        return len(self._reference)


def _same_after_cast(held: Any, sent: Any) -> bool:
    """Whether an engine that holds another dtype holds exactly what was sent, cast likewise."""
    return held.dtype != sent.dtype and fingerprint.tensor_hash(held) == fingerprint.tensor_hash(sent.to(held))


def _row(count: int, first: int, total: int, runtime: str, method: str) -> dict[str, Any]:
    return {"count": count, "first": first, "total": total, "runtime": runtime, "method": method}
