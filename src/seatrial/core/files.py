"""Reading and writing the run directory: atomic, strict, and with errors that name the file.

- Every write goes to a temporary file in the same directory, is synced, and is renamed over the target:
  a reader or a crash sees the old content or the new one, never a torn one.
- JSON is strict: a non-finite number is an error here; callers store it as a marked string (`number_to_json`).
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import BadValue, open_file, parse_json, read_file
from seatrial.core.verdict import Boundary

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
_MARKED = re.compile(r'"\s*[+-]?(?:nan|inf(?:inity)?)\s*"', re.IGNORECASE)
"""Text that pydantic would take for a number."""
LFS_POINTER = "version https://git-lfs.github.com/spec/v1"
_MB = 1e6
PIECE = 65_536
"""Bytes of a line that are read at once; a longer line comes in pieces."""
LINE = 1 << 20
"""Bytes of one line that are read from its start on; of what follows, only the last piece and those that hold a telling word."""
TELLING = (
    *(b"rror", b"raceback", b"xception", b"kill", b"fault", b"abort", b"skip", b"stale", b"step:", b"{'", b'{"', b"exit", b"fail", b"rc="),
    *(b"sig", b"warn", b"oom", b"memory", b"died", b"crash", b"lost", b"drop", b"terminat", b"cancel", b"signal", b"restart", b"dumped"),
)
"""Words that a piece in the middle of an endless line may hold, in small letters: it is read, too."""
_OF_BARS = b"0123456789%|[]<>,./#\r " + bytes(range(0x80, 0x100))
"""What progress bars mostly consist of; no telling word has any of it."""
_NO_NUMBER = re.compile(rb"\b(?:nan|inf(?:inity)?|non-?finite)\b")
MOST_TELLING = 64
"""Telling pieces of one line that are read; a line with more was not read."""
ROW = 1 << 26
"""Bytes that a row of JSON may have."""
CUT = "…"
"""Stands at the end of a piece that was cut where no carriage return is, and at the start of the next: no pattern reads on over it."""


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically, making the parent directory if it is absent."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))  # half of a surrogate pair stays visible


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` atomically; an OSError becomes an error that names the path (see `write_error`)."""
    with replacing(path) as stream:
        stream.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose content becomes `path` when the block ends well, and nothing when it does not; errors as in `write_bytes`. A device
    or a pipe (/dev/stdout, /dev/null) is written to, never replaced."""
    try:
        if _is_device(path):
            handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a reader is an error, and no wait
            os.set_blocking(handle, True)
            with os.fdopen(handle, "wb") as stream:
                yield stream
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            Path(temporary).chmod(0o644)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise write_error(path, error) from error


def _is_device(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def write_error(path: Path, error: OSError) -> UserError | BlockedError:
    """What a failed write means: a full disk blocks a trial; anything else is a wrong place."""
    message = f"{path}: cannot write: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BlockedError(Boundary.ENVIRONMENT, message, f"free space on the disk of {path.parent}, then resume or start again")
    return UserError(message, "make the directory writable, or choose another place")


def sync_directory(path: Path) -> None:
    """Make a rename durable; some filesystems refuse to sync a directory, which is no reason to fail."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def delete(path: Path) -> None:
    """Remove a file or a directory, also one with read-only directories in it; a BlockedError when the machine refuses."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            try:
                shutil.rmtree(path)
            except PermissionError:
                # Directories that a build made read-only.
                path.chmod(0o700)
                for parent, names, _ in os.walk(path):
                    for name in names:
                        if not (directory := Path(parent, name)).is_symlink():
                            directory.chmod(0o700)
                shutil.rmtree(path)
    except OSError as error:
        message = f"{path}: cannot remove: {error.strerror or error} ({error.filename})"
        raise BlockedError(Boundary.ENVIRONMENT, message, f"remove it yourself: rm -rf {shlex.quote(str(path))}") from error


def number_to_json(value: float) -> float | str:
    """A number as strict JSON: NaN and infinities become marked strings."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a model or plain data as indented strict JSON."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_text(path: Path) -> str:
    """Read UTF-8 text (undecodable bytes are kept visible), or raise a UserError that names the file."""
    try:
        return io.TextIOWrapper(io.BytesIO(read_file(path)), encoding="utf-8", errors="backslashreplace").read()
    except (OSError, ValueError) as error:  # a null character in a name is a ValueError
        raise read_error(path, error) from error


def read_error(path: Path, error: OSError | ValueError) -> UserError:
    """A file that cannot be read."""
    what = error.strerror if isinstance(error, OSError) else None
    return UserError(f"{path}: cannot read: {what or error}".replace("\0", "\\0"), "check the path and its permissions")


