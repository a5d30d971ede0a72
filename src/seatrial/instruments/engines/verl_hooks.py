"""What of verl is watched: its worker extension for vLLM, the sender of its buckets, and its checkpoint engines.

Names as of 1dda039b9 (2026-08-22); the same since v0.7.1. tests/data/refit/verl.json holds the signatures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from seatrial.instruments.engines.attach import EXPORT, GENERATOR, POLICY, Target, sending
from seatrial.instruments.engines.recorder import RefitRecorder

VLLM = "verl.workers.rollout.vllm_rollout"
ENGINES = "verl.checkpoint_engine.base"


def _adapter(_: str, given: Mapping[str, Any]) -> str:
    """Adapters are added beside the base weights, not loaded into them."""
    beside = given.get("peft_config") and given.get("base_sync_done")
    return "an adapter (LoRA) was sent: what arrived was seen, what the generator made of it is not read back" if beside else ""


def _in_group(given: Mapping[str, Any]) -> bool:
    """Ranks below zero only run the export."""
    rank = getattr(given.get("self"), "rank", 0)
    return not isinstance(rank, int) or rank >= 0


SEND = Target(ENGINES, POLICY, "CheckpointEngine", ("send_weights",), "weights", stage=EXPORT, sends=_in_group)
"""Every engine, of verl or not, is a subclass, and each sends in its own way."""
TARGETS = (
    Target(
        f"{VLLM}.utils",
        GENERATOR,
        "vLLMColocateWorkerExtension",
        ("update_weights_from_ipc",),
        "_update_weights",
        extends=True,
        aside=_adapter,
    ),
    Target(f"{VLLM}.bucketed_weight_transfer", POLICY, "BucketedWeightSender", ("async_send_weights",), "weights"),
)


def watch_engines(module: ModuleType, recorder: RefitRecorder) -> None:
    """Wrap what each checkpoint engine sends, as its class is made."""
    base: Any = getattr(module, "CheckpointEngine", None)
    found = [name for name in ("send_weights", "receive_weights") if inspect.isroutine(getattr(base, name, None))]
    missing = [name for name in ("send_weights", "receive_weights") if name not in found]
    state = {"owner_found": base is not None, "found": found, "missing": missing, "stream": "", "optional": False}
    recorder.attached(module, SEND, **state, methods=[])
    if base is None:
        return
    inherited = base.__init_subclass__

    def __init_subclass__(cls: type, /, **kwargs: Any) -> None:
        inherited(**kwargs)
        with recorder.guard(f"{cls.__module__}.{cls.__name__}: watching"):
            _watch(cls, recorder)

    base.__init_subclass__ = classmethod(__init_subclass__)


def _watch(cls: Any, recorder: RefitRecorder) -> None:
    send, receive = vars(cls).get("send_weights"), vars(cls).get("receive_weights")
    if inspect.iscoroutinefunction(send):  # a plain function only keeps the stream for somebody in the same process
        cls.send_weights = sending(send, recorder, SEND)
    if receive is not None:
        cls.receive_weights = _relaying(receive, recorder)


def _relaying(original: Callable[..., Any], recorder: RefitRecorder) -> Callable[..., Any]:
    """A process that receives from a checkpoint engine passes on what it got."""

    def receive_weights(*args: Any, **kwargs: Any) -> Any:
        recorder.relays = True
        return original(*args, **kwargs)

    return receive_weights


SPECIAL = {ENGINES: watch_engines}
