"""Cases of tests/real/test_judged.py: real hooks write facts of runs below a directory, which are judged outside. Needs torch."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from seatrial.instruments.bits import fingerprint
from tests.real.attached import VLLM, Model, World, export, reused

HALF = torch.bfloat16


def world(name: str) -> World:
    """A process with hooks, whose facts stay for the judge."""
    place = Path(os.environ["JUDGED"], name)
    place.mkdir(exist_ok=True)
    return World(place, "verl")


def send(made: World, weights: Any) -> None:
    """The policy's part of a refit."""
    sender = made.module(f"{VLLM['verl']}.bucketed_weight_transfer").BucketedWeightSender("ipc://x")
    asyncio.run(sender.async_send_weights(weights))


def refits(made: World, worker: Any, seeds: range = range(3), dtype: torch.dtype = HALF) -> None:
    """Refits with other weights each time."""
    for seed in seeds:
        send(made, reused(export(seed, dtype)))
        worker.update_weights_from_ipc()
        worker.model_runner.model.refits += 1


def case_clean() -> None:
    made = world("clean")
    refits(made, made.worker(Model(HALF)))


def case_cast() -> None:
    made = world("cast")
    refits(made, made.worker(Model(HALF)), dtype=torch.float32)


def case_skipped_tensor() -> None:
    made = world("skipped")
    refits(made, made.worker(Model(HALF, skip="k_proj.weight")))


def case_missed_last_refit() -> None:
    made = world("missed")
    refits(made, made.worker(Model(HALF)), range(2))
    send(made, reused(export(2)))


def case_missing_class() -> None:
    made = world("class")
    refits(made, made.worker(Model(HALF)))
    made.hook().apply(ModuleType("verl.checkpoint_engine.base"))


def case_other_senders() -> None:
    made = world("senders")
    refits(made, made.worker(Model(HALF)))
    other = world("senders")  # another process of the same run
    for seed in (0, 7, 2):
        send(other, reused(export(seed)))


def case_restarted_generator() -> None:
    made = world("restarted")
    refits(made, made.worker(Model(HALF)), range(2))
    recorder, again = made.hook().recorder, world("restarted")
    again.hook().recorder.versions["sent transfer"] = recorder.versions["sent transfer"]
    refits(again, again.worker(Model(HALF)), range(2, 4))


def case_probe_error() -> None:
    made = world("error")
    worker = made.worker(Model(HALF))
    refits(made, worker)
    with mock.patch.object(fingerprint, "tensors", side_effect=MemoryError("no memory for hashes")):
        refits(made, worker, range(3, 4))


def relay(name: str, wrong: str) -> None:
    """Policy, relay and generator; the relay's copy of one tensor may be off. What is one process here are two in a run."""
    made = world(name)
    worker, recorder = made.worker(Model(HALF)), made.hook().recorder
    base = made.module("verl.checkpoint_engine.base").CheckpointEngine
    sent: list[Any] = []

    class Engine(base):  # type: ignore[valid-type,misc]
        """A checkpoint engine."""

        async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
            sent[:] = [(each, value.clone()) for each, value in weights]

        def receive_weights(self, global_steps: int | None = None) -> Any:
            return ((each, value + 1 if each == wrong else value) for each, value in sent)

    for seed in range(3):
        recorder.relays = False
        asyncio.run(Engine().send_weights(reused(export(seed))))
        send(made, Engine().receive_weights())
        worker.update_weights_from_ipc()


def case_relay() -> None:
    relay("relay", "")


def case_corrupt_relay() -> None:
    relay("corrupt", "q_proj.weight")
