"""The worker extension for vLLM: `--worker-extension-cls seatrial.instruments.engines.vllm_extension.Extension`.

- Its methods are called in every worker: `POST /collective_rpc` of a server in development mode, or `LLM.collective_rpc(name, kwargs=…)`.
  All answers are plain JSON objects.
- In a vLLM process this module also registers the weight-transfer backend `seatrial`: payload files of `instruments.refit` through vLLM's
  own weight-update calls. The payload is checked whole before anything is touched. A sparse one is applied to the weights as read from
  the live model, whose fingerprint must be its base.
- `update_weights` with names, dtypes and shapes is what vLLM's NCCL backend takes: the tensors come over the stream of `vllm_server`. A
  tensor that the trainer forgets stays as it is, and is for the readback to find.
- A refusal leaves weights and version as they were. A load that raises leaves the weights torn: the next payload must be full.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from seatrial.instruments import executed, provenance
from seatrial.instruments.bits import fingerprint
from seatrial.instruments.engines import vllm_weights
from seatrial.instruments.engines.vllm_server import FAULTS_ALLOWED, Receiver
from seatrial.instruments.engines.vllm_weights import Proof, proof_of, reference_of
from seatrial.instruments.refit import payload
from seatrial.instruments.refit.payload_header import RefitRefused
from seatrial.instruments.refit.weight_transfer import Consumer

BACKEND = "seatrial"


@dataclass
class Init:
    """What the policy says once: with an address, that it will stream; the fields are those of vLLM's NCCL backend."""

    version: int = 0
    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int = 1
    world_size: int = 2
    packed: bool = False


@dataclass
class Update:
    """What it says for each refit: where the payload lies, or what it is about to stream."""

    path: str = ""
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    packed: bool = False


def receive(proof: Proof, path: str) -> None:
    """Bring the live model to the payload's version, or refuse."""
    import torch

    header = payload.read(path).header
    base = _base(proof) if header.transport == "sparse" else {}
    sent = {entry.name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype.removeprefix("torch."))) for entry in header.tensors}
    if proof.map is not None:
        known = set(proof.map.ids.names)
        for reason, names in (("unknown-name", sent.keys() - known), ("absent-name", known - sent.keys())):
            if names:
                raise RefitRefused(reason, sorted(names))
    consumer = Consumer(base or sent, proof.version)
    consumer.apply(path)
    device = next(proof.model.parameters()).device
    proof.load((name, value.to(device)) for name, value in consumer.weights.items())
    if device.type != "cpu":
        torch.accelerator.synchronize()
    proof.version = consumer.version
    proof.look()


def receive_stream(proof: Proof, stream: Receiver, update: Update) -> None:
    """Load what comes, under the names that were announced."""
    device = next(proof.model.parameters()).device
    # All of it first: a stream that breaks off leaves the model as it was.
    received = [(name, value.to(device)) for name, value in stream.receive(update.names, update.dtype_names, update.shapes)]
    proof.load(received)
    proof.version += 1
    proof.look()


def _base(proof: Proof) -> dict[str, Any]:
    """The live weights by exported name; a name whose copies disagree cannot be a base."""
    import torch

    if proof.map is None:
        fix = "call seatrial_map first, or send it in full"
        raise RefitRefused("wrong-base", fix=fix, detail="what is held cannot be read without a map")
    found: dict[str, Any] = {}
    torn = []
    for name, tensor in proof.gathered(proof.see()):
        held = tensor.to("cpu", copy=True).contiguous()
        if not torch.equal(found.setdefault(name, held), held):
            torn.append(name)
    if torn:
        raise RefitRefused("wrong-base", torn, fix="restart the engine", detail="the engine holds two versions of a tied weight")
    return found


