"""Reads the files of all attempts to tell which units are settled: once in full, then only what was appended.

- A record counts when it is whole and its key is in the manifest. Everything else is torn or foreign: counted, and its unit is pending.
- A last line without its newline may still grow: it is read again next time, and shows as `tails` until then.
- Files are read in the order of winners (attempt number, token, offset): the first record that settles a unit wins, except that `ok`
  beats `failed`. A file that shrank makes the scan start anew.
- `resume --retry-failed` writes `forgiven.json`: final failures of attempts up to the one that it names are pending again.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from seatrial.core.errors import UserError
from seatrial.core.files import read_error, read_model, write_json
from seatrial.core.guarded import open_file
from seatrial.core.records import Record
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.journal.attempts import AttemptFile, attempt_files
from seatrial.rollouts.manifest import Units
from seatrial.rollouts.rollout_record import TornError, check, fields_of

_FILE = "forgiven.json"


class RetryMark(Record):
    """forgiven.json."""

    attempt: int


def retried_up_to(shard_dir: Path) -> int:
    """The last attempt whose final failures are owed again; 0 when none are."""
    file = shard_dir / _FILE
    return read_model(file, RetryMark).attempt if file.is_file() else 0


def mark_for_retry(place: CampaignDir) -> None:
    """Make every final failure in the journal pending again."""
    for shard_dir in sorted(place.shards.glob("[0-9]*")):
        files = attempt_files(shard_dir)
        if files:
            write_json(shard_dir / _FILE, RetryMark(attempt=files[-1].number))


PENDING, OK, FAILED = 0, 1, 2
_BUFFER = 1 << 20


class Winners(Protocol):
    """Learns which record settles a unit, and where it lies; told again when a better one comes."""

    def put(self, unit: int, head: Mapping[str, Any], file: AttemptFile, offset: int, length: int) -> None:
        """The best record so far."""


@dataclass(slots=True)
class Scan:
    """What the journal holds."""

    settled: bytearray
    """Of each unit: OWED, OK or FAILED (for good)."""
    ok: int = 0
    failed: int = 0
    """Units that failed for good."""
    by_kind: Counter[str] = field(default_factory=Counter)
    """Failure records of each class, final or not."""
    torn: int = 0
    """Lines that are no records."""
    tails: int = 0
    """Files whose last line has no end (yet)."""
    duplicates: int = 0
    """Records that settle a unit which another one settles as well."""
    conflicting: set[int] = field(default_factory=set)
    """Units with `ok` records of different rewards."""
    foreign: int = 0
    """Records whose unit is not of this shard or campaign."""
    failed_attempts: Counter[int] = field(default_factory=Counter)
    """Failures that were not final, of each unit."""
    reward_sum: float = 0.0
    """Over `ok` units."""

    @property
    def conflicts(self) -> int:
        """How many units have results that contradict each other."""
        return len(self.conflicting)

    @property
    def owed(self) -> int:
        """How many units are not settled, of all shards."""
        return len(self.settled) - self.ok - self.failed


@dataclass(slots=True)
class ReadFile:
    """How far a file was read."""

    shard: int
    offset: int = 0
    """Behind the last whole line."""
    records: int = 0
    torn: int = 0
    tail: bool = False


class Scanner:
    """Reads the journal of a campaign, again and again."""

    def __init__(self, place: CampaignDir, units: Units, winners: Winners | None = None) -> None:
        self._place = place
        self._units = units
        self._winners = winners
        self._tasks: dict[int, str] = {}
        self._shards: set[int] = set()
        self._clear()

    def _clear(self) -> None:
        self.scan = Scan(bytearray(self._units.total))
        self.files: dict[Path, ReadFile] = {}
        self._rewards = array("d", bytes(8 * self._units.total))
        self._forgiven: dict[int, int] = {}

    def update(self, shards: Iterable[int] | None = None, tick: Callable[[], None] = lambda: None) -> Scan:
        """Read what was appended to these shards (None: all that have a directory) since the last time; `tick` is called per file."""
        try:
            return self._update(shards, tick)
        except OSError as error:
            raise read_error(Path(error.filename or self._place.shards), error) from error

    def _update(self, shards: Iterable[int] | None, tick: Callable[[], None]) -> Scan:
        wanted = set(_all_shards(self._place) if shards is None else shards)
        self._shards |= wanted
        found = self._find(wanted)
        sizes = {file.path: size for _, file, size in found}
        if any(read.offset > sizes.get(path, 0) for path, read in self.files.items() if read.shard in wanted):
            self._clear()
            found = self._find(self._shards)
        for shard, file, size in found:
            read = self.files.setdefault(file.path, ReadFile(shard))
            if size > read.offset:
                tick()
                self._read(file, read)
        self.scan.tails = sum(read.tail for read in self.files.values())
        return self.scan

    def _find(self, shards: Iterable[int]) -> list[tuple[int, AttemptFile, int]]:
        """Files with their sizes, in the order of winners."""
        return [(shard, file, file.path.stat().st_size) for shard in sorted(shards) for file in attempt_files(self._place.shard(shard))]

    def owed(self, shards: Iterable[int]) -> Iterator[int]:
        """Units of these shards that nothing has settled, as of the last update."""
        settled = self.scan.settled
        return (unit for shard in shards for unit in self._units.of_shard(shard) if settled[unit] == PENDING)

    def _read(self, file: AttemptFile, read: ReadFile) -> None:
        mine = self._units_of(read.shard)
        self._forgiven[read.shard] = retried_up_to(self._place.shard(read.shard))
        with open_file(file.path, buffering=_BUFFER) as stream:
            stream.seek(read.offset)
            read.tail = False
            for line in stream:
                if line[-1:] != b"\n":
                    read.tail = True
                    break
                try:
                    self._take(line, file, read, mine)
                except TornError:
                    read.torn += 1
                    self.scan.torn += 1
                read.offset += len(line)

    def _take(self, line: bytes, file: AttemptFile, read: ReadFile, mine: Set[int]) -> None:
        head = fields_of(line, check(line))
        unit: int = head.get("unit", -1)
        if type(unit) is not int:
            raise TornError("its unit is no number")
        if unit not in mine or head.get("task") != self._task(unit):
            self.scan.foreign += 1
            return
        if head.get("final") and file.number <= self._forgiven[read.shard]:
            head["final"] = False
        best = self._settles(unit, head)
        read.records += 1
        if best and self._winners is not None:
            try:
                self._winners.put(unit, head, file, read.offset, len(line))
            except (
                TypeError,
                ValueError,
                KeyError,
                AttributeError,
                OverflowError,
            ) as error:
                message = f"{file.path}: the record of unit {unit}, at byte {read.offset}: a field of its head is of another type: {error}"
                raise UserError(message, "the journal was edited: restore it, or delete this line; its unit is then owed again") from error

    def _settles(self, unit: int, head: dict[str, Any]) -> int:
        """Count a record; says OK or FAILED when it is the best of its unit so far, else 0."""
        scan, before = self.scan, self.scan.settled[unit]
        if head.get("outcome") != "ok":
            if type(kind := head.get("kind", "")) is not str:
                raise TornError("its kind is no text")
            scan.by_kind[kind] += 1
            if not head.get("final"):
                scan.failed_attempts[unit] += 1
                return PENDING
            if before:
                scan.duplicates += 1
                return PENDING
            scan.failed += 1
            scan.settled[unit] = FAILED
            return FAILED
        if (reward := head.get("reward")) is None:
            raise TornError("a result without its reward")
        if type(reward) is not float and type(reward) is not int:
            raise TornError("its reward is no number")
        if before:
            scan.duplicates += 1
        if before == OK:
            if reward != self._rewards[unit]:
                scan.conflicting.add(unit)
            return PENDING
        scan.failed -= before == FAILED
        scan.ok += 1
        scan.reward_sum += reward
        scan.settled[unit] = OK
        self._rewards[unit] = reward
        return OK

    def _units_of(self, shard: int) -> Set[int]:
        try:
            return set(self._units.of_shard(shard))
        except IndexError:
            return frozenset()

    def _task(self, unit: int) -> str:
        row = self._units.row_of(unit)
        if (task := self._tasks.get(row)) is None:
            task = self._tasks[row] = self._units.row(row).id
        return task


def _all_shards(place: CampaignDir) -> list[int]:
    try:
        return [int(path.name) for path in place.shards.iterdir() if path.name.isdecimal() and path.is_dir()]
    except FileNotFoundError:
        return []