@dataclass(slots=True)
class LeftOut:
    """What `read_pieces` did not give of a file."""

    first: int | None = None
    """The number of the first line with a piece that was left out."""
    telling: int | None = None
    """The number of the first line with a piece that was left out although it holds a telling word: there were too many."""


_LINE_FEED = ord("\n")


def read_pieces(path: Path, left_out: LeftOut | None = None) -> Iterator[tuple[int, bool, str]]:
    """The lines of a file of any size: the number, whether the piece begins its line, and the text without its line feed.

    - Numbers count line feeds only. After a last line feed comes an empty line, as `split` gives it.
    - A line that is longer than `PIECE` comes in pieces: cut behind a carriage return, so that the parts of a progress bar stay
      whole; where there is none, anywhere, and then `CUT` marks both sides.
    - Of a line that is longer than `LINE` (a progress bar of days, a dump) the middle is left out, but for its last piece and those
      with a telling word; `left_out` notes such a line.
    """
    left_out = left_out or LeftOut()
    try:
        with open_file(path) as stream:
            number, start, rest, mark, size, told, begun = 1, True, b"", "", 0, 0, False
            last: tuple[str, bytes, str] | None = None  # the piece that was left out last
            # A log is read several times: its endless lines are looked through once.
            version = os.fstat(stream.fileno())
            at, looked = 0, _looked(version.st_dev, version.st_ino, version.st_size, version.st_mtime_ns)
            readline = stream.readline
            while raw := readline(PIECE):
                at += len(raw)
                if start and not rest and raw[-1] == _LINE_FEED:  # nearly every line
                    yield number, True, raw[:-1].decode("utf-8", "backslashreplace")
                    number += 1
                    continue
                size += len(raw)
                if rest:
                    raw, rest = rest + raw, b""
                if raw.endswith(b"\n"):
                    if last is not None:
                        yield number, False, last[0] + last[1].decode("utf-8", "backslashreplace") + last[2]
                    yield number, start, mark + raw[:-1].decode("utf-8", "backslashreplace")
                    number, start, mark, size, told, begun, last = number + 1, True, "", 0, 0, False, None
                    continue
                if len(raw) < PIECE:  # the end of the file, or a piece whose end was kept back
                    rest = raw
                    continue
                place = raw.rfind(b"\r") + 1
                raw, rest, cut = (raw[: place - 1], raw[place:], "") if place else (raw[: _boundary(raw)], raw[_boundary(raw) :], CUT)
                if size > LINE + PIECE:
                    before = last if last is not None and last[2] else None  # a word may begin in it
                    if at not in looked:
                        looked[at] = _telling((before[1][-16:] if before else b"") + raw)
                    telling = looked[at]
                    told += telling
                    ends, begun = begun, telling and bool(cut)  # what a telling piece began may end in the next
                    if not (telling or ends) or told > MOST_TELLING:
                        if last is not None:
                            left_out.first = left_out.first or number
                        if telling:
                            left_out.telling = left_out.telling or number
                        last, mark = (mark, raw, cut), cut
                        continue
                    if before:
                        yield number, False, before[0] + before[1].decode("utf-8", "backslashreplace") + before[2]
                yield number, start, mark + raw.decode("utf-8", "backslashreplace") + cut
                start, mark, last = False, cut, None
            if last is not None:
                yield number, False, last[0] + last[1].decode("utf-8", "backslashreplace") + last[2]
            if rest or start or mark:
                yield number, start, mark + rest.decode("utf-8", "backslashreplace")
    except (OSError, ValueError) as error:
        raise read_error(path, error) from error


@lru_cache(maxsize=4)
def _looked(*_: int) -> dict[int, bool]:
    """Which pieces of a file are telling, by where they end."""
    return {}


def _telling(raw: bytes) -> bool:
    """Whether a piece may say that something went wrong."""
    small = raw.lower()
    words = small.translate(None, _OF_BARS)  # may join words to a telling one, but hides none
    if any(word in words for word in TELLING) and any(word in small for word in TELLING):
        return True
    return (b"nan" in small or b"inf" in small or b"finite" in small) and _NO_NUMBER.search(small) is not None


def read_rows(path: Path) -> Iterator[tuple[int, str, bool]]:
    """The lines of a file of rows, one after the other: number, text, and whether a line feed ends it. A row that is longer than `ROW`
    is cut there, so that no reader takes it for a whole one."""
    try:
        with open_file(path) as stream:
            number = 0
            while raw := stream.readline(ROW):
                number += 1
                yield number, raw.decode("utf-8", "backslashreplace"), raw.endswith(b"\n") or len(raw) == ROW
                while len(raw) == ROW and not raw.endswith(b"\n"):
                    raw = stream.readline(ROW)
    except (OSError, ValueError) as error:
        raise read_error(path, error) from error


