"""More cases of tests/real/test_attach.py: what a runtime holds in other dtypes or beside the weights, and a probe that fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from seatrial.instruments.engines import attach, nemo_rl_hooks
from seatrial.instruments.engines import recorder as live
from seatrial.instruments.refit import agreement
from tests.real.attach_cases import send
from tests.real.attached import VLLM, Model, World, export

BF16, FP32 = torch.bfloat16, torch.float32
EMBED, GATE = "embed_tokens.weight", "gate.weight"
ROWS, PADDED = 8, 10


class Routed(torch.nn.Module):  # type: ignore[misc]
    """As engines hold a mixture of experts: the vocabulary is padded, and the gate of the router has a dtype of its own."""

    def __init__(self, most: torch.dtype = BF16, gate: torch.dtype = FP32) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Linear(4, PADDED, bias=False, dtype=most)
        self.gate = torch.nn.Linear(4, 2, bias=False, dtype=gate)
        self.fault = ""
        self.requires_grad_(False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The loader, with its faults."""
        own = dict(self.named_parameters())
        for name, value in weights:
            own[name][: value.shape[0]].copy_(value)
        if self.fault == "padding":
            self.embed_tokens.weight[ROWS:] = torch.randn(PADDED - ROWS, 4)
        if self.fault == "less than a bf16 shows":
            self.gate.weight[0, 0] *= 1 + 2**-20
        if self.fault == "gate":
            self.gate.weight[0, 0] += 1


