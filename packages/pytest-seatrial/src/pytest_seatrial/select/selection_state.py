"""Which tests a change can reach, and the state file that says so: one sqlite file, written once at the end of a session by one process.

- `load` gives what is known, or nothing and the reason: another schema, Python, root, distributions or pytest options are not trusted.
- A damaged file is set aside under another name and said so; it never breaks a session. One that is locked, or that cannot be opened, is
  healthy as far as we know: it is not trusted this time, and stays.
- One seal is over all rows: a row that was changed, lost or added by another hand is noticed by whoever reads them next.
- `save` reads and writes in one transaction that holds the lock, so sessions beside each other lose nothing. A file that has the seal which
  this session read at its start is not read again, and what it holds already is not written again.
- A record names sets of versions; a set is stored once, however many tests share it. The last 8 commits of a test are kept.
- A test that fails loses the passing records that hold right now: they claimed what has just been refuted.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from pytest_seatrial.select.source_digests import ABSENT, EXISTS, IMPORTS, LEVEL, LISTING, UNSETTLED, WHOLE, Version, sha

Now = Callable[[str, str], str]

SKIPPED: Version = ("", "@skipped", UNSETTLED)  # all that is recorded of a test that skipped itself: it never holds


class Why(StrEnum):
    """The reasons, in the order of the summary."""

    AFFECTED = "affected"
    NEW = "new"
    FAILED = "failed before"
    SKIPPED = "skipped before"


@dataclass(slots=True)
class Known:
    """What the state file says: versions and sets by number, records of a test newest first."""

    versions: dict[int, Version] = field(default_factory=dict)
    sets: dict[int, tuple[int, ...]] = field(default_factory=dict)
    records: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """One test: selected with a reason, or left out (`why` is None)."""

    test: str
    why: Why | None
    detail: str = ""
    path: str = ""
    by: str = ""  # what else than a file

    def line(self) -> str:
        return f"{self.test}: {self.why}" + (f": {self.detail}" if self.detail else "")


def choose_affected(known: Known, now: Now, tests: Sequence[str]) -> list[Choice]:
    changed = Changed(known, now)
    return [_choice(known, changed, test) for test in tests]


class Changed:
    """The first changed version of each set, looked up once per set."""

    def __init__(self, known: Known, now: Now) -> None:
        self._known = known
        self._now = now
        self._found: dict[int, Version | None] = {}

    def of(self, sets: Iterable[int]) -> Version | None:
        for one in sets:
            if one not in self._found:
                self._found[one] = self._first(one)
            if (found := self._found[one]) is not None:
                return found
        return None

    def _first(self, number: int) -> Version | None:
        members = self._known.sets.get(number)
        if members is None:
            return ("", f"set {number}", "missing from the state file")
        for member in members:
            version = self._known.versions.get(member)
            if version is None:
                return ("", f"version {member}", "missing from the state file")
            path, block, digest = version
            if digest == UNSETTLED or self._now(path, block) != digest:
                return version
        return None


def _choice(known: Known, changed: Changed, test: str) -> Choice:
    if test in known.failed:
        return Choice(test, Why.FAILED)
    first: Version | None = None
    for sets in known.records.get(test, ()):
        found = changed.of(sets)
        if found is None:
            return Choice(test, None)
        first = first or found
    if first is None:
        return Choice(test, Why.NEW)
    if first == SKIPPED:
        return Choice(test, Why.SKIPPED)
    path, block, _ = first
    if not path and block.startswith("@"):
        return Choice(test, Why.AFFECTED, describe(first), by=describe(first))
    return Choice(test, Why.AFFECTED, describe(first), path or ("." if block in (WHOLE, LISTING, EXISTS) else ""))


def describe(version: Version) -> str:
    path, block, digest = version
    if digest == UNSETTLED:
        return f"{path or 'the root'} was written while the test ran"
    if digest == ABSENT:
        return f"{path or 'the root'} was absent" if block in (WHOLE, LISTING, EXISTS) else f"{path}: {block or 'module level'} was absent"
    if block == LEVEL:
        return f"{path}: module level"
    if block in (WHOLE, EXISTS):
        return path
    if block == LISTING:
        return f"{path or '.'}: names in the directory"
    if block == IMPORTS:
        return f"{path}: what its imports reach"
    if block.startswith("@"):
        return f"other {block[1:]}"
    return f"{path}: {block}" if path else block


SCHEMA = 6
WAIT_S = 30.0
COMMITS = 8
SEAL = "seal"
TABLES = """
create table meta (key text primary key, value text not null);
create table versions (id integer primary key autoincrement, path text not null, block text not null, digest text not null);
create table sets (id integer primary key autoincrement, members blob not null);
create table records (id integer primary key, test text not null, commit_id text not null, sets text not null);
create table failed (test text primary key);
"""

NAMES = frozenset({"meta", "versions", "sets", "records", "failed"})
# what reading a damaged file raises
DAMAGE = (sqlite3.DatabaseError, ValueError, TypeError, AttributeError, KeyError)


_VersionRow = tuple[int, str | bytes, str, str]
_SetRow = tuple[int, bytes]
_RecordRow = tuple[int, str, str, str]


class _Damaged(ValueError):
    """What is there cannot be read."""


@dataclass(eq=False, repr=False)  # what is not needed would cost time at every start
class Rows:
    """All rows but those of meta. The records of a test stand in the order in which they were written, by commit, each with its number."""

    versions: dict[int, Version] = field(default_factory=dict)
    sets: dict[int, bytes] = field(default_factory=dict)
    records: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def known(self) -> Known:
        return Known(
            self.versions,
            {number: tuple(array("q", members)) for number, members in self.sets.items()},
            {test: [_numbers(text) for _, text in reversed(own.values())] for test, own in self.records.items() if own},
            frozenset(self.failed),
        )

    def seal(self) -> str:
        versions = [(number, _stored(path), block, digest) for number, (path, block, digest) in self.versions.items()]
        records = [(number, test, commit, text) for test, own in self.records.items() for commit, (number, text) in own.items()]
        return _seal(sorted(versions), sorted(self.sets.items()), sorted(records), self.failed)


@dataclass(eq=False, repr=False)
class Loaded:
    """What a session starts from; `told` says why the map is not trusted, "" when it is."""

    rows: Rows = field(default_factory=Rows)
    told: str = ""
    seal: str = ""
    _known: Known | None = None

    @property
    def known(self) -> Known:
        """Made when it is first asked for: a session that only records does without."""
        if self._known is None:
            self._known = self.rows.known()
        return self._known


class RecordedOutcome(NamedTuple):
    """What a session saw of one test: the sets it depends on when it passed, None when it failed; some of them are shared with others."""

    test: str
    sets: tuple[frozenset[Version], ...] | None
    shared: tuple[frozenset[Version], ...] = ()


def load_state(path: Path, given: dict[str, str]) -> Loaded:
    """Read the state; what was recorded under other circumstances than `given` is not trusted."""
    if not path.exists():
        return Loaded(told="nothing recorded yet")
    try:
        with closing(_connect(path)) as base:
            base.execute("begin")  # one moment for all that is read
            return _trusted(base, given)
    except DAMAGE as error:
        if _healthy(error):
            return Loaded(told=f"the state file cannot be read now ({error})")
        return Loaded(told=f"the state file was damaged ({error}){set_aside(path)}")


def _trusted(base: sqlite3.Connection, given: dict[str, str], start: Loaded | None = None) -> Loaded:
    """What an open file holds, if it may be believed; `start`, when that is what it held already at the start of the session."""
    tables = {name for (name,) in base.execute("select name from sqlite_master where type = 'table'")}
    if "meta" not in tables:
        return Loaded(told="nothing recorded yet")
    kept = dict(base.execute("select key, value from meta"))
    seal = kept.pop(SEAL, "")
    different = [key for key in sorted({*kept, *given, "schema"}) if kept.get(key) != {**given, "schema": str(SCHEMA)}.get(key)]
    if different:
        return Loaded(told=f"recorded with another {', another '.join(different)}")
    if not tables >= NAMES:
        return Loaded(told=f"the state file has no {', no '.join(sorted(NAMES - tables))}")
    # The seal that is written next is over what we hold here: rows that differ from it by now do not go unnoticed.
    return start if start is not None and not start.told and start.seal == seal else _read(base, seal)


def _healthy(error: Exception) -> bool:
    """Whether an error says nothing about the file: it is locked, or cannot be opened or written. Only tables of another form are ours."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)  # none where Python could not read the text of a column
    return isinstance(error, sqlite3.OperationalError) and code & 0xFF != sqlite3.SQLITE_ERROR


