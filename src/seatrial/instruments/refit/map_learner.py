"""The coordinate map: where exported elements landed in live weights. Learned from a consumer's own loader; compares live weights with an
export. Runs inside a loop's interpreter.

- `learn` loads tensors that carry the digits of their own element ids (base 256) through the unmodified loader, then once more with a
  checksum of each id, negated: a loader that adds, negates, clips, delays or mixes values is seen, never believed.
- Float weights are filled with NaN before each pass, so what no exported element reaches shows. Integers keep their values, because
  loaders read them (expert maps); the checksum pass tells written from kept. What cannot be mapped is in `Map.opaque` with the reason.
- The state before is restored bit for bit (whole storages, so tied and shared memory, too) and proven by fingerprint, also when the loader
  raises. The model cannot serve meanwhile.
- Everything is by exact bits: NaN payloads and -0.0 count. A loader that casts is mapped (`Map.casts`), and compared after the same cast.
- The map shows where elements land, not where they belong: `tensor_coverage.misplaced` judges the places. A layout that changed since the
  map was learned is an error, never a smaller comparison.
- Exported elements have global ids: tensor `i` begins at `Ids.starts[i]`, with one free id after each: no run crosses tensors.

Memory: one copy of the weights on the host; beside the weights 6 bytes per element (10 above 2^31 elements) until it ends, and for
the largest single tensor about 20 more while it is filled and read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from seatrial.instruments.bits import fingerprint


class NotRestored(RuntimeError):
    """The module does not hold the bits it held before."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"the state could not be restored: {', '.join(names[:5])} ({len(names)} names); load the weights again")
        self.names = names


class Saved:
    def __init__(self, module: Any) -> None:
        self.module = module
        self.hashes = fingerprint.model(module)
        self._tables = [table for part in module.modules() for table in (part._parameters, part._buffers, vars(part))]
        self._entries = [(table, key, value, value.detach()) for table in self._tables for key, value in table.items() if _strided(value)]
        self._storages: dict[int, tuple[Any, Any]] = {}
        for _, _, _, alias in self._entries:
            storage = alias.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self._storages:
                self._storages[storage.data_ptr()] = (alias, _bytes(alias).to("cpu", copy=True))

    def restore(self) -> None:
        kept = {(id(table), key) for table, key, _, _ in self._entries}
        for table in self._tables:
            for key in [key for key, value in table.items() if _strided(value) and (id(table), key) not in kept]:
                del table[key]
        for alias, data in self._storages.values():
            storage = alias.untyped_storage()
            if storage.nbytes() != len(data):
                storage.resize_(len(data))
            _bytes(alias).copy_(data)
        for table, key, value, alias in self._entries:
            if (value.data_ptr(), value.shape, value.stride()) != (alias.data_ptr(), alias.shape, alias.stride()):
                value.data = alias
            table[key] = value
        wrong = fingerprint.differing(self.hashes, fingerprint.model(self.module))
        if wrong:
            raise NotRestored(wrong)