def register() -> None:
    """Make the backend known to vLLM in this process."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    class Engine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not installed where types are checked
        """What vLLM calls; the same for all versions that have start, update and finish."""

        init_info_cls, update_info_cls = Init, Update
        supports_draft_weight_update = False

        stream: Receiver | None = None

        def init_transfer_engine(self, init_info: Init) -> None:
            proof_of(self.model, self.vllm_config).version = init_info.version
            if init_info.master_address is not None and init_info.master_port is not None:
                self.shutdown()
                self.stream = Receiver(init_info.master_address, init_info.master_port)

        def start_weight_update(self) -> None:
            """Nothing: the weights are touched only when the payload was found good."""

        def finish_weight_update(self) -> None:
            """Nothing: an update is whole when it returns."""

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Update) -> None:
            proof = proof_of(self.model, self.vllm_config)
            proof.refused = None
            try:
                if not update_info.names:
                    receive(proof, update_info.path)
                elif self.stream is None:
                    raise RuntimeError("seatrial: no trainer streams: none was named, or an earlier update failed")
                else:
                    receive_stream(proof, self.stream, update_info)
            except Exception as error:
                if isinstance(error, RefitRefused):  # callers over HTTP learn only that the route failed
                    proof.refused = {"reason": error.reason, "names": list(error.names), "text": str(error)}
                if update_info.names:
                    self.shutdown()  # a client that asks again would wait for tensors that nobody sends
                raise

        def shutdown(self) -> None:
            if self.stream is not None:
                self.stream.close()
                self.stream = None

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            raise NotImplementedError("the policy writes payload files with seatrial.instruments.refit.weight_transfer")

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, Engine)


FAULTS = ("flip-bit", "swap-tensors")


class Extension:
    """Mixed into vLLM's worker class."""

    def seatrial_version(self) -> dict[str, Any]:
        """The version that was loaded last through the backend, which life of the worker this is, and why the last payload was refused."""
        proof = _proof(self)
        held = {"version": proof.version, "incarnation": proof.incarnation, "refused": proof.refused}
        return {**held, "rank": int(getattr(self, "rank", 0))}

    def seatrial_state(self) -> dict[str, Any]:
        """Every runtime parameter and buffer, tied and non-persistent ones included, as it lies in memory."""
        model = _proof(self).model
        hashes = fingerprint.model(model)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        rows = {}
        for name, value in fingerprint.named_state(model):
            rows[name] = {"hash": hashes[name], "dtype": str(value.dtype), "shape": list(value.shape), "parameter": name in parameters}
            rows[name]["storage"] = value.untyped_storage().data_ptr()
        return {"tensors": rows, "root": fingerprint.digest(hashes)}

    def seatrial_map(self, reference: str, through: str = "") -> dict[str, Any]:
        """Learn the coordinate map with the names, shapes and dtypes of a reference; by a twin where vLLM packs weights, else live."""
        return _proof(self).learn(reference_of(reference), through or ("twin" if vllm_weights.packs() else "live"))

    def seatrial_read(self, reference: str = "") -> dict[str, Any]:
        """The fingerprint of the live weights under each exported name that is wholly on this rank, and by which method it was read."""
        proof = _proof(self)
        seen = proof.see()
        hashes = proof.hashes(seen, reference_of(reference) if reference else None)
        methods = {name: method for name, method in proof.methods(seen).items() if name in hashes}
        absent = [name for name in proof.learned().ids.names if name not in hashes]
        return {"hashes": hashes, "root": fingerprint.tree(hashes).root, "methods": methods, "absent": absent, "version": proof.version}

    def seatrial_verify(self, reference: str) -> dict[str, Any]:
        """Compare the live weights with a reference, element for element; also the parts that a sharded rank holds."""
        proof = _proof(self)
        seen = proof.see()
        wrong, methods = proof.wrong(seen, reference_of(reference)), proof.methods(seen)
        learned = proof.learned()
        sizes = zip(learned.ids.names, learned.ids.sizes.tolist(), strict=True)
        here = sum(not size or learned.unconsumed.get(name) != size for name, size in sizes)  # the others are on other ranks, or lost
        return {"wrong": wrong, "names": here, "methods": dict(Counter(methods.values())), "version": proof.version}

    def seatrial_coverage(self) -> dict[str, Any]:
        return _proof(self).coverage()

    def seatrial_imports(self, path: str, process: str, packages: list[str], expected: dict[str, str]) -> list[str]:
        """Append to `path` where this worker's packages come from, and where others under test would; what is wrong with it."""
        others = [name for name in expected if name not in packages]
        rows = [*provenance.report(path, process, packages, expected), *provenance.locate(path, process, others, expected)]
        return provenance.verify(rows)

    def seatrial_loaded(self, path: str, process: str, roots: list[str]) -> None:
        """Append to `path` which files below each root this worker has loaded so far; and what ran of changed ones, beside it."""
        provenance.loaded(path, process, roots)
        executed.flush()

    def seatrial_break(self, fault: str) -> dict[str, Any]:
        """Damage live weights on purpose: one of FAULTS. For showing that the probe sees it, in a server that was started for it."""
        if os.environ.get(FAULTS_ALLOWED) != "1":
            raise PermissionError(f"seatrial_break: this server was not started for it: {FAULTS_ALLOWED}=1 is not in its environment")
        import torch

        named = dict(_proof(self).model.named_parameters())
        one, two = [name for name, value in named.items() if value.dim() == 1 and value.numel() and "layers" in name][:2]
        first, second = named[one].data, named[two].data
        if fault not in FAULTS or first.shape != second.shape:
            raise ValueError(f"seatrial_break: {fault!r} cannot be done with {one} and {two}; known: {', '.join(FAULTS)}")
        if fault == "flip-bit":
            first.view(torch.uint8)[0] ^= 1
        else:
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)
        return {"broken": [one] if fault == "flip-bit" else [one, two]}


def _proof(worker: Any) -> Proof:
    return proof_of(worker.model_runner.get_model(), worker.vllm_config)


if "vllm" in sys.modules:
    register()