def set_aside(path: Path) -> str:
    """Rename what cannot be read, so that nobody trusts it and nobody loses it; says how it is called now."""
    number = 1
    try:
        while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
            number += 1
        path.replace(target)
    except OSError as error:
        return f", and could not be renamed ({error.strerror})"
    return f" and is now {target.name}"


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)


def _read(base: sqlite3.Connection, seal: str) -> Loaded:
    versions = base.execute("select id, path, block, digest from versions order by id").fetchall()
    sets = base.execute("select id, members from sets order by id").fetchall()
    records = base.execute("select id, test, commit_id, sets from records order by id").fetchall()
    failed = {test for (test,) in base.execute("select test from failed")}
    if seal != _seal(versions, sets, records, failed):
        # One wrong digit may name another set, and select too little.
        raise _Damaged("it is not as it was written")
    rows = Rows({number: (_path(path), block, digest) for number, path, block, digest in versions}, dict(sets), {}, failed)
    for number, test, commit, text in records:
        rows.records.setdefault(test, {})[commit] = number, text
    return Loaded(rows, seal=seal)


def _seal(versions: list[_VersionRow], sets: list[_SetRow], records: list[_RecordRow], failed: set[str]) -> str:
    """Of all rows, each table in the order of its numbers."""
    text = repr((versions, [(number, len(members)) for number, members in sets], records, sorted(failed)))
    return sha(text.encode() + b"\0" + b"".join(members for _, members in sets))


