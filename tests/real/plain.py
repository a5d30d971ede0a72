"""A module with a plain loader, for cases of the coordinate map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


Run = tuple[str, int, int, int]
"""Exported name, start in the flat exported tensor, start in the flat runtime tensor, length."""


def runs(learned_map: map_learner.Map, runtime: str) -> list[Run]:
    """The runs of one runtime tensor."""
    columns = zip(*(column.tolist() for column in learned_map.tables[runtime]), strict=True)
    return [(learned_map.ids.names[owner], *places) for owner, *places in columns]


def quantized(module: Any, expected: Mapping[str, Any]) -> dict[str, map_learner.Wrong]:
    """For loaders that quantise, which `learn` refuses: `expected` is the quantised export with all its scales, by runtime name."""
    live = dict(fingerprint.named_state(module))
    found = {}
    for name, value in expected.items():
        own = live.get(name)
        if own is None or own.dtype != value.dtype or own.shape != value.shape:
            found[name] = map_learner.Wrong(value.numel(), 0, value.numel())
            continue
        differs = (
            (map_learner.bits(own.detach().reshape(-1)) != map_learner.bits(value.detach().to(own.device).reshape(-1))).nonzero().flatten()
        )
        if len(differs):
            found[name] = map_learner.Wrong(len(differs), int(differs[0]), value.numel())
    return found


def unconsumed(maps: Sequence[map_learner.Map]) -> dict[str, int]:
    """Exported elements that no rank of a replica took, by name."""
    ids = maps[0].ids
    if any((other.ids.names, other.ids.sizes.tolist()) != (ids.names, ids.sizes.tolist()) for other in maps):
        raise ValueError("coverage: the maps of these ranks were learned with different exports")
    lost, _ = ids.landings([table for each in maps for table in each.distinct])
    known = {name for each in maps for name in (*each.opaque, *each.twins)}
    return {name: count for name, count in lost.items() if name not in known}