def _boundary(raw: bytes) -> int:
    """Where to cut bytes without cutting a character."""
    for back in range(1, 4):
        if raw[-back] >= 0xC0:  # the first byte of a character
            return len(raw) - back
        if raw[-back] < 0x80:
            break
    return len(raw)


def left_out_of(path: Path) -> LeftOut:
    """What `read_pieces` leaves out of a file; only one with an endless line is read for it."""
    found = LeftOut()
    try:
        with open_file(path) as stream:
            size = 0
            while raw := stream.readline(PIECE):
                size = 0 if raw.endswith(b"\n") else size + len(raw)
                if size > LINE + PIECE:
                    for _ in read_pieces(path, found):
                        pass
                    break
    except (OSError, ValueError) as error:
        raise read_error(path, error) from error
    return found


def read_json(path: Path) -> Any:
    """Read JSON, or raise a UserError with file, line and column."""
    try:
        return parse_json(read_text(path))
    except BadValue as error:
        where = f"{path}:{error.line}:{error.column}" if error.line is not None else str(path)
        raise UserError(f"{where}: not valid JSON: {error.what}", "the file is torn or was edited; restore it") from error


def read_table(path: Path) -> dict[str, Any]:
    """Read JSON that is an object, or raise a UserError."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise UserError(f"{path}: not a JSON object", "the file was written by another program or edited; restore it")
    return data


def read_as(path: Path, kind: type[T]) -> T:
    """Read JSON as a value of this type, such as `tuple[int, ...]`, or raise a UserError."""
    try:
        return TypeAdapter(kind).validate_python(read_json(path))
    except ValidationError as error:
        raise UserError(f"{path}: {error.errors()[0]['msg']}", "the file was written by another version or edited") from error


def read_model(path: Path, kind: type[M]) -> M:
    """Read a stored record and validate it; the error names the file and the key."""
    data = read_json(path)
    try:
        json.dumps(data, allow_nan=False)
    except ValueError as error:
        raise UserError(f"{path}: a number that is not finite", "the file was edited; restore it") from error
    try:
        return stored(kind, data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(top level)"
        raise UserError(f"{path}: {key}: {first['msg']}", "the file was written by another version or edited") from error


def stored(kind: type[M], data: Any) -> M:
    """A stored record. `"Infinity"` where a number belongs is a ValidationError too: as a number it could not be stored again."""
    record = kind.model_validate(data)
    if _MARKED.search(json.dumps(data)) is None:
        return record
    try:
        json.dumps(record.model_dump(mode="json"), allow_nan=False)
    except ValueError:
        raise ValidationError.from_exception_data(
            kind.__name__, [{"type": PydanticCustomError("finite_number", "a number that is not finite"), "input": None}]
        ) from None
    return record


def is_lfs_pointer(path: Path) -> bool:
    """Whether this file is a pointer of Git LFS instead of what it points to."""
    try:
        with open_file(path) as stream:
            return stream.read(len(LFS_POINTER)) == LFS_POINTER.encode()
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Room:
    """What is left on the filesystem of a path."""

    place: Path
    """The nearest directory that exists."""
    device: int
    free_mb: float
    free_inodes: int | None
    """None where the filesystem does not count them."""
    used: float
    """Share of the space that is taken, from 0 to 1."""
    read_only: bool
    writable: bool
    in_the_way: Path | None
    """What is on the way to the path, and is no directory."""


def room_at(path: Path) -> Room:
    """The room at `path`, which need not exist yet; an OSError where it cannot be told."""
    place = next(parent for parent in (path, *path.parents) if parent.is_dir())
    below = next((parent for parent in (path, *path.parents) if parent.parent == place and parent != place), None)
    in_the_way = below if below is not None and os.path.lexists(below) and not below.is_dir() else None
    found = os.statvfs(place)
    total, available = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    read_only = bool(found.f_flag & os.ST_RDONLY)
    return Room(
        place=place,
        device=place.stat().st_dev,
        free_mb=available / _MB,
        free_inodes=found.f_favail if found.f_files else None,
        used=1 - available / total if total else 0.0,
        read_only=read_only,
        writable=not read_only and os.access(place, os.W_OK | os.X_OK) and in_the_way is None,
        in_the_way=in_the_way,
    )
