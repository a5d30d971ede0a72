"""unit_results.json, its dated copies, the partial file that survives a kill, and stale results of an earlier session.

- A session that ends before its tests (an unknown option, a broken conftest.py) replaces stale results, so nobody takes them for its own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from pytest_seatrial.guarded_text import parse_json

LATEST = "unit_results.json"
DATED = "unit_results"
SUFFIX = ".partial.jsonl"
BEGINNING_S = 60  # so long a session may take from making its partial file to the first line
SILENT_S = 24 * 3600  # without locks, a session that wrote nothing for so long has ended


class Tracked(NamedTuple):
    """A finished test that used the tracker; `metrics` is JSON text."""

    nodeid: str
    key: str
    outcome: str
    metrics: str

    def line(self) -> str:
        """For the partial file; the metrics are JSON already."""
        nodeid, key = encode_basestring_ascii(self.nodeid), encode_basestring_ascii(self.key)
        return f'{{"test": [{nodeid}, {key}, "{self.outcome}"], "metrics": {self.metrics}}}\n'


class Partial:
    """The partial file of this session: the lock on it says that the session lives."""

    def __init__(self, directory: Path, start: float, head: dict[str, Any]) -> None:
        place = directory / DATED
        place.mkdir(parents=True, exist_ok=True)
        self.path, self._stream = _claim(place, stamp(start))
        if hasattr(os, "register_at_fork"):  # a forked child would hold the lock when the session is dead
            os.register_at_fork(after_in_child=self._stream.close)
        self._write = self._stream.write
        self._write(f"{json.dumps({'head': head})}\n".encode())

    def add(self, test: Tracked) -> None:
        self._write(test.line().encode())

    def close(self, *, remove: bool) -> None:
        """The session has written its results (`remove`), or could not: then the lines stay for the next one."""
        if remove:
            _remove(self.path, self._stream)
        self._stream.close()


def _claim(place: Path, name: str) -> tuple[Path, IO[bytes]]:
    for number in range(1, 1000):
        path = place / f".{name}{'' if number == 1 else f'-{number}'}{SUFFIX}"
        try:
            stream = path.open("xb", buffering=0)
        except FileExistsError:
            continue
        try:
            _lock(stream)
        except OSError as error:
            stream.close()
            path.unlink(missing_ok=True)  # else the next session would take it for one of a killed session
            if isinstance(error, BlockingIOError):
                continue  # a session that begins just now looks whether it was left
            raise
        return path, stream
    raise FileExistsError(f"{place}: too many partial files of {name}")


def _lock(stream: IO[bytes]) -> bool:
    """Hold a file; False where there are no locks, BlockingIOError where somebody else holds it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def _remove(path: Path, stream: IO[bytes]) -> None:
    """Remove an open file; while it is held if that can be, so that nobody else takes it for left. Windows removes no open file."""
    if os.name == "nt":
        stream.close()
    path.unlink(missing_ok=True)


def is_ours(file: Path) -> bool:
    """Whether this plugin wrote the file: a conftest with a tracker of its own may write one of the same name, which stays."""
    if not file.is_file():
        return False
    try:
        read = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return False  # nobody can take it for results
    return isinstance(read, dict) and {"metrics", "outcomes", "tests"} <= read.keys()


