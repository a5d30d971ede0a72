"""Coverage: what the loader does with every runtime parameter and buffer, and with every exported name. Decides no verdict.

- Each runtime tensor is exactly one of: written (the map has its elements), shared (memory of one named before), derived (the loader
  transforms or recomputes it), moved (its bits changed, and nothing explains it), constant (the same bits before and after loads).
- Padding (elements of a written tensor that no exported element reaches) is counted, and it is said whether its bits ever moved.
- `misplaced` judges the places of a map by the names; `unexported`: what of the policy's own state changed and is not exported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.refit.map_learner import Map, Table, pieces

GATE_UP = ("gate_proj", "w1"), ("up_proj", "w3")
FUSED: dict[str, tuple[tuple[str, ...], ...]] = {
    "qkv_proj": (("q_proj",), ("k_proj",), ("v_proj",)),
    "gate_up_proj": GATE_UP,
    "w13_weight": GATE_UP,
    "w2_weight": (("down_proj", "w2"),),
}
"""Fused runtime tensors: what their slots hold, in order, by the names that checkpoints use."""


class Padding(NamedTuple):
    """Elements of a written tensor that no exported element reaches."""

    elements: int
    constant: bool


@dataclass(frozen=True)
class Coverage:
    written: tuple[str, ...]
    shared: dict[str, str]
    derived: dict[str, str]
    recomputed: tuple[str, ...]
    """Those of the derived ones that the loader computes anew, and always the same; the map refused the others (`opaque`)."""
    moved: dict[str, str]
    constant: tuple[str, ...]
    idle: tuple[str, ...]
    """Those of the constant ones that are parameters: nothing that was exported reaches them."""
    padding: dict[str, Padding]
    unconsumed: dict[str, int]
    unwritten: dict[str, int]
    opaque: dict[str, str]

    def row(self, replica: str, never_changed: Sequence[str]) -> dict[str, Any]:
        """The fact. Whoever has the policy adds `unexported`."""
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        fields["padding"] = {name: part._asdict() for name, part in self.padding.items()}
        total = sum(map(len, (self.written, self.shared, self.derived, self.moved, self.constant)))
        return {"fact": "coverage", "replica": replica, "tensors": total, "never_changed": list(never_changed), **fields}


class LoaderWatch:
    """Looks at all runtime tensors before the first load and after each: what changed, padding apart."""

    def __init__(self, module: Any, learned: Map) -> None:
        self.module, self.map = module, learned
        self.history: list[dict[str, str]] = []
        self._padding: list[dict[str, str]] = []
        self.look()

    def look(self, module: Any = None) -> None:
        """Take the fingerprints of this moment; of another module that stands in for the first, if one is given."""
        module = self.module if module is None else module
        self.history.append(fingerprint.model(module))
        live = dict(fingerprint.named_state(module))
        self._padding.append({name: fingerprint.tensor_hash(rest(live[name], self.map.tables[name])) for name in _padded(self.map)})

    @property
    def touched(self) -> dict[str, str]:
        return _changes(self.history)

    @property
    def moved(self) -> dict[str, str]:
        return _changes(self._padding)


def classify(
    module: Any, learned: Map, touched: Mapping[str, str], padding_moved: Collection[str] = (), ties: Mapping[str, str] | None = None
) -> Coverage:
    """Sort every parameter and buffer. `touched` and `padding_moved` as of a `Watch` over loads of different weights. `ties`: which name
    shares the memory of which, where the module does not show that any more."""
    written: list[str] = []
    shared: dict[str, str] = {}
    derived: dict[str, str] = {}
    moved: dict[str, str] = {}
    constant: list[str] = []
    owners: dict[int, list[tuple[str, int, int]]] = {}
    for name, value in fingerprint.named_state(module):
        begin = value.data_ptr()
        end = begin + value.numel() * value.element_size()
        spans = owners.setdefault(value.untyped_storage().data_ptr(), [])
        owner = next((other for other, *span in spans if _inside(value, begin, end, *span)), None) if ties is None else ties.get(name)
        if owner is not None:
            shared[name] = owner
            continue
        if value.numel():
            spans.append((name, begin, end))
        if name in learned.tables:
            written.append(name)
        elif name in learned.opaque or name in learned.recomputed:
            derived[name] = learned.opaque.get(name, "the loader recomputes it: the same bits whatever is loaded")
        elif name in touched:
            moved[name] = touched[name]
        else:
            constant.append(name)
    own = dict(module.named_parameters(remove_duplicate=False))
    idle = tuple(name for name in constant if name in own and learned.sizes[name])
    padding = {name: Padding(learned.unwritten[name], name not in padding_moved) for name in _padded(learned)}
    again = tuple(name for name in derived if name not in learned.opaque)
    lists = tuple(written), shared, derived, again, moved, tuple(constant), idle
    return Coverage(*lists, padding, dict(learned.unconsumed), dict(learned.unwritten), dict(learned.opaque))


def misplaced(learned: Map, fused: Mapping[str, tuple[tuple[str, ...], ...]] = FUSED) -> dict[str, str]:
    """Runtime tensors that hold what their name does not say: another layer, another part, slots or experts out of order, or the elements
    of one exported tensor in another order than exported. Whether a rearrangement is meant, no map can show. A runtime module with a
    name of its own that holds one exported tensor is judged by its layer and its order only."""
    import torch

    parts = {_part(name) for name in learned.ids.names}
    found: dict[str, str] = {}
    for runtime, table in learned.tables.items():
        order = torch.unique_consecutive(table.owner).tolist()
        holds = [learned.ids.names[index] for index in order]
        slots = next((fused[word] for word in (_part(runtime), runtime.rpartition(".")[2]) if word in fused), None)
        alien = next((name for name in holds if _alien(name, runtime, parts, slots)), None)
        places = [_place(name, slots or ()) for name in holds]
        if alien is not None:
            found[runtime] = f"it holds {alien}"
        elif slots is not None and places != sorted(set(places)):
            found[runtime] = f"its slots are out of order: {', '.join(holds)}"
        elif slots is None and len(set(holds)) > 1:
            found[runtime] = f"it holds {len(set(holds))} exported tensors and nobody said in which order: name its slots in `fused`"
        elif (name := _rearranged(table, learned.ids.names)) is not None:
            found[runtime] = f"it holds the elements of {name} in another order than exported, and nothing shows that this is meant"
    return found


def never_changed(history: Sequence[Mapping[str, str]]) -> list[str]:
    """Names whose hashes are the same in all entries: over a run, what no update reached."""
    if len(history) < 2:
        raise ValueError("coverage: what never changed takes at least two looks")
    return [name for name, value in history[0].items() if all(entry.get(name) == value for entry in history)]


def unexported(history: Sequence[Mapping[str, str]], export: Collection[str]) -> list[str]:
    """Names of the policy's own state (buffers too) that changed over the run, came or went, and are not exported."""
    still = set(never_changed(history))
    names = dict.fromkeys(name for entry in history for name in entry)
    return [name for name in names if name not in still and name not in export]


