"""The weight-transfer backend `seatrial` for vLLM: payload files of `probes.refit` through vLLM's own weight-update calls.

- `update_weights` gets `{"path": …}`. The payload is checked whole before anything is touched: bytes, version, base, names, layout.
- A sparse payload is applied to the weights as they are read from the live model, whose fingerprint must be the payload's base.
- Loading goes through `model.load_weights` inside vLLM's layerwise reload.
- `update_weights` with `{"names": …, "dtype_names": …, "shapes": …}` is what vLLM's NCCL backend takes: the tensors then come over the
  connection of `stream`, and are loaded as they come, as that backend does. Nothing is compared with what the model has: a tensor that
  the trainer forgets stays as it is, and is for the readback to find.
- A refusal is raised to the caller, and leaves the weights and the version as they were. A load that raises leaves the version as it
  was and the weights torn: the next payload must be full, since a torn base is refused.
Whether the weights arrived is not this module's word: `seatrial_read` and `seatrial_verify` look at what the engine holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from seatrial.probes.engines.stream import Receiver
from seatrial.probes.engines.vllm_proof import Proof, proof_of
from seatrial.probes.refit import payload
from seatrial.probes.refit.consumer import Consumer
from seatrial.probes.refit.errors import RefitRefused

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
        _require_names(sent.keys(), set(proof.map.ids.names))
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


def _require_names(sent: Collection[str], known: Collection[str]) -> None:
    for reason, names in (("unknown-name", set(sent) - set(known)), ("absent-name", set(known) - set(sent))):
        if names:
            raise RefitRefused(reason, sorted(names))


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
            if update_info.names:
                if self.stream is None:
                    raise RuntimeError("seatrial: no trainer streams: none was named, or an earlier update failed")
                try:
                    receive_stream(proof, self.stream, update_info)
                except Exception:
                    self.shutdown()  # a client that asks again would wait for tensors that nobody sends
                    raise
                return
            try:
                receive(proof, update_info.path)
            except RefitRefused as error:  # callers over HTTP learn only that the route failed
                proof.refused = {"reason": error.reason, "names": list(error.names), "text": str(error)}
                raise

        def shutdown(self) -> None:
            if self.stream is not None:
                self.stream.close()
                self.stream = None

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            raise NotImplementedError("the policy writes payload files with seatrial.probes.refit.producer")

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, Engine)