def save_state(
    path: Path, given: dict[str, str], commit: str, outcomes: Iterable[RecordedOutcome], now: Now, start: Loaded | None = None
) -> None:
    """Write what a session saw, in one transaction: all of it or nothing. `start` is what it loaded, and is used up."""
    every = list(outcomes)
    try:
        _save(path, given, commit, every, now, start)
    except (_Damaged, sqlite3.DatabaseError) as error:
        if _healthy(error):
            raise
        set_aside(path)
        _save(path, given, commit, every, now, None)


def _save(path: Path, given: dict[str, str], commit: str, outcomes: Sequence[RecordedOutcome], now: Now, start: Loaded | None) -> None:
    with closing(_connect(path)) as base:
        base.execute("begin immediate")
        try:
            loaded = _trusted(base, given, start)
        except sqlite3.DatabaseError:
            raise
        except DAMAGE as error:
            raise _Damaged(str(error)) from error
        if loaded.told:
            _clear(base, given)
        writing = _Writing(base, loaded)
        # Where several processes run every test (`--dist each`), one that failed in any of them has failed.
        failed = {outcome.test for outcome in outcomes if outcome.sets is None}
        for test in sorted(failed):
            writing.fail(test, now)
        for outcome in outcomes:
            if outcome.sets is not None and outcome.test not in failed:
                writing.succeed(outcome.test, commit, writing.named(outcome.shared, outcome.sets))
        writing.flush()
        base.execute("commit")


def _clear(base: sqlite3.Connection, given: dict[str, str]) -> None:
    names = [name for (name,) in base.execute("select name from sqlite_master where type = 'table' and name not like 'sqlite_%'")]
    for name in names:
        base.execute(f'drop table "{name}"')
    for statement in filter(str.strip, TABLES.split(";")):
        base.execute(statement)
    base.executemany("insert into meta values (?, ?)", [*given.items(), ("schema", str(SCHEMA))])


