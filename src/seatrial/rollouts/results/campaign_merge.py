"""`merge`: writes rollouts.jsonl, failures.jsonl and merge.json from the journal: of each unit the winning record, in unit order.

- Incomplete journals are refused, unless asked for. `ok` beats failed; then the lowest attempt number, token and offset wins. The same
  journal gives the same bytes; no time stands in merge.json.
- Both files are complete and on disk before the first is renamed; merge.json is written last, so it belongs to the files beside it.
- One merge at a time, by lease. The journal is only read, in windows of units: memory is two windows and twelve bytes per unit. Each
  record is checked again while it is copied.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_model, sync_directory, write_error, write_json
from seatrial.core.records import Record
from seatrial.core.text import counted
from seatrial.core.verdict import Boundary
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.journal.attempts import AttemptFile, Lease, LeaseHolder
from seatrial.rollouts.journal.journal_scan import FAILED, OK, PENDING, Scan, Scanner
from seatrial.rollouts.manifest import Manifest, Units, check_inputs
from seatrial.rollouts.rollout_record import KEY, TornError, check, unit_of
from seatrial.runtime.interrupt import check_stop

LISTED = 1000
"""So many ids of missing or conflicting units are named."""
ROLLOUTS, FAILURES, RESULT = "rollouts.jsonl", "failures.jsonl", "merge.json"
_SHOWN = 5


class Written(Record):
    """A file of the merge."""

    rows: int
    bytes: int
    sha256: str


class Source(Record):
    """A file of the journal, as far as it was read."""

    path: str
    bytes: int
    records: int
    torn: int


class MergeResult(Record):
    """merge.json; written last, and removed first by the next merge."""

    campaign: str
    inputs_sha256: str
    """Of the rows, as in the manifest."""
    expected: int
    ok: int
    failed: int
    missing: int
    coverage: float
    """Units with a rollout, as a share of those expected."""
    partial: bool
    """Whether it was written although something is missing."""
    failed_by_kind: Mapping[str, int]
    duplicates: int
    """Records beside the winning one."""
    conflicts: int
    """Units whose results contradict each other: the same unit, another reward. The first attempt's counts."""
    torn: int
    """Lines that are no records: their units were owed again."""
    foreign: int
    """Records of other shards or campaigns: never counted."""
    missing_ids: tuple[str, ...] = ()
    """`task/repetition`, the first LISTED."""
    conflict_ids: tuple[str, ...] = ()
    rollouts: Written
    failures: Written
    sources: tuple[Source, ...]

    @property
    def sha256(self) -> str:
        return self.rollouts.sha256


class MergeRefusedError(BlockedError):
    """Something is missing, and nobody said that this is fine; `complete` says how it can be had."""

    def __init__(self, place: CampaignDir, expected: int, ok: int, failed: int, missing_ids: Sequence[str], complete: str) -> None:
        missing = expected - ok - failed
        more = f" and {missing - _SHOWN} more" if missing > _SHOWN else ""
        message = (
            f"{place.root}: incomplete: {missing} of {expected} units have no result ({ok} ok, {failed} failed for good); "
            f"the first: {', '.join(missing_ids[:_SHOWN])}{more}"
        )
        root = shlex.quote(str(place.root))
        super().__init__(Boundary.ROLLOUT, message, f"{complete}, or merge what there is: seatrial rollouts merge {root} --partial")
        self.expected, self.ok, self.failed, self.missing = expected, ok, failed, missing


def read_result(place: CampaignDir) -> MergeResult | None:
    """The last merge, or None when there is none; a UserError when its files are not the ones it wrote."""
    if not (place.merged / RESULT).is_file():
        return None
    result = read_model(place.merged / RESULT, MergeResult)
    for name, written in ((ROLLOUTS, result.rollouts), (FAILURES, result.failures)):
        path = place.merged / name
        size = path.stat().st_size if path.is_file() else None
        if size != written.bytes:
            raise UserError(
                f"{path}: {size} bytes instead of {written.bytes}: not what the merge wrote",
                f"seatrial rollouts merge {shlex.quote(str(place.root))}",
            )
    return result


