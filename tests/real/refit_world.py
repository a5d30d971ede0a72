"""A policy and a generator with their two sides of a refit, and what every failure must end with. For the cases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.refit import payload
from seatrial.instruments.refit.payload_header import RefitRefused
from seatrial.instruments.refit.weight_transfer import Applied, Consumer, Prepared, Producer

E = TypeVar("E", bound=BaseException)
KINDS = (("full", None), ("packed", None), ("sparse", "difference"), ("sparse", "overwrite"))


def flat(tensor: Any) -> Any:
    return tensor.detach().view(-1).view(torch.uint8)


def weights(seed: int = 0) -> dict[str, Any]:
    """Two layers in bf16, and one of every other kind: fp8, whole numbers, no element, one element, an odd number of bytes."""
    torch.manual_seed(seed)
    made = {f"model.layers.{index}.weight": (torch.randn(64, 257) * 0.02).bfloat16() for index in range(3)}
    return made | {
        "half": torch.randn(500).half(),
        "single": torch.randn(30, 7),
        "double": torch.randn(9).double(),
        "eighth": torch.randn(33).to(torch.float8_e4m3fn),
        "counts": torch.arange(11),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(0.5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, dtype=torch.bfloat16),
    }


class World:
    """A policy with its producer, and a generator with its consumer and its own copy of the weights."""

    def __init__(self, given: dict[str, Any] | None = None, **options: Any) -> None:
        self.policy = given or weights()
        self.live = {name: tensor.clone() for name, tensor in self.policy.items()}
        self.producer, self.consumer = Producer(self.policy, **options), Consumer(self.live)
        self.draws = torch.Generator().manual_seed(1)

    def train(self, share: float = 0.01) -> None:
        """Change a share of the units of every tensor by a few steps of the last bits, as an optimizer does in bf16."""
        for tensor in self.policy.values():
            if tensor.dtype is torch.bool or not tensor.numel():
                continue
            units = tensor.view(-1).view(torch.int16) if tensor.element_size() > 1 else tensor.view(-1).view(torch.uint8)
            chosen = torch.rand(units.numel(), generator=self.draws) < share
            units[chosen] += 1

    def refit(self, transport: str, kind: str | None = None, path: Path | None = None) -> tuple[Prepared, Applied]:
        """One that must arrive."""
        data = self.producer.prepare(self.policy, transport, kind, path)
        prepared, self.sent = self.producer.prepared, payload.read(data).header
        assert prepared is not None
        applied = self.consumer.apply(data)
        self.producer.commit(self.consumer.state()["root"], applied.version)
        self.check_equal()
        return prepared, applied

    def check_equal(self) -> None:
        """Every bit of the generator is the policy's."""
        wrong = [name for name, tensor in self.policy.items() if not torch.equal(flat(tensor), flat(self.live[name]))]
        assert not wrong, wrong

    def snapshot(self) -> dict[str, Any]:
        return {name: flat(tensor).clone() for name, tensor in self.live.items()}

    def check_unchanged(self, before: dict[str, Any]) -> None:
        wrong = [name for name, was in before.items() if not torch.equal(was, flat(self.live[name]))]
        assert not wrong, wrong


def raised(kind: type[E], call: Callable[..., Any], *given: Any) -> E:
    """What a call must raise."""
    try:
        call(*given)
    except kind as error:
        return error
    raise AssertionError(f"not raised: {kind.__name__}")


def refused(reasons: str, call: Callable[..., Any], *given: Any) -> RefitRefused:
    """The refusal that a call must end with, for one of these reasons."""
    error = raised(RefitRefused, call, *given)
    assert error.reason in reasons.split(), f"wanted {reasons}, got {error}"
    return error


def broken(world: World, reason: str, data: Any, consumer: Consumer | None = None) -> RefitRefused:
    """A payload that must be refused: the generator keeps every bit, the producer its baseline, and a clean refit follows."""
    before, version = world.snapshot(), world.consumer.version
    error = refused(reason, (consumer or world.consumer).apply, data)
    world.check_unchanged(before)
    assert world.consumer.version == version
    return error


def recovers(world: World, root: str) -> None:
    """After a failure the baseline is as before, the next payload is full although sparse is asked for, and the one after is not."""
    if world.producer.prepared is not None:
        world.producer.rollback()
    assert world.producer.root == root
    assert fingerprint.tree(fingerprint.tensors(world.producer._base.items())).root == root, "the baseline itself, not what is noted of it"
    assert world.refit("sparse")[0].transport == "full"
    world.train()
    prepared, _ = world.refit("sparse")
    assert (prepared.transport, prepared.kind) == ("sparse", "difference")