class Owned:
    """The policy's own state over a run: look at every refit, then ask what changed and is not exported."""

    def __init__(self) -> None:
        self._history: list[dict[str, str]] = []
        self._exported: set[str] | None = None

    def look(self, module: Any, export: Mapping[str, Any]) -> None:
        """Take the fingerprints of this moment. An export under other names stands for all parameters if it has all their elements."""
        self._history.append(fingerprint.model(module))
        held = dict(module.named_parameters())
        whole = sum(value.numel() for value in held.values()) == sum(value.numel() for value in export.values())
        names = aliases(module, {*export, *(held if whole else ())})
        self._exported = names if self._exported is None else self._exported & names

    def unexported(self) -> list[str]:
        return unexported(self._history, self._exported or ())


def aliases(module: Any, names: Collection[str]) -> set[str]:
    """These names of a module, and all that lie over exactly the memory of one of them: a tied weight is exported once."""

    def place(value: Any) -> tuple[Any, ...]:
        return (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)

    state = list(fingerprint.named_state(module))
    places = {place(value) for name, value in state if name in names and value.numel()}
    return {name for name, value in state if name in names or (value.numel() and place(value) in places)}


def rest(value: Any, table: Table) -> Any:
    import torch

    flat = value.detach().reshape(-1)
    free = torch.ones(flat.numel(), dtype=torch.bool, device=flat.device)
    for _, _, here in pieces(table, flat.device):
        free[here] = False
    return flat[free]


def _inside(value: Any, begin: int, end: int, first: int, last: int) -> bool:
    """Whether a tensor lies over the memory from `first` to `last`; interleaved views only seem to."""
    return begin < last and first < end and (value.is_contiguous() or (begin, end) == (first, last))


def _padded(learned: Map) -> Iterator[str]:
    return (name for name in learned.unwritten if name in learned.tables)


def _changes(history: Sequence[Mapping[str, str]]) -> dict[str, str]:
    made: dict[str, str] = {}
    for index in range(1, len(history)):
        for name in fingerprint.differing(history[index - 1], history[index]):
            made.setdefault(name, f"its bits changed with load {index}")
    return made


def _part(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def _numbers(name: str) -> list[int]:
    return [int(word) for word in re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)]


def _alien(name: str, runtime: str, parts: Collection[str], slots: tuple[tuple[str, ...], ...] | None) -> bool:
    """Whether an exported name has no business in a runtime tensor."""
    there, here = _numbers(name), _numbers(runtime)
    known = min(len(there), len(here))
    if there[:known] != here[:known]:
        return True
    if slots is not None and _part(name) != _part(runtime):
        return not any(_part(name) in slot for slot in slots)
    return _part(runtime) in parts and _part(name) != _part(runtime)


def _rearranged(table: Table, names: Sequence[str]) -> str | None:
    """An exported tensor whose elements do not follow each other as exported: transposed, permuted, or there twice."""
    import torch

    order = torch.argsort(table.owner, stable=True)  # runs are ordered by their place at runtime
    owner, start = table.owner[order], table.export_start[order]
    back = (owner[1:] == owner[:-1]) & (start[1:] <= start[:-1])
    return names[int(owner[1:][back][0])] if bool(back.any()) else None


def _place(name: str, slots: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
    """Expert and slot: the order in which a fused tensor holds its pieces."""
    slot = next((index for index, words in enumerate(slots) if _part(name) in words), 0)
    return (*_numbers(name), slot)