def told(start: float) -> str:
    """As it stands in the files."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start))


def stamp(start: float) -> str:
    """As it stands in names of files."""
    return time.strftime("%Y%m%d_%H%M%S", time.localtime(start))


def document(head: dict[str, Any], tests: Iterable[Tracked], exit_status: int | str, end: dict[str, Any]) -> dict[str, Any]:
    """The content of the file, with metrics still as text (see `write`).

    A node id that ran more than once counts with its last run, and `reruns` says how often before.
    """
    last: dict[str, Tracked] = {}
    reruns: dict[str, int] = {}
    for test in tests:
        if test.nodeid in last:
            reruns[test.nodeid] = reruns.get(test.nodeid, 0) + 1
        last[test.nodeid] = test
    owners: dict[str, int] = {}
    for test in last.values():
        owners[test.key] = owners.get(test.key, 0) + 1
    keys = {nodeid: test.key if owners[test.key] == 1 else nodeid for nodeid, test in last.items()}
    made = {
        "exit_status": exit_status,
        "git_commit": head.get("git_commit"),
        "start_time": head.get("start_time"),
        "metrics": {keys[nodeid]: test.metrics for nodeid, test in last.items()},
        "gpu_types": end.pop("gpu_types", []),
        "coverage": end.pop("coverage", "[n/a] run with --cov=PACKAGE"),
        "outcomes": {keys[nodeid]: test.outcome for nodeid, test in last.items()},
        **{name: head.get(name) for name in ("git_branch", "git_dirty", "project")},
        "machine": end.pop("machine", None),
        "tests": end.pop("tests", {}),
    }
    notes = [*head.get("notes", []), *end.pop("notes", [])]
    return (
        made
        | ({"reruns": {keys[nodeid]: count for nodeid, count in reruns.items()}} if reruns else {})
        | ({"notes": notes} if notes else {})
    )


def write(directory: Path, start: str, made: dict[str, Any], *, latest: bool) -> Path:
    """Write the dated file and, if asked, unit_results.json; returns the dated one, whose name nobody had."""
    place = directory / DATED
    place.mkdir(parents=True, exist_ok=True)
    temporary = _beside(place, made)
    try:
        dated = _claimed(temporary, place, start)
    finally:
        temporary.unlink(missing_ok=True)
    if latest:
        write_latest(directory, made)
    return dated


def write_latest(directory: Path, made: dict[str, Any]) -> None:
    _beside(directory, made).replace(directory / LATEST)


def _text(made: dict[str, Any]) -> str:
    """A test per line: its metrics are JSON already, and need not be read to be written."""
    parts = []
    for name, value in made.items():
        if isinstance(value, dict) and value:
            texts = value if name == "metrics" else {key: json.dumps(part) for key, part in value.items()}
            lines = [f"    {encode_basestring_ascii(key)}: {text}" for key, text in texts.items()]
            parts.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
        else:
            parts.append(f'  "{name}": {json.dumps(value, allow_nan=False)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _claimed(temporary: Path, place: Path, start: str) -> Path:
    """Give a file a name that is free: a link, unlike a rename, never replaces what is there."""
    for number in range(1, 1000):
        path = place / f"{start}{'' if number == 1 else f'-{number}'}.json"
        try:
            os.link(temporary, path)
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                continue
            temporary.replace(path)
        return path
    raise FileExistsError(f"{place}: too many files of {start}")


def _beside(place: Path, made: dict[str, Any]) -> Path:
    handle, name = tempfile.mkstemp(prefix=".unit_results.", dir=place)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(_text(made).encode())
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def restore(directory: Path) -> list[str]:
    """Turn what killed sessions left into dated files; one line for each."""
    place = directory / DATED
    return [line for path in sorted(place.glob(f".*{SUFFIX}")) if (line := _restore_one(directory, path))]


def _restore_one(directory: Path, path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            try:
                silent = 0 if _lock(stream) else SILENT_S
            except BlockingIOError:
                return None  # its session lives
            if not path.exists():
                return None  # another session was faster
            data = stream.read()
            if time.time() - path.stat().st_mtime < max(silent, 0 if data else BEGINNING_S):
                return None  # made, and not locked yet; or nobody can say whether its session lives
            head, tests, notes = _read(data)
            made = document(head, tests, "killed", {"notes": notes, "coverage": "[n/a] the session was killed"})
            dated = write(directory, path.name[1 : -len(SUFFIX)], made, latest=False)
            _remove(path, stream)
    except OSError as error:
        return f"{path}: a killed session's results cannot be restored: {error}; make {directory / DATED} writable"
    torn = f" ({notes[-1]})" if notes else ""
    count = len(made["metrics"])
    return f"restored {count} test{'' if count == 1 else 's'} of a killed session: {dated}{torn}"


def _read(data: bytes) -> tuple[dict[str, Any], list[Tracked], list[str]]:
    head: dict[str, Any] = {}
    tests: list[Tracked] = []
    notes: list[str] = []
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("cut off")
            entry = parse_json(line)
            if "head" in entry:
                head = dict(entry["head"])
            else:
                nodeid, key, outcome = entry["test"]
                tests.append(Tracked(nodeid, key, outcome, json.dumps(dict(entry["metrics"]))))
        except (ValueError, TypeError, KeyError) as error:
            notes.append(f"line {number} of the partial file cannot be read ({type(error).__name__}): {line[:200]!r}")
    return head, tests, notes


NOT_BEGUN = "not begun"  # the exit status where pytest has none of its own: an error of a plugin that it does not catch


class StaleResults:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.start = time.time()
        self._caught: int | None = None
        self._ended = False

    def pytest_internalerror(self) -> None:
        """pytest shows it and goes on to the end; the same for an interrupt."""
        self._caught = int(pytest.ExitCode.INTERNAL_ERROR)

    def pytest_keyboard_interrupt(self) -> None:
        self._caught = int(pytest.ExitCode.INTERRUPTED)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._ended = True

    def close(self) -> None:
        """pytest cleans up. Without an error it was to run nothing, or it ran and the collector has written."""
        from _pytest.config import ConftestImportFailure

        status: int | str | None = self._caught
        if (error := sys.exc_info()[1]) is not None:
            usage = isinstance(error, pytest.UsageError | ConftestImportFailure)
            status = int(pytest.ExitCode.USAGE_ERROR) if usage else NOT_BEGUN
        if self._ended or status is None or not is_ours(self.directory / LATEST):
            return
        head = {"start_time": told(self.start)}
        try:
            write_latest(self.directory, document(head, (), status, {"coverage": "[n/a] no test ran"}))
        except OSError as error:
            file = self.directory / LATEST
            sys.stderr.write(f"seatrial: {file} is that of an earlier session, and cannot be replaced: {error}: remove it\n")
