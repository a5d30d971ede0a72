"""The state file: one sqlite file beside the project's tests, written once at the end of a session by one process.

- `load` gives what is known, or nothing and the reason: another schema, Python, root, distributions or pytest options are not trusted.
- A damaged file is set aside under another name and said so; it never breaks a session. One that is locked, or that cannot be opened, is
  healthy as far as we know: it is not trusted this time, and stays.
- `save` reads and writes in one transaction that holds the lock, so sessions beside each other lose nothing.
- A record names sets of versions; a set is stored once, however many tests share it. The last 8 commits of a test are kept.
- A test that fails loses the passing records that hold right now: they claimed what has just been refuted.
"""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from array import array
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.regress.select.choose import Changed, Known, Now
from seatrial.regress.select.files.digests import Version
from seatrial.regress.select.files.facts import Facts, sha

SCHEMA = 5
"""Of the tables, and of what facts mean: they are kept from session to session."""
WAIT_S = 30.0
COMMITS = 8
TABLES = """
create table meta (key text primary key, value text not null);
create table versions (id integer primary key autoincrement, path text not null, block text not null, digest text not null,
  seal text not null, unique (path, block, digest));
create table sets (id integer primary key autoincrement, hash text not null unique, members blob not null);
create table records (test text not null, commit_id text not null, sets text not null, seal text not null, time real not null,
  primary key (test, commit_id));
create table failed (test text primary key, time real not null);
create table facts (sha text primary key, data blob not null, time real not null);
"""

NAMES = frozenset({"meta", "versions", "sets", "records", "failed", "facts"})
# what reading a damaged file raises
DAMAGE = (sqlite3.DatabaseError, ValueError, TypeError, AttributeError, KeyError, zlib.error)


class _Damaged(ValueError):
    """What is there cannot be read."""