class _Writing:
    """Changes of all rows: first in what was loaded, then at once in the file."""

    def __init__(self, base: sqlite3.Connection, loaded: Loaded) -> None:
        self._base = base
        self._loaded = loaded
        self._rows = loaded.rows
        self._failed = frozenset(self._rows.failed)
        self._versions = {version: number for number, version in self._rows.versions.items()}
        self._sets = {members: number for number, members in self._rows.sets.items()}
        self._stored: dict[frozenset[Version], int] = {}
        self._shared: dict[tuple[frozenset[Version], ...], tuple[frozenset[int], str]] = {}
        # A number is never given twice: a record elsewhere may still name the set that had it.
        given = dict(base.execute("select name, seq from sqlite_sequence"))
        self._version = max(given.get("versions", 0), *self._rows.versions, 0)
        self._set = max(given.get("sets", 0), *self._rows.sets, 0)
        self._record = base.execute("select coalesce(max(id), 0) from records").fetchone()[0]
        self._changed: Changed | None = None
        self._new_versions: list[_VersionRow] = []
        self._new_sets: list[_SetRow] = []
        self._new_records: list[_RecordRow] = []
        self._gone: list[tuple[int]] = []

    def fail(self, test: str, now: Now) -> None:
        if self._changed is None:
            self._changed = Changed(self._loaded.known, now)
        self._rows.failed.add(test)
        own = self._rows.records.get(test, {})
        for commit, (_, text) in list(own.items()):
            if self._changed.of(_numbers(text)) is None:
                self._gone.append((own.pop(commit)[0],))

    def succeed(self, test: str, commit: str, text: str) -> None:
        self._rows.failed.discard(test)
        own = self._rows.records.setdefault(test, {})
        newest = next(reversed(own), None)
        if newest == commit and own[newest][1] == text:
            return
        if commit in own:
            self._gone.append((own.pop(commit)[0],))
        self._record += 1
        own[commit] = self._record, text
        self._new_records.append((self._record, test, commit, text))
        while len(own) > COMMITS:
            self._gone.append((own.pop(next(iter(own)))[0],))

    def named(self, shared: tuple[frozenset[Version], ...], sets: Iterable[frozenset[Version]]) -> str:
        """The numbers of some sets, as a record names them; new ones are added."""
        if shared not in self._shared:
            found = sorted({self._number(one) for one in shared if one})
            self._shared[shared] = frozenset(found), " ".join(map(str, found))
        numbers, text = self._shared[shared]
        for number in sorted({self._number(one) for one in sets if one} - numbers):
            text = f"{text} {number}" if text else str(number)
        return text

    def _number(self, versions: frozenset[Version]) -> int:
        if versions in self._stored:
            return self._stored[versions]
        for version in versions:
            if version not in self._versions:
                self._version += 1
                self._versions[version] = self._version
                self._rows.versions[self._version] = version
                self._new_versions.append((self._version, _stored(version[0]), *version[1:]))
        members = array("q", sorted([self._versions[version] for version in versions])).tobytes()
        if members not in self._sets:
            self._set += 1
            self._sets[members] = self._set
            self._rows.sets[self._set] = members
            self._new_sets.append((self._set, members))
        self._stored[versions] = self._sets[members]
        return self._sets[members]

    def flush(self) -> None:
        """Write what is new, with a new seal; nothing, when nothing is."""
        rows, base = self._rows, self._base
        if self._loaded.seal and not (self._new_sets or self._new_records or self._gone) and rows.failed == self._failed:
            return
        base.executemany("insert into versions values (?, ?, ?, ?)", self._new_versions)
        base.executemany("insert into sets values (?, ?)", self._new_sets)
        base.executemany("insert into records values (?, ?, ?, ?)", self._new_records)
        base.executemany("delete from records where id = ?", self._gone)
        base.executemany("delete from failed where test = ?", [(test,) for test in self._failed - rows.failed])
        base.executemany("insert into failed values (?)", [(test,) for test in rows.failed - self._failed])
        self._sweep()
        base.execute("insert or replace into meta values (?, ?)", (SEAL, rows.seal()))

    def _sweep(self) -> None:
        """Drop what no record names any more, when it is more than half."""
        rows = self._rows
        used = set(" ".join([text for own in rows.records.values() for _, text in own.values()]).split())
        if len(rows.sets) <= 2 * len(used) + 100:
            return
        kept = {number: members for number, members in rows.sets.items() if str(number) in used}
        members = {number for blob in kept.values() for number in array("q", blob)}
        versions = {number: version for number, version in rows.versions.items() if number in members}
        self._base.executemany("delete from sets where id = ?", [(number,) for number in rows.sets.keys() - kept.keys()])
        self._base.executemany("delete from versions where id = ?", [(number,) for number in rows.versions.keys() - versions.keys()])
        rows.sets, rows.versions = kept, versions


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def _stored(path: str) -> str | bytes:
    """A file name that is no text is kept as bytes."""
    return path if path.isprintable() else path.encode("utf-8", "surrogatepass")


def _path(stored: str | bytes) -> str:
    return stored if isinstance(stored, str) else stored.decode("utf-8", "surrogatepass")
