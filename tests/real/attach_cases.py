"""Cases of tests/real/test_attach.py; run inside an environment that has torch."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.engines import attach, nemo_rl_hooks
from seatrial.instruments.refit import agreement
from tests.real.attached import SIZE, VLLM, K, Model, Q, V, World, export, reused


def send(world: World, weights: Any) -> Any:
    """verl's way."""
    sender = world.module(f"{VLLM['verl']}.bucketed_weight_transfer").BucketedWeightSender("ipc://x")
    return asyncio.run(sender.async_send_weights(weights))


def refits(world: World, worker: Any, count: int, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, torch.Tensor]]:
    """Several refits with other weights each time."""
    sent = []
    for seed in range(count):
        sent.append(export(seed, dtype))
        assert send(world, reused(sent[-1])) == "sent"
        assert worker.update_weights_from_ipc(base_sync_done=True) == "loaded"
        worker.model_runner.model.refits += 1
    return sent


def raised(call: Callable[[], Any]) -> str:
    """What a call raises; there is no pytest in here."""
    try:
        call()
    except (OSError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def case_a_clean_run_proves_itself(tmp: Path) -> None:
    world = World(tmp, "verl")
    model = Model(torch.bfloat16)
    sent = refits(world, world.worker(model), 3)
    assert agreement.problems(world.rows()) == [], agreement.problems(world.rows())
    for version, weights in enumerate(sent, 1):
        for side in ("sent", "received", "live"):
            row = world.sides(side)[version - 1]
            assert (row["version"], row["hashes"]) == (version, fingerprint.tensors(weights.items())), side
    last = world.rows("refit")[-1]
    assert (last["index"], last["names"], last["methods"], last["wrong_names"], last["refused"]) == (2, 4, {"read": 4}, [], None)
    assert (last["stale_names"], last["touched_names"]) == (4, 4)
    assert last["produced"] == last["consumed"]
    assert [row["version"] for row in world.rows("version")] == [1, 2, 3]
    assert [row["restored"] for row in world.rows("map")] == [True]
    assert world.sides("received")[0]["passed"] == {"peft_config": None, "base_sync_done": True, "use_shm": False}
    assert torch.equal(model.qkv_proj.weight[SIZE : 2 * SIZE], sent[-1][K]), "learning the map must leave the weights as they were"


def case_a_tensor_that_the_loader_skips_is_named(tmp: Path) -> None:
    world = World(tmp, "verl")
    refits(world, world.worker(Model(torch.bfloat16, skip=K)), 2)
    assert [row["wrong_names"] for row in world.rows("refit")] == [[], [K]]
    row = world.sides("live")[1]
    assert row["hashes"][K] != world.sides("sent")[1]["hashes"][K]


def case_what_a_refit_damages_beside_the_weights_is_named(tmp: Path) -> None:
    world = World(tmp, "verl")
    model = Model(torch.bfloat16)
    model.register_buffer("table", torch.ones(4), persistent=False)
    worker = world.worker(model)
    refits(world, worker, 2)
    model.head = torch.nn.Parameter(model.embed.detach().clone())  # untied: nothing loads it any more
    model.table[2] += 1
    refits(world, worker, 2)
    assert [row["wrong_names"] for row in world.rows("refit")][:2] == [[], []]
    assert world.rows("refit")[2]["wrong_names"] == ["embed", "table"]
    held = world.sides("live")[2]["hashes"]
    assert held["embed"].startswith("torn-")
    assert held["table"].startswith("moved-")


def case_another_model_in_the_worker_gets_a_map_of_its_own(tmp: Path) -> None:
    world = World(tmp, "verl")
    first = Model(torch.bfloat16)  # somebody keeps it
    worker = world.worker(first)
    refits(world, worker, 1)
    worker.model_runner.model = Model(torch.bfloat16, skip=K)
    refits(world, worker, 2)
    assert [row["wrong_names"] for row in world.rows("refit")] == [[], [], [K]]
    assert len(world.rows("map")) == 2


def case_bits_that_change_on_the_way_are_named(tmp: Path) -> None:
    world = World(tmp, "verl")
    worker = world.worker(Model(torch.bfloat16))
    world.module("wire").BROKEN.append(Q)
    refits(world, worker, 1)
    found = agreement.problems(world.rows())
    assert len(found) == 1, found
    assert f"1 of 4 names otherwise than sent: {Q}" in found[0], found


def case_wider_weights_are_compared_as_the_generator_casts_them(tmp: Path) -> None:
    world = World(tmp, "verl")
    refits(world, world.worker(Model(torch.bfloat16)), 2, torch.float32)
    assert [(row["wrong_names"], row["methods"]) for row in world.rows("refit")] == [([], {"read": 4})] * 2
    assert set(world.sides("live")[0]["casts"]) == {"embed", Q, K, V}
    assert agreement.problems(world.rows()) == []


def case_a_lost_cast_is_not_taken_for_equal(tmp: Path) -> None:
    world = World(tmp, "verl")
    worker = world.worker(Model(torch.bfloat16, skip=V))
    refits(world, worker, 2, torch.float32)
    assert [row["wrong_names"] for row in world.rows("refit")] == [[], [V]]


def case_an_adapter_beside_the_weights_is_not_taken_for_proven(tmp: Path) -> None:
    world = World(tmp, "verl")
    worker = world.worker(Model(torch.bfloat16))
    send(world, iter(export(1).items()))
    worker.update_weights_from_ipc(peft_config={"r": 8}, base_sync_done=True)
    assert "an adapter (LoRA) was sent" in world.rows("refit")[0]["refused"]
    assert world.rows("map") == []


def case_no_tensor_is_kept(tmp: Path) -> None:
    world = World(tmp, "verl")
    worker = world.worker(Model(torch.bfloat16))
    kept: list[weakref.ref[torch.Tensor]] = []

    def fresh() -> Any:
        for name, value in export(1).items():
            own = value.clone()
            kept.append(weakref.ref(own))
            yield name, own

    send(world, fresh())
    worker.update_weights_from_ipc()
    gc.collect()
    assert len(kept) == 4
    assert not [reference for reference in kept if reference() is not None]


def case_asynchronous_streams_pass_through(tmp: Path) -> None:
    world = World(tmp, "verl")

    async def stream() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for pair in export(1).items():
            yield pair

    assert send(world, stream()) == "sent"
    row = world.sides("sent")[0]
    assert (row["complete"], row["hashes"]) == (True, fingerprint.tensors(export(1).items()))


def case_exceptions_of_upstream_pass_and_are_recorded(tmp: Path) -> None:
    world = World(tmp, "verl")
    worker = world.worker(Model(torch.bfloat16))
    assert raised(lambda: worker.update_weights_from_ipc(use_shm=True)) == "OSError: no shared memory"
    (row,) = world.rows("refit")
    assert "raised OSError" in row["refused"]
    assert "unexpected keyword argument 'nonsense'" in raised(lambda: worker.update_weights_from_ipc(nonsense=1))


def case_a_probe_that_fails_breaks_nothing(tmp: Path) -> None:
    world = World(tmp, "verl")
    worker = world.worker(Model(torch.bfloat16))
    with mock.patch.object(fingerprint, "tensors", side_effect=MemoryError("no memory for hashes")):
        assert send(world, iter(export(1).items())) == "sent"
        assert worker.update_weights_from_ipc() == "loaded"
    assert torch.equal(worker.model_runner.model.embed, export(1)["embed"])
    assert "no memory for hashes" in world.rows("probe_error")[0]["error"]
    assert any("could not be hashed" in text for text in agreement.problems(world.rows()))


def case_nemo_rl_streams_and_broadcasts(tmp: Path) -> None:
    world = World(tmp, "nemo_rl")
    worker = world.worker(Model(torch.bfloat16))
    stream = world.module("nemo_rl.models.policy.utils").stream_weights_via_ipc_zmq_impl
    packed = world.module("nemo_rl.utils.packed_tensor").packed_broadcast_producer
    stream(reused(export(1)), 1024, zmq_socket=None, rank=0, worker_name="policy")
    assert worker.update_weights_via_ipc_zmq() is True
    wide = export(2, torch.float32)
    for rank in (1, 0):  # every rank takes part, one sends; and what it sends is made by the function
        packed(iter(wide.items()), SimpleNamespace(rank=rank), 0, lambda item: item[1].to(torch.bfloat16))
    assert worker.update_weights_from_collective() is True
    assert agreement.problems(world.rows()) == [], agreement.problems(world.rows())
    assert [row["entry"] for row in world.sides("received")] == ["update_weights_via_ipc_zmq", "update_weights_from_collective"]
    assert world.sides("sent")[1]["hashes"] == fingerprint.tensors((name, value.bfloat16()) for name, value in wide.items())
    assert [row["wrong_names"] for row in world.rows("refit")] == [[], []]


def case_a_refit_that_writes_past_the_loader_is_not_proven(tmp: Path) -> None:
    world = World(tmp, "nemo_rl")
    worker = world.worker(Model(torch.bfloat16))
    stream = world.module("nemo_rl.models.policy.utils").stream_weights_via_ipc_zmq_impl
    stream(iter(export(1).items()), 1024, None, 0, "policy")
    assert worker.nccl_reshard_refit() is True
    worker.finish_sparse_delta_refit()
    refused = [row["refused"] for row in world.rows("refit")]
    assert "past load_weights" in refused[0]
    assert "sparse payloads carry differences" in refused[1]


def case_a_failure_that_upstream_only_returns_is_not_proven(tmp: Path) -> None:
    world = World(tmp, "nemo_rl")
    worker = world.worker(Model(torch.bfloat16))
    world.module("wire").SENT.append(("unknown", torch.zeros(1)))
    assert worker.update_weights_via_ipc_zmq() is False
    assert "returned False" in world.rows("refit")[0]["refused"]


def case_without_a_stream_method_the_loader_is_watched(tmp: Path) -> None:
    world = World(tmp, "nemo_rl")
    module = world.module(f"{VLLM['nemo_rl']}.vllm_backend")
    world.module("nemo_rl.models.policy.utils").stream_weights_via_ipc_zmq_impl(iter(export(1).items()), 1, None, 0, "policy")
    wire = world.module("wire")

    class Older(module.VllmInternalWorkerExtension):  # type: ignore[name-defined,misc]
        """As v0.4 to v0.6 have it: the loader is called by the entry point itself."""

        _load_weights = None

        def load(self) -> None:
            """Load all."""
            for weights in wire.batches():
                self.model_runner.model.load_weights(weights=weights)

    recorder = next(finder for finder in sys.meta_path if isinstance(finder, attach.Hook)).recorder
    Older.load = attach.receiving(Older.load, recorder, nemo_rl_hooks.TARGETS[0])  # type: ignore[method-assign]
    worker = Older()
    worker.model_runner = SimpleNamespace(model=Model(torch.bfloat16))
    worker.load()
    (row,) = world.sides("received")
    assert (row["tee"], row["hashes"]) == ("model.load_weights", fingerprint.tensors(export(1).items())), row
    assert "load_weights" not in vars(worker.model_runner.model)


def case_our_methods_are_added(tmp: Path) -> None:
    world = World(tmp, "verl")
    worker = world.worker(Model(torch.bfloat16))
    row = next(row for row in world.rows("attached") if row["side"] == "generator")
    assert row["methods"] == sorted(attach.METHODS)
    assert all(callable(getattr(worker, name)) for name in attach.METHODS)
    assert (row["found"], row["missing"], row["stream"]) == (["update_weights_from_ipc"], [], "_update_weights")


def case_checkpoint_engines_and_what_is_relayed(tmp: Path) -> None:
    world = World(tmp, "verl")
    base = world.module("verl.checkpoint_engine.base").CheckpointEngine

    class Engine(base):  # type: ignore[valid-type,misc]
        """An engine of somebody else."""

        rank = 0

        async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, int]:
            return {"names": len(list(weights))}

        def receive_weights(self, global_steps: int | None = None) -> Any:
            yield from export(1).items()

    class Delta(Engine):
        """It drives the training engine itself."""

        async def send_weights(self, engine: Any, global_steps: int | None = None) -> dict[str, int]:
            return {}

    assert asyncio.run(Engine().send_weights(iter(export(1).items()), global_steps=7)) == {"names": 4}
    row = world.sides("sent")[0]
    assert (row["stage"], row["step"], row["complete"]) == ("export", 7, True)
    asyncio.run(Delta().send_weights(object()))
    assert "no parameter weights" in world.sides("sent")[1]["problems"][0]
    idle = Engine()
    idle.rank = -1
    asyncio.run(idle.send_weights(iter(export(1).items())))
    assert len(world.sides("sent")) == 2
    send(world, Engine().receive_weights())
    assert world.sides("relayed")[0]["hashes"] == row["hashes"]
