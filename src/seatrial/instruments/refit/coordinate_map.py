"""The coordinate map: where exported elements landed in live weights, as run-length tables; compares live weights with an export.

Runs inside a loop's interpreter; `map_learner` learns the map. Contract:
- Everything is by exact bits: NaN payloads and -0.0 count. A name with cast elements is compared after the same cast.
- A layout that changed since the map was learned is an error, never a smaller comparison.
- Exported elements have global ids: tensor `i` begins at `Ids.starts[i]`, and one id is left free after each tensor, so that a
  run never crosses from one tensor into the next. A `Table` describes one runtime tensor: equally long int64 columns, one row per run,
  ordered by place in the runtime tensor. All arithmetic is by torch operations over whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from seatrial.instruments.bits import fingerprint

FEW = 64
"""Up to so many runs of one tensor are taken as slices, more as index tensors."""


class Run(NamedTuple):
    """`length` elements, contiguous in the exported tensor and in the runtime tensor (both flattened)."""

    export_name: str
    export_start: int
    runtime_start: int
    length: int


class Table(NamedTuple):
    """The runs of one runtime tensor."""

    owner: Any
    export_start: Any
    runtime_start: Any
    length: Any


class Ids:
    """The global ids of an export."""

    def __init__(self, export: Mapping[str, Any]) -> None:
        import torch

        self.names = tuple(export)
        self.sizes = torch.tensor([value.numel() for value in export.values()], dtype=torch.int64)
        ends = torch.cumsum(self.sizes + 1, 0)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])[:-1] if len(export) else torch.zeros(0, dtype=torch.int64)
        self.total = int(ends[-1]) if len(export) else 0
        self.dtype = torch.int32 if self.total < 1 << 31 else torch.int64

    def table(self, ids: Any) -> Table:
        """The runs of one runtime tensor; `ids` is flat, negative where nothing landed."""
        import torch

        away = ids < 0
        begins = torch.ones(ids.numel(), dtype=torch.bool, device=ids.device)
        begins[1:] = ((ids[1:] != ids[:-1] + 1) | (away[1:] != away[:-1])) & ~(away[1:] & away[:-1])
        first = torch.nonzero(begins).flatten()
        end = torch.cat([first[1:], first.new_full((min(1, len(first)),), ids.numel())])
        mapped = ids[first] >= 0
        first, end = first[mapped], end[mapped]
        at, first, end = ids[first].to("cpu", torch.int64), first.cpu(), end.cpu()
        owner = torch.searchsorted(self.starts, at, right=True) - 1
        return Table(owner, at - self.starts[owner], first, end - first)

    def landings(self, tables: Iterable[Table]) -> tuple[dict[str, int], dict[str, int]]:
        """Elements that landed nowhere and elements that landed more than once, by export name."""
        import torch

        tables = list(tables)
        begin = torch.cat([self.starts[table.owner] + table.export_start for table in tables] + [self.starts[:0]])
        end = begin + torch.cat([table.length for table in tables] + [self.starts[:0]])
        edges = torch.cat([self.starts, self.starts + self.sizes])  # no segment crosses from one tensor into the next
        place = torch.cat([begin, end, edges])
        change = torch.cat([torch.ones_like(begin), -torch.ones_like(end), torch.zeros_like(edges)])
        place, order = torch.sort(place)
        depth = torch.cumsum(change[order], 0)[:-1]
        length = place[1:] - place[:-1]
        owner = torch.searchsorted(self.starts, place[:-1], right=True) - 1
        inside = place[:-1] < (self.starts + self.sizes)[owner]  # the free id after each tensor does not count
        return self._named(owner, length, inside & (depth == 0)), self._named(owner, length, inside & (depth > 1))

    def _named(self, owner: Any, length: Any, chosen: Any) -> dict[str, int]:
        import torch

        counts = torch.zeros(len(self.names), dtype=torch.int64).index_add_(0, owner[chosen], length[chosen])
        return {self.names[index]: int(counts[index]) for index in torch.nonzero(counts).flatten().tolist()}

    def listed(self, table: Table) -> list[Run]:
        """The runs of a table as a list."""
        columns = zip(*(column.tolist() for column in table), strict=True)
        return [Run(self.names[owner], export_start, runtime_start, length) for owner, export_start, runtime_start, length in columns]


def pieces(table: Table, device: Any, only: int | None = None) -> Iterator[tuple[int, Any, Any]]:
    """(owner, index into the flat export, index into the flat runtime tensor): slices, or index tensors where runs are many.

    `only`: of one owner. A fused tensor has hundreds of them, and to make the indices of all for each would take their square.
    """
    import torch

    if only is not None:
        table = Table(*(column[table.owner == only] for column in table))
    if len(table.length) <= FEW:
        for owner, export_start, runtime_start, length in zip(*(column.tolist() for column in table), strict=True):
            yield owner, slice(export_start, export_start + length), slice(runtime_start, runtime_start + length)
        return
    for owner in torch.unique(table.owner).tolist():
        own = table.owner == owner
        length = table.length[own].to(device)
        ends = torch.cumsum(length, 0)
        step = torch.arange(int(ends[-1]), device=device) - torch.repeat_interleave(ends - length, length)
        there = torch.repeat_interleave(table.export_start[own].to(device), length) + step
        here = torch.repeat_interleave(table.runtime_start[own].to(device), length) + step
        yield owner, there, here


class CannotMap(RuntimeError):
    """This tensor has no coordinates."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


