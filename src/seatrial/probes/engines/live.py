"""What the model of a generation worker holds, by exported name: the proof of vllm_proof, for hooks. Runs inside the worker.

- The map is learned once, after the first refit, through the model's own load_weights, and the weights are restored bit for bit.
  It needs a second copy of the weights for that time, on the host. Where vLLM packs weights away, it is learned on a twin.
- A name that does not lie wholly on this rank, or that the loader transforms, is not proven here; it is left out, and counted.
- Where the runtime has another dtype than what was sent, the value sent is cast likewise, and compared with that. A wider one (a
  router's gate in fp32) is cast back instead, and only if that loses no bit: otherwise it is not what was sent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from seatrial.probes import fingerprint
from seatrial.probes.engines import vllm_reader
from seatrial.probes.engines.vllm_proof import Proof
from seatrial.probes.engines.vllm_reader import Photograph
from seatrial.probes.refit.mapping import bits


def model_of(worker: Any) -> Any:
    """The model of a vLLM worker, without what captures its graphs."""
    runner = worker.model_runner
    return runner.get_model() if hasattr(runner, "get_model") else runner.model


def replica_of(worker: Any, process: str) -> str:
    """A name for this rank of this engine. A loop that numbers its engines keeps the number over a restart."""
    return f"{os.environ.get('VERL_REPLICA_RANK', process)}/{getattr(worker, 'rank', 0)}"


def packs(worker: Any) -> bool:
    """Whether the engine of this worker packs weights away."""
    return hasattr(worker, "vllm_config") and "vllm" in sys.modules and vllm_reader.packs()


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
        """See `Proof`."""
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
        self.map = self.proof.learn(shapes, "twin" if packs(worker) else "live", model.load_weights)
        """The fact."""
        self.last: dict[str, str] = {}

    def fits(self, worker: Any, layouts: Mapping[str, list[Any]]) -> bool:
        """Whether this is the proof of the model that the worker has now, for this export."""
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
