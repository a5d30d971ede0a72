"""What one process sent or received in a refit, as facts, and what the model of a generation worker holds, by exported name.

- A tensor is hashed before it is passed on and not kept: transfer buffers are used again as soon as the call returns.
- Nothing raised here reaches the loop. It becomes a row {"fact": "probe_error"}, which the judge takes for a missing proof.
- Rows: "attached", "hashes" (side sent, relayed, received or live), "map", "coverage", "refit", "version", "probe_error". `version` counts
  the refits of this process from 1; `passed` is what the framework itself said.
- `Live` learns the map after the first refit, through the model's own load_weights, and restores the weights bit for bit: it needs a second
  copy of them on the host. Where vLLM packs weights away, it learns on a twin. Names that are not whole on this rank are left out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from types import ModuleType, TracebackType
from typing import Any

from seatrial.instruments import facts
from seatrial.instruments.bits import fingerprint
from seatrial.instruments.engines import vllm_weights
from seatrial.instruments.engines.vllm_weights import Photograph, Proof
from seatrial.instruments.refit.map_learner import bits


def model_of(worker: Any) -> Any:
    """The model of a vLLM worker, without what captures its graphs."""
    runner = worker.model_runner
    return runner.get_model() if hasattr(runner, "get_model") else runner.model


def replica_of(worker: Any, process: str) -> str:
    """A name for this rank of this engine. A loop that numbers its engines keeps the number over a restart."""
    return f"{os.environ.get('VERL_REPLICA_RANK', process)}/{getattr(worker, 'rank', 0)}"


def packs(worker: Any) -> bool:
    """Whether the engine of this worker packs weights away."""
    return hasattr(worker, "vllm_config") and "vllm" in sys.modules and vllm_weights.packs()


def dtypes_of(model: Any) -> list[Any]:
    """The floating-point dtypes of the model's weights. Without those of one byte: no map is learned through them."""
    found = dict.fromkeys(value.dtype for _, value in fingerprint.named_state(model))
    return [dtype for dtype in found if dtype.is_floating_point and _width(dtype) > 8]


def loses(sent: Any, held: Any) -> bool:
    """Whether a floating-point value may change when it is cast from one dtype to the other."""
    return sent != held and sent.is_floating_point and held.is_floating_point and _width(held) <= _width(sent)


def _width(dtype: Any) -> int:
    import torch

    return int(torch.finfo(dtype).bits)


def as_sent(held: Any, sent: Any) -> Any:
    """A tensor in the narrower dtype in which it was sent; as it is, where that is no question or a bit would be lost."""
    if sent == held.dtype or not sent.is_floating_point or not held.is_floating_point() or loses(sent, held.dtype):
        return held
    back = held.to(sent)
    same = bits(back.to(held.dtype)) == bits(held)
    return back if bool(same.all()) else held


def held(worker: Any) -> dict[str, str]:
    """Hashes of every parameter and buffer that a vLLM worker generates with; those of a draft model begin with `drafter.`."""
    named = list(fingerprint.named_state(model_of(worker)))
    drafter = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    if hasattr(drafter, "named_parameters"):
        named += [(f"drafter.{name}", tensor) for name, tensor in fingerprint.named_state(drafter)]
    return fingerprint.tensors(named)


class _AsSent(Proof):
    """A proof that gives each name in the dtype in which it was sent, where the runtime holds it wider."""

    def __init__(self, model: Any, config: Any, shapes: Mapping[str, Any]) -> None:
        super().__init__(model, config)
        self._sent = {name: value.dtype for name, value in shapes.items()}

    def gathered(self, seen: Photograph, reference: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Any]]:
        for name, held in super().gathered(seen, reference):
            yield name, as_sent(held, self._sent[name])


class Live:
    """The proof of one worker, and what was read by it last."""

    def __init__(self, worker: Any, layouts: Mapping[str, list[Any]]) -> None:
        import torch

        model, config = model_of(worker), getattr(worker, "vllm_config", None)
        shapes = {
            name: torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device="meta")
            for name, (dtype, shape) in layouts.items()
        }
        self.layouts = dict(layouts)
        # A proof of its own: what is asked of the extension in the same worker must not change the map that hooks judge by.
        self.proof = _AsSent(model, config, shapes)
        self.map = self.proof.learn(shapes, "twin" if packs(worker) else "live", model.load_weights)  # the fact
        self.last: dict[str, str] = {}

    def fits(self, worker: Any, layouts: Mapping[str, list[Any]]) -> bool:
        return self.proof.holds(model_of(worker)) and self.layouts == layouts

    def coverage(self, replica: str) -> dict[str, Any]:
        """What became of every tensor of the runtime and every name since the map was learned. What never changed shows only at the end."""
        row = self.proof.coverage(replica)
        del row["fact"]
        return row

    def read(self) -> tuple[dict[str, str], dict[str, str]]:
        """The hash of each name that lies wholly here, and by which method it was read; a name that no method proves has none."""
        seen = self.proof.see()
        found = self.proof.hashes(seen)
        return found, {name: method for name, method in self.proof.methods(seen).items() if name in found}


