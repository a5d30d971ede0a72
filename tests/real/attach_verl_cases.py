"""Cases of tests/real/test_attach_verl.py: verl's own code, as far as it runs without vLLM.

The package around the sender demands vLLM, the sender itself does not: an empty package of ours stands in its place, and the
module below it is verl's, imported through the finders as always.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import verl.workers.rollout

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.engines import attach

PACKAGE = "verl.workers.rollout.vllm_rollout"


def rows(fact: str) -> list[dict[str, Any]]:
    """The facts so far."""
    found = [json.loads(line) for line in Path(os.environ[attach.VARIABLE]).read_text().splitlines()]
    return [row for row in found if row["fact"] == fact]


def transfer() -> ModuleType:
    """verl's module with sender and receiver."""
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE)
        package.__path__ = [str(Path(str(verl.workers.rollout.__file__)).with_name("vllm_rollout"))]
        sys.modules[PACKAGE] = package
    return importlib.import_module(f"{PACKAGE}.bucketed_weight_transfer")


def case_the_start_up_path_of_the_witness_started_it() -> None:
    assert any(isinstance(finder, attach.Hook) for finder in sys.meta_path)
    (row,) = rows("waiting")
    assert (row["framework"], row["late"]) == ("verl", [])
    assert Path(os.environ["SEATRIAL_IMPORTS"], "imports.jsonl").is_file()


def case_what_the_real_sender_sends_is_what_the_real_receiver_gets(tmp: Path) -> None:
    module = transfer()
    row = next(row for row in rows("attached") if row["owner"] == "BucketedWeightSender")
    assert (row["found"], row["missing"], row["file"]) == (["async_send_weights"], [], module.__file__)
    draw = torch.Generator().manual_seed(1)
    weights = {f"w{place}": torch.randn(200, 300, generator=draw).to(torch.bfloat16) for place in range(20)}
    weights["odd"] = torch.randn(7, generator=draw)
    handle = f"ipc://{tmp}/s.sock"
    got: dict[str, str] = {}
    buckets: list[bool] = []

    def bucket(pairs: list[tuple[str, torch.Tensor]], is_last: bool) -> None:
        got.update(fingerprint.tensors(pairs))
        buckets.append(is_last)

    receiver = module.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    thread = threading.Thread(target=receiver.receive_weights, args=(bucket,), daemon=True)
    thread.start()
    sender = module.BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    asyncio.run(asyncio.wait_for(sender.async_send_weights(iter(weights.items())), 60))
    thread.join(60)
    assert not thread.is_alive()
    sent = next(row for row in rows("hashes") if row["entry"] == "async_send_weights")
    assert sent["hashes"] == got == fingerprint.tensors(weights.items())
    assert (sent["side"], sent["complete"], len(buckets)) == ("sent", True, 3)
    assert rows("probe_error") == []


def case_engines_made_for_the_real_registry_are_watched() -> None:
    base = importlib.import_module("verl.checkpoint_engine.base")
    assert next(row for row in rows("attached") if row["owner"] == "CheckpointEngine")["missing"] == []
    weights = {"w": torch.ones(3)}

    @base.CheckpointEngineRegistry.register("seatrial-test")
    class Engine(base.CheckpointEngine):  # type: ignore[name-defined,misc]
        """Abstract methods of verl's are of no use here."""

        __abstractmethods__: frozenset[str] = frozenset()

        async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, int]:
            return {"names": len([name async for name, _ in base.ensure_async_iterator(weights)])}

    Engine.__abstractmethods__ = frozenset()
    made = base.CheckpointEngineRegistry.new("seatrial-test")
    assert asyncio.run(made.send_weights(iter(weights.items()), global_steps=3)) == {"names": 1}
    row = next(row for row in rows("hashes") if row["stage"] == "export")
    assert (row["hashes"], row["step"], row["complete"]) == (fingerprint.tensors(weights.items()), 3, True)