def _strided(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta


def _bytes(tensor: Any) -> Any:
    import torch

    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


Load = Callable[[Iterable[tuple[str, Any]]], object]
CHUNK = 1 << 21
"""Elements that are read at a time, so that the arithmetic stays in the cache."""
WEIGHTS = (167, 59, 101, 29, 211, 83, 139, 7)
"""One factor per digit of an id in its checksum, modulo the prime 251."""


class LoadFailed(RuntimeError):
    """The loader raised; the state before was restored. `loaded`: the names it had taken by then."""

    def __init__(self, loaded: list[str], total: int, error: Exception) -> None:
        last = f", the last {loaded[-1]}" if loaded else ""
        super().__init__(f"the loader raised {type(error).__name__}: {error} after taking {len(loaded)} of {total} names{last}")
        self.loaded = tuple(loaded)


def learn(module: Any, load: Load, export: Mapping[str, Any]) -> Map:
    """The map of `module`, by loading through `load`; of `export` only names, shapes, dtypes and devices are used."""
    for name, value in fingerprint.named_state(module):
        if value.is_meta:
            raise CannotMap(name, "it is on the meta device and holds no bits; load real weights first")
    saved = Saved(module)
    try:
        return _Learning(module, load, export).run()
    finally:
        saved.restore()


def _reason(value: Any) -> str | None:
    """Why this exported tensor cannot carry ids."""
    if value.is_complex() or value.element_size() < 2 or str(value.dtype).startswith("torch.uint"):
        return f"{value.dtype} cannot hold the numbers from -255 to 255"
    return None


def _twins(export: Mapping[str, Any]) -> dict[str, str]:
    """Names of an export over exactly the memory of an earlier name."""
    first: dict[tuple[Any, ...], str] = {}
    made = {}
    for name, value in export.items():
        if value.numel() and not value.is_meta:
            key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
            if first.setdefault(key, name) != name:
                made[name] = first[key]
    return made


class _Place:
    """One runtime tensor while the map is learned: the ids read so far."""

    def __init__(self, value: Any, ids: Ids) -> None:
        import torch

        flat = value.detach().reshape(-1)
        self.float = value.is_floating_point() or value.is_complex()
        self.kept = None if self.float else flat.clone()
        self.shape = value.shape
        self.ids = torch.zeros(flat.numel(), dtype=ids.dtype, device=flat.device)
        self.fine = torch.ones(flat.numel(), dtype=torch.bool, device=flat.device)
        self.touched = ~self.fine
        self.zeroed = ~self.fine
        """What the loader sets to zero whatever is loaded."""
        self.hashes: set[str] = set()

    def read(self, value: Any, check: bool, shift: int) -> None:
        self.hashes.add(fingerprint.tensor_hash(value))
        if value.shape != self.shape:
            self.fine[:], self.touched[:] = False, True
            return
        flat = value.detach().reshape(-1).to(self.ids.device)  # a loader may have replaced it by one elsewhere
        for start in range(0, flat.numel(), CHUNK):
            self._read(flat[start : start + CHUNK], slice(start, start + CHUNK), check, shift)

    def _read(self, flat: Any, part: slice, check: bool, shift: int) -> None:
        import torch

        number = flat.real if flat.is_complex() else flat
        number = number.to(torch.float32) if self.float and number.dtype != torch.float64 else number.to(torch.float64)
        self.touched[part] |= (flat != self.kept[part]) if self.kept is not None else ~torch.isnan(number)
        if check:
            self.zeroed[part] = self.fine[part] & self.touched[part] & (self.ids[part] == 0) & (number == 0)
            self.fine[part] &= number == -_checksum(self.ids[part])
            return
        digit = number.nan_to_num(nan=0.0).clamp(0, 255).to(torch.uint8)
        self.fine[part] &= digit == number
        self.ids[part] |= digit.to(self.ids.dtype) << shift

    def landed(self, ids: Ids) -> Any:
        import torch

        valid = self.fine & self.touched & (self.ids >= 0) & (self.ids < ids.total)
        return torch.where(valid, self.ids, -1)


def _digit(place: int, numbers: Any) -> Any:
    return (numbers >> 8 * place) & 255


def _checksum(numbers: Any) -> Any:
    """1..251 for each id; each digit has its own factor."""
    total = sum(_digit(place, numbers) * factor for place, factor in enumerate(WEIGHTS[: numbers.element_size()]))
    return 1 + total % 251


class _Learning:
    def __init__(self, module: Any, load: Load, export: Mapping[str, Any]) -> None:
        self.module, self.load, self.export, self.ids = module, load, export, Ids(export)
        self.unable = {name: reason for name, value in export.items() if (reason := _reason(value))}
        self.twins = _twins(export)
        self.places = {name: _Place(value, self.ids) for name, value in self._unique().items()}

    def _unique(self) -> dict[str, Any]:
        """The runtime tensors; of several names for exactly the same memory only the first."""
        found: dict[tuple[Any, ...], tuple[str, Any]] = {}
        for name, value in fingerprint.named_state(self.module):
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else (name,)
            found.setdefault(key, (name, value))
        return dict(found.values())

    def run(self) -> Map:
        digits = 1
        while 256**digits < self.ids.total:
            digits += 1
        for place in range(digits):
            self._pass(partial(_digit, place), place + 1)
            self._read(check=False, shift=8 * place)
        self._pass(lambda numbers: -_checksum(numbers), digits + 1)
        self._read(check=True, shift=0)
        return self._map()

    def _pass(self, make: Callable[[Any], Any], mark: int) -> None:
        """Fill with NaN, then load every name once. What cannot carry ids is another constant in each pass."""
        import torch

        for place in [value for value in self._unique().values() if value.is_floating_point() or value.is_complex()]:
            place.detach().fill_(float("nan"))

        def fill(start: int, value: Any, name: str) -> Any:
            device = "cpu" if value.is_meta else value.device
            if name in self.unable:
                return torch.full(value.shape, float(mark), device=device).to(value.dtype)
            numbers = torch.arange(start, start + value.numel(), dtype=self.ids.dtype, device=device)
            return make(numbers).to(value.dtype).reshape(value.shape)

        starts = dict(zip(self.ids.names, self.ids.starts.tolist(), strict=True))
        self._load((name, fill(starts[self.twins.get(name, name)], value, name)) for name, value in self.export.items())

    def _load(self, source: Iterator[tuple[str, Any]]) -> None:
        """Call the loader. Whoever keeps the iterator gets nothing from it later: it would write ids into restored weights."""
        taken: list[str] = []

        def feed() -> Generator[tuple[str, Any], None, None]:
            for name, value in source:
                taken.append(name)
                yield name, value

        feeding = feed()
        try:
            result = self.load(feeding)
            if isinstance(result, Iterator):  # a loader written as a generator does its work only when it is asked
                for _ in result:
                    pass
        except Exception as error:
            raise LoadFailed(taken, len(self.export), error) from error
        finally:
            feeding.close()

    def _read(self, check: bool, shift: int) -> None:
        live = dict(fingerprint.named_state(self.module))
        for name, place in self.places.items():
            if name not in live:
                raise CannotMap(name, "the loader removed it")
            place.read(live[name], check, shift)

    def _map(self) -> Map:
        import torch

        live = dict(fingerprint.named_state(self.module))
        tables: dict[str, Table] = {}
        distinct: list[Table] = []
        unwritten: dict[str, int] = {}
        opaque = dict(self.unable)
        recomputed: list[str] = []
        seen = _Seen()
        for name, place in self.places.items():
            ids = place.landed(self.ids)
            if bool((ids >= 0).any()):  # zeroed padding of a tensor that is written: no exported element reaches it
                place.touched &= ~place.zeroed
            changed, missed = int((place.touched & (ids < 0)).count_nonzero()), int((~place.touched).count_nonzero())
            if missed:
                unwritten[name] = missed
            if changed:
                # Elements of it that look right may be so by chance: a checksum has 251 values.
                ids = torch.full_like(ids, -1)
            if changed and len(place.hashes) == 1:
                recomputed.append(name)
            elif changed:
                how = "the loader transforms, quantises or moves them"
                opaque.setdefault(name, f"{changed} of {ids.numel()} elements came back changed: {how}")
            tables[name] = self.ids.table(ids)
            distinct.append(self.ids.table(seen.fresh(live[name], ids)))
        unconsumed, duplicates = self.ids.landings(distinct)
        opaque = self._sources(unconsumed, [name for name in opaque if name in self.places]) | opaque
        unconsumed = {name: count for name, count in unconsumed.items() if name not in opaque and name not in self.twins}
        casts = self._casts(tables, live)
        shapes = {name: tuple(value.shape) for name, value in self.export.items()}
        sizes = {name: place.ids.numel() for name, place in self.places.items()}
        written = {name: table for name, table in tables.items() if len(table.length)}
        return Map(
            self.ids, written, sizes, unwritten, unconsumed, duplicates, opaque, tuple(recomputed), casts, self.twins, shapes, distinct
        )

    def _sources(self, unconsumed: Mapping[str, int], changed: list[str]) -> dict[str, str]:
        """Which exported names feed the tensors that came back changed: each is loaded alone, with two values."""
        import torch

        found: dict[str, str] = {}
        for name in [name for name in unconsumed if changed and name not in self.twins]:
            value = self.export[name]
            hashes = []
            for number in (1.0, 2.0):
                alone = torch.full(value.shape, number, device="cpu" if value.is_meta else value.device).to(value.dtype)
                try:
                    self._load(iter([(name, alone)]))
                except LoadFailed:  # it takes only whole models; then the name stays unconsumed
                    break
                live = dict(fingerprint.named_state(self.module))
                hashes.append({runtime: fingerprint.tensor_hash(live[runtime]) for runtime in changed})
            differing = fingerprint.differing(*hashes) if len(hashes) == 2 else []
            if differing:
                found[name] = f"it comes back changed, in {', '.join(differing)}"
        return found

    def _casts(self, tables: Mapping[str, Table], live: Mapping[str, Any]) -> dict[str, str]:
        import torch

        made = {}
        for runtime, table in tables.items():
            for owner in torch.unique(table.owner).tolist():
                name = self.ids.names[owner]
                if self.export[name].dtype != live[runtime].dtype:
                    made[name] = f"{self.export[name].dtype} to {live[runtime].dtype}"
        return made


class _Seen:
    """Memory that a runtime tensor already looked at: views into one buffer hold an element once, not twice."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}

    def fresh(self, value: Any, ids: Any) -> Any:
        """`ids` with -1 where the memory was seen before."""
        import torch

        storage = value.untyped_storage()
        whole = value.numel() * value.element_size() == storage.nbytes()
        if value.numel() != ids.numel() or (whole and storage.data_ptr() not in self._storages):
            self._storages[storage.data_ptr()] = True  # all of it
            return ids
        before = self._storages.get(storage.data_ptr())
        if before is True:
            return torch.full_like(ids, -1)
        if before is None:
            before = torch.zeros(storage.nbytes(), dtype=torch.bool, device=ids.device)
        size = value.element_size()
        places = torch.arange(storage.nbytes() // size, device=ids.device)
        address = places.as_strided(value.shape, value.stride(), value.storage_offset()).reshape(-1) * size
        fresh = torch.where(before[address], -1, ids)
        before[address] = True
        self._storages[storage.data_ptr()] = before
        return fresh


FEW = 64
"""Up to so many runs of one tensor are taken as slices, more as index tensors."""


class Table(NamedTuple):
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


def pieces(table: Table, device: Any, only: int | None = None) -> Iterator[tuple[int, Any, Any]]:
    """(owner, index into the flat export, index into the flat runtime tensor): slices, or index tensors where runs are many. `only`: of one
    owner. A fused tensor has hundreds of them, and to make the indices of all for each would take their square."""
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
    def count(self) -> int:
        return sum(len(table.length) for table in self.tables.values())

    @cached_property
    def held(self) -> dict[str, list[str]]:
        import torch

        return {runtime: [self.ids.names[owner] for owner in torch.unique(table.owner).tolist()] for runtime, table in self.tables.items()}

    @cached_property
    def homes(self) -> dict[str, list[str]]:
        made: dict[str, list[str]] = {}
        for runtime, names in self.held.items():
            for name in names:
                made.setdefault(name, []).append(runtime)
        return made

    @cached_property
    def _owners(self) -> dict[str, int]:
        return {name: owner for owner, name in enumerate(self.ids.names)}

    def gather(self, module: Any, name: str) -> Any:
        """The exported tensor rebuilt from live elements; None if it is not wholly here. Where elements live in several places, all must
        hold the same bits: CannotMap, since one copy would hide the other."""
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


def bits(flat: Any) -> Any:
    import torch

    return flat.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