_OFFSET_BITS = 42
_OFFSET = (1 << _OFFSET_BITS) - 1
"""4 TiB per file, and four million files."""


class Index:
    """A `journal.scan.Winners`."""

    def __init__(self, total: int) -> None:
        self.where = array("Q", bytes(8 * total))
        """The number of the file, then the offset: sorts in the order in which files are best read."""
        self.length = array("I", bytes(4 * total))
        """Zero where there is no winner."""
        self.files: list[Path] = []
        self._last: AttemptFile | None = None

    def put(self, unit: int, head: Mapping[str, Any], file: AttemptFile, offset: int, length: int) -> None:
        """Note the best record of a unit so far."""
        del head
        if file is not self._last:
            self._last = file
            self.files.append(file.path)
        self.where[unit] = (len(self.files) - 1) << _OFFSET_BITS | offset
        self.length[unit] = length

    def place_of(self, unit: int) -> tuple[int, int]:
        where = self.where[unit]
        return where >> _OFFSET_BITS, where & _OFFSET


_WINDOW = 16 << 20
_PIECE = 1 << 20
"""Hashed and written at a time: what was hashed is then still in the processor's cache."""


def copy_winners(index: Index, units: Iterable[int], path: Path, tick: Callable[[], None]) -> Written:
    """Write the records of `units` to a new file and sync it; `tick` is called now and then."""
    rows = size = 0
    try:
        with path.open("xb", buffering=0) as stream, ThreadPoolExecutor(max_workers=1) as beside:
            sink = _Sink(stream.fileno())
            buffers, put = (bytearray(_WINDOW), bytearray(_WINDOW)), None
            for window, length in _windows(index, units):
                tick()
                # A record that is larger than a window gets a buffer of its own.
                buffer = buffers[0] if length <= _WINDOW else bytearray(length)
                data = memoryview(buffer)[:length]
                _fetch(index, window, data)
                if put is not None:
                    put.result()
                put, buffers = beside.submit(sink.put, data), buffers[::-1]
                rows, size = rows + len(window), size + length
            if put is not None:
                put.result()
            os.fsync(stream.fileno())
    except OSError as error:
        raise write_error(path, error) from error
    return Written(rows=rows, bytes=size, sha256=sink.digest.hexdigest())


class _Sink:
    """Hashes and writes a window while the next one is read."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.digest = hashlib.sha256()

    def put(self, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            self.digest.update(piece)
            while piece:
                piece = piece[os.write(self._handle, piece) :]


def _windows(index: Index, units: Iterable[int]) -> Iterator[tuple[dict[int, int], int]]:
    """Units with where each one's record goes in the window, and the size of all. Only a record that is larger makes a larger one."""
    starts: dict[int, int] = {}
    size = 0
    for unit in units:
        length = index.length[unit]
        if starts and size + length > _WINDOW:
            yield starts, size
            starts, size = {}, 0
        starts[unit] = size
        size += length
    if starts:
        yield starts, size


def _fetch(index: Index, starts: dict[int, int], data: memoryview) -> None:
    file, opened, handle = 0, -1, -1
    try:
        for unit in sorted(starts, key=index.where.__getitem__):
            file, offset = index.place_of(unit)
            if file != opened:
                if handle >= 0:
                    os.close(handle)
                handle, opened = os.open(index.files[file], os.O_RDONLY | os.O_CLOEXEC), file
            line = data[starts[unit] : starts[unit] + index.length[unit]]
            if os.preadv(handle, [line], offset) < len(line):
                raise _changed(index.files[file], "it is shorter")
            try:
                check(line)
            except TornError as error:
                raise _changed(index.files[file], f"{error}") from error
            if unit_of(line) != unit:
                raise _changed(index.files[file], "another unit stands there")
    except OSError as error:
        raise _changed(index.files[file], error.strerror or str(error)) from error
    finally:
        if handle >= 0:
            os.close(handle)


def _changed(path: Path, why: str) -> BlockedError:
    return BlockedError(Boundary.ENVIRONMENT, f"{path}: not what was read a moment ago: {why}", "merge again; if it stays, check the disk")


WAIT_S = 120.0
"""For another merge."""


