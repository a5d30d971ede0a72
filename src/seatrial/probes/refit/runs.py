"""Run-length tables of where exported elements landed. Runs inside a loop's interpreter.

- Exported elements have global ids: tensor `i` begins at `Ids.starts[i]`, and one id is left free after each tensor, so that a
  run never crosses from one tensor into the next.
- A `Table` describes one runtime tensor: equally long int64 columns, one row per run, ordered by place in the runtime tensor.
- All arithmetic is by torch operations over whole tensors; Python loops only over runs where there are few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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