@dataclass(slots=True)
class Loaded:
    """What a session starts from; `told` says why the map is not trusted, "" when it is."""

    known: Known = field(default_factory=Known)
    facts: dict[str, bytes] = field(default_factory=dict)
    told: str = ""

    def kept(self, key: str) -> Facts | None:
        """Facts of a text; what cannot be read is found anew, and written over."""
        data = self.facts.get(key)
        if data is None:
            return None
        try:
            return Facts.from_json(json.loads(zlib.decompress(data)))
        except DAMAGE:
            return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a session saw of one test: the sets it depends on when it passed, None when it failed."""

    test: str
    sets: tuple[frozenset[Version], ...] | None


def load(path: Path, given: dict[str, str]) -> Loaded:
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


def _trusted(base: sqlite3.Connection, given: dict[str, str]) -> Loaded:
    """What an open file holds, if it may be believed."""
    tables = {name for (name,) in base.execute("select name from sqlite_master where type = 'table'")}
    if "meta" not in tables:
        return Loaded(told="nothing recorded yet")
    kept = dict(base.execute("select key, value from meta"))
    different = [key for key in sorted({*kept, *given, "schema"}) if kept.get(key) != {**given, "schema": str(SCHEMA)}.get(key)]
    if different:
        return Loaded(told=f"recorded with another {', another '.join(different)}")
    if not tables >= NAMES:
        return Loaded(told=f"the state file has no {', no '.join(sorted(NAMES - tables))}")
    return _read(base)


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


def _read(base: sqlite3.Connection) -> Loaded:
    known = Known()
    for number, path, block, digest, seal in base.execute("select id, path, block, digest, seal from versions"):
        known.versions[number] = (path if isinstance(path, str) else path.decode("utf-8", "surrogatepass"), block, digest)
        _hold(seal == _seal(*known.versions[number]), "a version")
    for number, name, members in base.execute("select id, hash, members from sets"):
        _hold(name == sha(members), "a set")
        known.sets[number] = tuple(array("q", members))
        _hold(known.versions.keys() >= set(known.sets[number]), "a version")
    for test, commit, sets, seal in base.execute("select test, commit_id, sets, seal from records order by time desc, rowid desc"):
        _hold(seal == _seal(test, commit, sets), "a record")
        numbers = tuple(json.loads(sets))
        _hold(known.sets.keys() >= set(numbers), "a set")
        known.records.setdefault(test, []).append(numbers)
    known.failed = frozenset(test for (test,) in base.execute("select test from failed"))
    return Loaded(known, dict(base.execute("select sha, data from facts")))


def _hold(fine: bool, what: str) -> None:
    """One wrong digit may name another set, and select too little: everything between a test and its versions is sealed."""
    if not fine:
        raise _Damaged(f"{what} is not as it was written")


def _seal(*texts: str) -> str:
    return sha("\0".join(texts).encode("utf-8", "surrogatepass"))[:16]


def save(path: Path, given: dict[str, str], commit: str, outcomes: Iterable[Outcome], fresh: dict[str, Facts], now: Now) -> None:
    """Write what a session saw, in one transaction: all of it or nothing."""
    every = list(outcomes)
    try:
        _save(path, given, commit, every, fresh, now)
    except (_Damaged, sqlite3.DatabaseError) as error:
        if _healthy(error):
            raise
        set_aside(path)
        _save(path, given, commit, every, fresh, now)


def _save(path: Path, given: dict[str, str], commit: str, outcomes: Iterable[Outcome], fresh: dict[str, Facts], now: Now) -> None:
    with closing(_connect(path)) as base:
        base.execute("begin immediate")
        try:
            loaded = _trusted(base, given)
        except sqlite3.DatabaseError:
            raise
        except DAMAGE as error:
            raise _Damaged(str(error)) from error
        if loaded.told:
            _clear(base, given)
        changed = Changed(loaded.known, now)
        numbers = {version: number for number, version in loaded.known.versions.items()}
        stored: dict[frozenset[Version], int] = {}
        passed = []
        for outcome in outcomes:
            if outcome.sets is None:
                _fail(base, outcome.test, changed)
            else:
                passed.append((outcome.test, sorted({_set(base, one, numbers, stored) for one in outcome.sets if one})))
        _pass(base, commit, passed)
        base.executemany(
            "insert or replace into facts values (?, ?, ?)",
            [(key, zlib.compress(json.dumps(found.to_json()).encode(), 1), time.time()) for key, found in fresh.items()],
        )
        _sweep(base)
        base.execute("commit")


def _clear(base: sqlite3.Connection, given: dict[str, str]) -> None:
    names = [name for (name,) in base.execute("select name from sqlite_master where type = 'table' and name not like 'sqlite_%'")]
    for name in names:
        base.execute(f'drop table "{name}"')
    for statement in filter(str.strip, TABLES.split(";")):
        base.execute(statement)
    base.executemany("insert into meta values (?, ?)", [*given.items(), ("schema", str(SCHEMA))])


def _fail(base: sqlite3.Connection, test: str, changed: Changed) -> None:
    base.execute("insert or replace into failed values (?, ?)", (test, time.time()))
    for commit, sets in base.execute("select commit_id, sets from records where test = ?", (test,)).fetchall():
        if changed.of(json.loads(sets)) is None:
            base.execute("delete from records where test = ? and commit_id = ?", (test, commit))


def _pass(base: sqlite3.Connection, commit: str, passed: Iterable[tuple[str, list[int]]]) -> None:
    now = time.time()
    told = [(test, commit, text, _seal(test, commit, text), now) for test, text in ((test, json.dumps(ids)) for test, ids in passed)]
    base.executemany("delete from failed where test = ?", [row[:1] for row in told])
    base.executemany("insert or replace into records values (?, ?, ?, ?, ?)", told)
    base.execute(
        "delete from records where rowid in (select rowid from"
        " (select rowid, row_number() over (partition by test order by time desc, rowid desc) as number from records) where number > ?)",
        (COMMITS,),
    )


def _set(base: sqlite3.Connection, versions: frozenset[Version], numbers: dict[Version, int], stored: dict[frozenset[Version], int]) -> int:
    if versions in stored:
        return stored[versions]
    for version in versions:
        if version not in numbers:
            row = (_stored(version[0]), *version[1:], _seal(*version))
            added = base.execute("insert into versions (path, block, digest, seal) values (?, ?, ?, ?)", row)
            numbers[version] = int(added.lastrowid or 0)
    members = array("q", sorted(numbers[version] for version in versions)).tobytes()
    base.execute("insert or ignore into sets (hash, members) values (?, ?)", (sha(members), members))
    stored[versions] = int(base.execute("select id from sets where hash = ?", (sha(members),)).fetchone()[0])
    return stored[versions]


def _stored(path: str) -> str | bytes:
    """A file name that is no text is kept as bytes."""
    return path if path.isprintable() else path.encode("utf-8", "surrogatepass")


def _sweep(base: sqlite3.Connection) -> None:
    """Drop what no record names any more, when it is more than half."""
    used = {number for (sets,) in base.execute("select sets from records") for number in json.loads(sets)}
    held = [number for (number,) in base.execute("select id from sets")]
    if len(held) > 2 * len(used) + 100:
        base.executemany("delete from sets where id = ?", [(number,) for number in held if number not in used])
        members = {number for (blob,) in base.execute("select members from sets") for number in array("q", blob)}
        unused = [(number,) for (number,) in base.execute("select id from versions") if number not in members]
        base.executemany("delete from versions where id = ?", unused)
    base.execute("delete from facts where sha not in (select sha from facts order by time desc limit 20000)")