def merge_campaign(
    place: CampaignDir,
    manifest: Manifest,
    units: Units,
    *,
    partial: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    wait_s: float = WAIT_S,
) -> MergeResult:
    """Merge a campaign; raises a MergeRefusedError when units are missing and `partial` is not said, a LeaseHeldError when another merge
    does not end."""
    with Lease.acquire(place.merged / ".lease", LeaseHolder.here(), wait_s) as lease:

        def tick() -> None:
            check_stop()
            lease.renew()

        for name in (ROLLOUTS, FAILURES, RESULT):
            for left in place.merged.glob(f".{name}.*"):  # of merges that were killed
                left.unlink(missing_ok=True)
        # Rollouts are those of the rows that the manifest names only while nobody has edited them.
        check_inputs(place, manifest)
        index = Index(units.total)
        progress("reading the journal")
        scanner = Scanner(place, units, index)
        scan = scanner.update(tick=tick)
        missing = _ids(units, _units_with(scan, PENDING))
        if scan.owed and not partial:
            complete = f"seatrial rollouts resume {shlex.quote(str(place.root))}"
            if manifest.imported:
                complete = "import again, with the files that hold the others, into a new directory"
            elif manifest.rescored:
                complete = f"complete {manifest.rescored}, and repeat the rescore command"
            raise MergeRefusedError(place, manifest.units, scan.ok, scan.failed, missing, complete)
        progress(f"writing {counted(scan.ok, 'rollout')}")
        rollouts, failures = (place.merged / f".{name}.{lease.holder.label}" for name in (ROLLOUTS, FAILURES))
        files = ((path.relative_to(place.root).as_posix(), read) for path, read in scanner.files.items())
        sources = (Source(path=path, bytes=read.offset, records=read.records, torn=read.torn + read.tail) for path, read in files)
        try:
            result = MergeResult(
                campaign=manifest.name,
                inputs_sha256=manifest.inputs_sha256,
                expected=manifest.units,
                ok=scan.ok,
                failed=scan.failed,
                missing=scan.owed,
                coverage=scan.ok / manifest.units,
                partial=scan.owed > 0,
                duplicates=scan.duplicates,
                conflicts=scan.conflicts,
                torn=scan.torn + scan.tails,
                foreign=scan.foreign,
                missing_ids=missing,
                conflict_ids=_ids(units, sorted(scan.conflicting)),
                rollouts=copy_winners(index, _units_with(scan, OK), rollouts, tick),
                failures=copy_winners(index, _units_with(scan, FAILED), failures, tick),
                failed_by_kind=_kinds(failures),
                sources=tuple(sources),
            )
            # A merge that was taken over while it slept must not replace what its successor wrote.
            lease.check()
            _publish(place.merged, rollouts, failures, result)
        finally:
            rollouts.unlink(missing_ok=True)
            failures.unlink(missing_ok=True)
    return result


def _units_with(scan: Scan, state: int) -> Iterator[int]:
    return (unit for unit, settled in enumerate(scan.settled) if settled == state)


def _ids(units: Units, numbers: Iterable[int]) -> tuple[str, ...]:
    """The first of them, as people know them."""
    return tuple(f"{units.row(units.row_of(number)).id}/{units.repeat_of(number)}" for number in islice(numbers, LISTED))


def _kinds(failures: Path) -> dict[str, int]:
    with failures.open("rb") as stream:
        found = Counter(orjson.loads(line)[KEY].get("kind", "") for line in stream)
    return dict(sorted(found.items()))


def _publish(directory: Path, rollouts: Path, failures: Path, result: MergeResult) -> None:
    try:
        try:
            same = (directory / RESULT).is_file() and read_model(directory / RESULT, MergeResult) == result
        except UserError:
            same = False
        if not same:  # where it says the same, whoever reads while the merge is repeated must not miss it
            (directory / RESULT).unlink(missing_ok=True)
            sync_directory(directory)
        rollouts.replace(directory / ROLLOUTS)
        failures.replace(directory / FAILURES)
        sync_directory(directory)
    except OSError as error:
        raise write_error(directory, error) from error
    write_json(directory / RESULT, result)