def weights(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What a policy exports."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, 4, generator=draw).to(dtype) for name, rows in ((EMBED, ROWS), (GATE, 2))}


def refitted(tmp: Path, model: Routed, sent: torch.dtype, fault: str = "", at: int = 3) -> World:
    """Five refits, the last ones of them with a fault."""
    world = World(tmp, "verl")
    worker = world.worker(model)
    for seed in range(5):
        send(world, iter(weights(seed, sent).items()))
        model.fault = fault if seed >= at else ""
        worker.update_weights_from_ipc()
        model.fault = ""
    assert world.rows("probe_error") == []
    return world


def wrong(world: World) -> list[list[str]]:
    """The wrong names of each refit."""
    return [row["wrong_names"] for row in world.rows("refit")]


def case_padding_that_moves_late_is_seen(tmp: Path) -> None:
    world = refitted(tmp, Routed(), BF16, "padding")
    found = [(row["version"], row["padding"][EMBED]["constant"]) for row in world.rows("coverage")]
    assert found == [(2, True), (3, True), (4, False), (5, False)], found


def case_what_is_held_wider_than_sent_is_proven(tmp: Path) -> None:
    world = refitted(tmp, Routed(), BF16)
    assert wrong(world) == [[]] * 5
    assert world.sides("live")[0]["casts"] == {GATE: "torch.bfloat16 to torch.float32"}
    assert [row["hashes"] for row in world.sides("live")] == [row["hashes"] for row in world.sides("sent")]
    assert agreement.problems(world.rows()) == []


def case_what_is_held_wider_and_is_wrong_is_named(tmp: Path) -> None:
    (tmp / "a").mkdir()
    (tmp / "b").mkdir()
    for place, fault in (("a", "gate"), ("b", "less than a bf16 shows")):
        assert wrong(refitted(tmp / place, Routed(), BF16, fault)) == [[], [], [], [GATE], [GATE]], fault


def case_each_name_is_cast_as_its_own_parameter_is(tmp: Path) -> None:
    for place, most, gate in (("a", FP32, BF16), ("b", BF16, FP32), ("c", torch.float16, BF16)):
        (tmp / place).mkdir()
        assert wrong(refitted(tmp / place, Routed(most, gate), FP32)) == [[]] * 5, place
    (tmp / "d").mkdir()
    assert wrong(refitted(tmp / "d", Routed(FP32, BF16), FP32, "gate")) == [[], [], [], [GATE], [GATE]]


def case_a_model_that_is_replaced_last_is_not_covered(tmp: Path) -> None:
    world = refitted(tmp, Routed(), BF16)
    worker = world.worker(Routed())
    said = "learned again, and no refit after that shows the coverage"
    for seed, open_ in ((6, True), (7, False)):
        send(world, iter(weights(seed, BF16).items()))
        worker.update_weights_from_ipc()
        assert any(said in text for text in agreement.problems(world.rows())) is open_, agreement.problems(world.rows())
    assert [row["version"] for row in world.rows("coverage")] == [2, 3, 4, 5, 7]


class Full(torch.Tensor):  # type: ignore[misc]
    """A tensor on a device without room for one more copy."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.to:
            raise torch.cuda.OutOfMemoryError("no room for the copy of the probe")
        return super().__torch_function__(function, types, args, kwargs or {})


def case_no_memory_for_the_casts_breaks_nothing(tmp: Path) -> None:
    world = World(tmp, "verl")
    worker = world.worker(Model(BF16))
    wire: Any = world.module("wire")
    wire.SENT += [(name, value.as_subclass(Full)) for name, value in export(1, FP32).items()]
    assert worker.update_weights_from_ipc() == "loaded"
    assert torch.equal(worker.model_runner.model.embed, export(1, FP32)["embed"].bfloat16())
    assert "no room for the copy of the probe" in world.rows("probe_error")[0]["error"]
    assert "2 tensors could not be hashed" in world.rows("refit")[0]["refused"]


def case_a_worker_without_a_model_breaks_nothing(tmp: Path) -> None:
    world = World(tmp, "verl")
    worker = world.worker(Model(BF16))
    with mock.patch.object(live, "model_of", side_effect=AttributeError("no model yet")):
        worker._update_weights(list(export(1).items()), None, False)
    assert torch.equal(worker.model_runner.model.embed, export(1)["embed"])
    (row,) = world.rows("probe_error")
    assert (row["where"], row["error"]) == ("_update_weights: beginning", "AttributeError: no model yet")


def case_items_that_only_upstream_understands_pass(tmp: Path) -> None:
    world = World(tmp, "nemo_rl")
    packed = world.module("nemo_rl.utils.packed_tensor").packed_broadcast_producer
    made: list[str] = []
    with mock.patch.object(world.module("wire"), "put", lambda name, tensor: made.append(name)):
        packed(_Once(), SimpleNamespace(rank=0), 0, lambda item: torch.ones(1))
    assert made == ["late"]
    assert "not yet" in world.rows("probe_error")[0]["error"]


class _Once:
    """A stream of one item, whose name cannot be had the first time it is asked for."""

    asked = 0

    def __iter__(self) -> Iterator[_Once]:
        return iter([self])

    def __getitem__(self, place: int) -> str:
        self.asked += 1
        if self.asked == 1:
            raise LookupError("not yet")
        return "late"


def case_a_loader_that_was_replaced_on_the_model_is_put_back(tmp: Path) -> None:
    world = World(tmp, "nemo_rl")
    recorder = world.hook().recorder
    world.module(f"{VLLM['nemo_rl']}.vllm_backend")

    class Older:
        """It calls the loader of the model by itself."""

        rank = 0

        def load(self, given: Any, patch: Any = None) -> Any:
            """Load all."""
            done = self.model_runner.model.load_weights(given)  # type: ignore[attr-defined]
            if patch is not None:
                self.model_runner.model.load_weights = patch  # type: ignore[attr-defined]
            return done

    Older.load = attach.receiving(Older.load, recorder, nemo_rl_hooks.TARGETS[0])  # type: ignore[method-assign]
    worker: Any = Older()
    model = Model(BF16)
    loader, own, other = model.load_weights, lambda given: loader(given), lambda given: loader(given)
    model.load_weights = own
    worker.model_runner = SimpleNamespace(model=model)
    assert worker.load(list(export(1).items())) == set(export(1))
    assert vars(model)["load_weights"] is own
    assert world.sides("received")[0]["tee"] == "model.load_weights"
    worker.load(list(export(2).items()), other)
    assert vars(model)["load_weights"] is other, "what the loop itself put there in the meantime stays"
