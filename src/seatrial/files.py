"""Reading and writing the run directory: atomic, strict, and with errors that name the file.

- Every write goes to a temporary file in the same directory, is synced, and is renamed over the target:
  a reader or a crash sees the old content or the new one, never a torn one.
- JSON is strict: a non-finite number is an error here; callers store it as a marked string (`number_to_json`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ValidationError

from seatrial.model.errors import BlockedError, UserError
from seatrial.model.verdict import Boundary

M = TypeVar("M", bound=BaseModel)


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically, making the parent directory if it is absent."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` atomically; an OSError becomes an error that names the path (see `write_error`)."""
    with replacing(path) as stream:
        stream.write(data)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose content becomes `path` when the block ends well, and nothing when it does not; errors as in `write_bytes`."""
    try:
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
        return path.read_text(encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}", "check the path and its permissions") from error


def read_json(path: Path) -> Any:
    """Read JSON, or raise a UserError with file, line and column."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise UserError(f"{where}: not valid JSON: {error.msg}", "the file is torn or was edited; restore it") from error


def read_model(path: Path, kind: type[M]) -> M:
    """Read a stored record and validate it; the error names the file and the key."""
    data = read_json(path)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "(top level)"
        raise UserError(f"{path}: {key}: {first['msg']}", "the file was written by another version or edited") from error
