"""A module with a plain loader, for cases of the coordinate map."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.refit import map_learner

Pairs = Iterable[tuple[str, Any]]


def raised(call: Callable[[], object], kind: type[Exception]) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


class Plain(nn.Module):  # type: ignore[misc]
    """Parameters under their exported names; `change` is what its loader does to each value."""

    def __init__(self, change: Callable[[str, Any], Any] | None = None, **tensors: Any) -> None:
        super().__init__()
        self.change = change or (lambda _, value: value)
        for name, value in tensors.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def load_weights(self, weights: Pairs) -> object:
        for name, value in weights:
            getattr(self, name).copy_(self.change(name, value))
        return None


def change_a(change: Callable[[Any], Any], name: str, value: Any) -> Any:
    return change(value) if name == "a" else value


def learned(module: Any, export: dict[str, Any], load: Callable[[Pairs], object] | None = None) -> map_learner.Map:
    """The map; the state must be the same afterwards, bit for bit."""
    before = fingerprint.model(module)
    made = map_learner.learn(module, load or module.load_weights, export)
    assert fingerprint.model(module) == before
    return made