@dataclass(frozen=True)
class Wrong:
    """`count` of `total` compared elements differ; `first` is the lowest index in the flat tensor."""

    count: int
    first: int
    total: int


@dataclass(frozen=True)
class Map:
    """Where exported elements live at runtime. Counts are of elements; names without any are left out."""

    ids: Ids
    tables: dict[str, Table]
    sizes: dict[str, int]
    unwritten: dict[str, int]
    unconsumed: dict[str, int]
    duplicates: dict[str, int]
    opaque: dict[str, str]
    recomputed: tuple[str, ...]
    """Runtime tensors that the loader sets to the same bits whatever is loaded."""
    casts: dict[str, str]
    twins: dict[str, str]
    """Exported names over the memory of another one (tied, exported twice): they have the coordinates of that one."""
    shapes: dict[str, tuple[int, ...]]
    distinct: list[Table] = field(repr=False)
    """The runs without those that another runtime name already holds in the same memory."""

    @property
    def runs(self) -> dict[str, list[Run]]:
        """All runs by runtime name; a transposing loader makes one run per element, so ask for them sparingly."""
        return {name: self.ids.listed(table) for name, table in self.tables.items()}

    @property
    def count(self) -> int:
        """How many runs there are."""
        return sum(len(table.length) for table in self.tables.values())

    @cached_property
    def held(self) -> dict[str, list[str]]:
        """The exported names of which a runtime tensor holds elements."""
        import torch

        return {runtime: [self.ids.names[owner] for owner in torch.unique(table.owner).tolist()] for runtime, table in self.tables.items()}

    @cached_property
    def homes(self) -> dict[str, list[str]]:
        """The runtime tensors that hold elements of an exported name."""
        made: dict[str, list[str]] = {}
        for runtime, names in self.held.items():
            for name in names:
                made.setdefault(name, []).append(runtime)
        return made

    @cached_property
    def _owners(self) -> dict[str, int]:
        return {name: owner for owner, name in enumerate(self.ids.names)}

    def gather(self, module: Any, name: str) -> Any:
        """The exported tensor rebuilt from live elements; None if it is not wholly here.

        Where elements live in several places, all must hold the same bits: CannotMap, since one copy would hide the other.
        """
        import torch

        if name not in self.shapes:
            raise ValueError(f"gather: {name!r} is none of the names that the map was learned with")
        shape, name = self.shapes[name], self.twins.get(name, name)
        if name in self.unconsumed or name in self.opaque:
            return None
        size = math.prod(shape)
        state = dict(fingerprint.named_state(module))
        made = None if size else torch.empty(0)
        for live, there, here in self._places(state, name):
            made = torch.empty(size, dtype=live.dtype, device=live.device) if made is None else made
            made[there] = live[here].to(made)
        if made is None:
            return None
        for live, there, here in self._places(state, name) if name in self.duplicates else ():
            differing = int((bits(live[here]) != bits(made[there].to(live))).count_nonzero())
            if differing:
                raise CannotMap(name, f"its copies at runtime differ in {differing} elements: one of them is stale; `compare` counts")
        return made.reshape(shape)

    def _places(self, state: Mapping[str, Any], name: str) -> Iterator[tuple[Any, Any, Any]]:
        """Flat runtime tensor, index into the flat export, index into the runtime tensor."""
        for runtime in self.homes.get(name, ()):
            live = self._flat(state, runtime)
            for _, there, here in pieces(self.tables[runtime], live.device, self._owners[name]):
                yield live, there, here

    def compare(self, module: Any, export: Mapping[str, Any]) -> dict[str, Wrong]:
        """What differs, by export name, bit for bit, over every place where its elements live on this rank."""
        absent = [name for name in self.ids.names if name not in export]
        if absent:
            raise ValueError(f"compare: the export lacks {absent[0]!r} ({len(absent)} names), which the map was learned with")
        state = dict(fingerprint.named_state(module))
        found: dict[str, Wrong] = {}
        totals: dict[str, int] = {}
        for runtime, table in self.tables.items():
            live = self._flat(state, runtime)
            for owner, there, here in pieces(table, live.device):
                name = self.ids.names[owner]
                sent = export[name]
                if tuple(sent.shape) != self.shapes[name]:
                    raise ValueError(f"compare: {name} has the shape {tuple(sent.shape)}, the map was learned with {self.shapes[name]}")
                expected = sent.detach().reshape(-1)[there if isinstance(there, slice) else there.to(sent.device)].to(live)
                differs = bits(live[here]) != bits(expected)
                totals[name] = totals.get(name, 0) + differs.numel()
                if bool(differs.any()):
                    at = differs.nonzero().flatten()
                    first = there.start + int(at[0]) if isinstance(there, slice) else int(there[at].min())
                    before = found.get(name, Wrong(0, first, 0))
                    found[name] = Wrong(before.count + len(at), min(before.first, first), 0)
        for name, first in self.twins.items():
            differs = (bits(export[name].detach().reshape(-1)) != bits(export[first].detach().reshape(-1))).nonzero().flatten()
            totals[name] = export[name].numel()
            if len(differs):  # they were one tensor; of two, the consumer can hold only one
                found[name] = Wrong(len(differs), int(differs[0]), 0)
        return {name: replace(wrong, total=totals[name]) for name, wrong in found.items()}

    def _flat(self, state: Mapping[str, Any], runtime: str) -> Any:
        live = state.get(runtime)
        if live is None or live.numel() != self.sizes[runtime]:
            now = "is gone" if live is None else f"has {live.numel()} elements instead of {self.sizes[runtime]}"
            raise CannotMap(runtime, f"{now}: the layout changed since the map was learned; learn it again")
        return live.detach().reshape(-1)


def quantized(module: Any, expected: Mapping[str, Any]) -> dict[str, Wrong]:
    """For loaders that quantise, which `learn` refuses: `expected` is the quantised export with all its scales, by runtime name."""
    live = dict(fingerprint.named_state(module))
    found = {}
    for name, value in expected.items():
        own = live.get(name)
        if own is None or own.dtype != value.dtype or own.shape != value.shape:
            found[name] = Wrong(value.numel(), 0, value.numel())
            continue
        differs = (bits(own.detach().reshape(-1)) != bits(value.detach().to(own.device).reshape(-1))).nonzero().flatten()
        if len(differs):
            found[name] = Wrong(len(differs), int(differs[0]), value.numel())
    return found


def bits(flat: Any) -> Any:
    import torch

    return flat.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