class RefitRecorder:
    """The facts of this process."""

    def __init__(self, path: str, framework: str) -> None:
        self.path, self.framework = path, framework
        self.process = f"{socket.gethostname()}:{os.getpid()}"
        # A pid may come back after a restart; a start time may not.
        self.incarnation = f"{self.process}:{time.time_ns()}"
        self.versions: dict[str, int] = {}
        self.active: dict[str, RefitCall] = {}
        self.relays = False  # whether this process passes on what it got from another: then what it sends is not the policy's word
        self.live: Live | None = None

    def write(self, fact: str, **fields: Any) -> None:
        """One row. A file that cannot be written is said in the log: there is no other place left."""
        row = {"fact": fact, "framework": self.framework, "process": self.process, "incarnation": self.incarnation, **fields}
        try:
            facts.append(self.path, row)
        except Exception as error:  # noqa: BLE001 - as in `guard`, which itself ends here
            with contextlib.suppress(OSError, ValueError):  # standard output may be closed
                print(f"seatrial: refit: cannot write the fact {fact!r} to {self.path}: {error}", flush=True)

    def failed(self, where: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.write("probe_error", where=where, error=f"{type(error).__name__}: {error}", traceback=text[-4000:])

    def attached(self, module: ModuleType, target: Any, **found: Any) -> None:
        """What was found of a target (see `attach`) in a module of upstream."""
        place = {"module": target.module, "owner": target.owner, "side": target.side, "file": getattr(module, "__file__", None)}
        self.write("attached", **place, **found)

    def guard(self, where: str) -> Guard:
        """Whatever our own code raises in here is written down, and the loop goes on."""
        return Guard(self, where)

    def next(self, kind: str) -> int:
        self.versions[kind] = self.versions.get(kind, 0) + 1
        return self.versions[kind]


class Guard:
    """The run must go on as it would without us; whoever judges sees the fact. What asks a process to end passes."""

    def __init__(self, recorder: RefitRecorder, where: str) -> None:
        self._recorder, self._where = recorder, where

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self._recorder.failed(self._where, error)
            return True
        return False


class RefitCall:
    """One refit, from the first tensor to the row that says how it ended."""

    def __init__(self, recorder: RefitRecorder, entry: str, passed: Mapping[str, Any], worker: Any = None) -> None:
        self.recorder, self.entry, self.worker = recorder, entry, worker
        self.passed = {name: value for name, value in passed.items() if isinstance(value, (bool, int, float, str, type(None)))}
        self.hashes: dict[str, str] = {}
        self.cast: dict[str, set[str]] = {}
        """Hashes of the same values in other dtypes of the generator. Wider ones are not among them: what is held wider than it
        was sent is cast back where it is read, without loss."""
        self.unsigned: dict[str, set[str]] = {}
        """All of these without the sign of zeros, which does not show where the engine packs weights away."""
        self.dtypes = dtypes_of(model_of(worker)) if worker is not None else []
        self.packs = worker is not None and packs(worker)
        self.layouts: dict[str, list[Any]] = {}
        self.bytes = self.unread = 0
        self.problems: list[str] = []
        self.inside = False
        self.tee = ""

    def take(self, pairs: list[Any]) -> None:
        """Hash these tensors now. What is no named tensor, comes twice or cannot be hashed makes the call incomplete."""
        try:
            self._take(pairs)
        except Exception as error:  # noqa: BLE001 - as in `guard`; and the call must know that it lacks these names
            self.recorder.failed(f"{self.entry}: hashing", error)
            self.problems.append(f"{len(pairs)} tensors could not be hashed")

    def _take(self, pairs: list[Any]) -> None:
        good = [(str(pair[0]), pair[1]) for pair in pairs if isinstance(pair, tuple) and len(pair) == 2 and hasattr(pair[1], "detach")]
        if len(good) < len(pairs):
            self.problems.append(f"{len(pairs) - len(good)} items of the stream are not a name and a tensor")
        cast = [(name, tensor.detach().to(dtype)) for name, tensor in good for dtype in self.dtypes if loses(tensor.dtype, dtype)]
        unsigned = [(name, tensor.detach() + 0.0) for name, tensor in [*good, *cast] if self.packs and tensor.is_floating_point()]
        # By place: a name that comes twice in one batch must not end the hashing of the others.
        every = [*good, *cast, *unsigned]
        hashed = list(fingerprint.tensors((str(place), tensor) for place, (_, tensor) in enumerate(every)).values())
        for (name, tensor), value in zip(good, hashed, strict=False):
            if name in self.hashes:
                self.problems.append(f"{name} came twice")
            self.hashes[name] = value
            self.layouts[name] = [str(tensor.dtype), list(tensor.shape)]
            self.bytes += tensor.numel() * tensor.element_size()
        for place, ((name, _), value) in enumerate(list(zip(every, hashed, strict=True))[len(good) :]):
            (self.cast if place < len(cast) else self.unsigned).setdefault(name, set()).add(value)

    def watch(self, stream: Any) -> Any:
        """The same stream, hashed as it passes: a list at once, an iterator or asynchronous iterator item by item."""
        with self.recorder.guard(f"{self.entry}: watching the stream"):
            if hasattr(stream, "__aiter__"):
                return self._each_async(stream)
            if not isinstance(stream, (list, tuple)) and hasattr(stream, "__iter__"):
                return self._each(stream)
            if isinstance(stream, (list, tuple)):
                self.take(list(stream))
            else:
                self.problems.append(f"the stream is a {type(stream).__name__}, which cannot be watched")
        return stream

    def _each(self, stream: Any) -> Iterator[Any]:
        self.unread += 1
        for item in stream:
            self.take([item])
            yield item
        self.unread -= 1

    async def _each_async(self, stream: Any) -> AsyncIterator[Any]:
        self.unread += 1
        async for item in stream:
            self.take([item])
            yield item
        self.unread -= 1

    def sent(self, stage: str, raised: BaseException | None = None) -> None:
        with self.recorder.guard(f"{self.entry}: writing down"):
            self._check(raised)
            side = "relayed" if self.recorder.relays else "sent"
            self._hashes(side, self.recorder.next(f"sent {stage}"), stage=stage)

    def received(self, raised: BaseException | None = None, returned: Any = None) -> None:
        """The end of a refit in a generation worker: what arrived, and what the model holds now."""
        recorder = self.recorder
        with recorder.guard(f"{self.entry}: writing down"):
            self._check(raised, returned)
            version, replica = recorder.next("received"), replica_of(self.worker, recorder.process)
            self._hashes("received", version, replica=replica, tee=self.tee, layouts=self.layouts, runtime=held(self.worker))
            if not self.problems:
                self._prove(version, replica)
            else:
                self._refit(version, replica, {}, refused="; ".join(self.problems))

    def _check(self, raised: BaseException | None, returned: Any = None) -> None:
        if raised is not None:
            self.problems.append(f"{self.entry} raised {type(raised).__name__}")
        if returned is False:
            self.problems.append(f"{self.entry} returned False: the framework's own word for failure")
        if self.unread:
            self.problems.append("the stream was not read to its end")
        if not self.hashes:
            self.problems.append("no tensor was seen")

    def _hashes(self, side: str, version: int, **more: Any) -> None:
        step = self.passed.get("global_steps")
        row: dict[str, Any] = {"version": version, "step": step if isinstance(step, int) else None, "entry": self.entry}
        row |= {"passed": self.passed, "names": len(self.hashes), "bytes": self.bytes, "root": root(self.hashes), "hashes": self.hashes}
        self.recorder.write("hashes", side=side, **row, complete=not self.problems, problems=self.problems, **more)

    def _prove(self, version: int, replica: str) -> None:
        """Compare what arrived with what the model holds, name by name."""
        recorder = self.recorder
        if recorder.live is None or not recorder.live.fits(self.worker, self.layouts):
            recorder.live = Live(self.worker, self.layouts)
            recorder.write("map", replica=replica, **recorder.live.map)
        else:  # other weights were loaded than those that the map was learned over; at each refit, since any may damage something
            with recorder.guard(f"{self.entry}: coverage"):
                recorder.write("coverage", version=version, **recorder.live.coverage(replica))
        found, methods = recorder.live.read()
        casts, before = recorder.live.map["casts"], recorder.live.last
        own = {name: self.hashes[name] if self._right(name, value, methods.get(name), casts) else value for name, value in found.items()}
        recorder.live.last = own
        seen: dict[str, Any] = {"wrong_names": [name for name in own if own[name] != self.hashes.get(name)]}
        seen["stale_names"] = sum(before.get(name) != value for name, value in self.hashes.items())
        seen["touched_names"] = sum(before.get(name) != value for name, value in own.items())
        recorder.write("hashes", side="live", version=version, replica=replica, hashes=own, casts=casts)
        self._refit(version, replica, own, **seen, methods=dict(Counter(methods.values())))
        recorder.write("version", replica=replica, version=version, root=root(own))

    def _right(self, name: str, value: str, method: str | None, casts: Mapping[str, str]) -> bool:
        """Whether this hash is that of the value sent, as it can be read. Hashes tell dtypes apart."""
        if method == "forward":
            return name in self.hashes and value in self.unsigned.get(name, ())
        return value == self.hashes.get(name) or (name in casts and value in self.cast.get(name, ()))

    def _refit(self, version: int, replica: str, own: dict[str, str], **found: Any) -> None:
        """The fact of a refit, of which the model held the names of `own`; `found` says what was seen, or why nothing could be."""
        row: dict[str, Any] = {"index": version - 1, "step": version, "version": version, "transport": self.entry, "kind": None}
        row |= {"names": len(self.hashes), "bytes": self.bytes, "produced": root(self.hashes), "consumed": root(own) if own else None}
        row |= {"wrong_names": [], "stale_names": 0, "touched_names": 0, "methods": {}, "refused": None, **found}
        self.recorder.write("refit", replica=replica, **row)


def root(hashes: Mapping[str, str]) -> str:
    return fingerprint.digest(dict(sorted(hashes.items())))
