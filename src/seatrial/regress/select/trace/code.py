"""Code of a module: instrumented, kept in a cache of our own; `__pycache__` is neither read nor written.

- The key of the cache is everything that the code depends on: the source, the path, this Python, what instrumenting does, and who else
  changes the tree. A file of the cache that was damaged is made again.
- What the cache holds is executed, so it is private: files and directories that belong to somebody else, or that others may write, are not
  read. `""` is no cache.
- Everything is imported with this module: in a child nothing of ours can be found any more when the first module of the project comes.
- Files that hand functions to other compilers (which would stumble over a hit) are not instrumented: `compiled` returns None for them,
  as for what cannot be parsed.
"""

# Paths are text here: pathlib may not be loaded yet, and what it does is watched.
# ruff: noqa: PTH103, PTH105, PTH116, PTH118, PTH120

from __future__ import annotations

import ast
import marshal
import os
import re
import sys
from _blake2 import blake2b  # hashlib would load OpenSSL in every child
from collections.abc import Callable
from types import CodeType
from typing import Any

from seatrial.regress.select.trace.instrument import instrument
from seatrial.regress.select.trace.name import VERSION

Rewrite = Callable[[ast.Module, bytes, str], None]

OTHERS = re.compile(rb"\btorch\s*\.\s*(compile|jit|_dynamo|export)\b|\bfrom\s+torch\s+import\b.*\b(compile|jit)\b|\btriton\b|\bnumba\b")
BROKEN = (SyntaxError, ValueError, RecursionError, MemoryError)
OF_OTHERS = 0o022


def compiled(source: bytes, path: str, relative: str, cache: str, rewrite: Rewrite | None, salt: str) -> CodeType | None:
    """The code, from the cache or made and put there; None if this file is not to be instrumented."""
    if OTHERS.search(source):
        return None
    tag = f"{VERSION}\0{path}\0{relative}\0{sys.version}\0{sys.flags.optimize}\0{salt}\0"
    key = blake2b(tag.encode("utf-8", "surrogateescape") + source, digest_size=16).hexdigest()
    place = os.path.join(cache, key[:2], key) if cache else ""
    found = _load(place) if place else None
    if found is None:
        found = _make(source, path, relative, rewrite)
        if found is not None and place:
            _keep(cache, place, found)
    return found


def _make(source: bytes, path: str, relative: str, rewrite: Rewrite | None) -> CodeType | None:
    try:
        tree = ast.parse(source, path)
        if rewrite is not None:
            rewrite(tree, source, path)
        instrument(tree, relative)
        made: Any = compile(tree, path, "exec", dont_inherit=True)
    except BROKEN:
        return None  # Python itself says it better, or can do it without us
    return made if isinstance(made, CodeType) else None


def _load(place: str) -> CodeType | None:
    try:
        file = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not (_private(os.fstat(file)) and _private(os.stat(os.path.dirname(place)))):
                return None
            data = _all(file)
        finally:
            os.close(file)
        if blake2b(data[16:], digest_size=16).digest() != data[:16]:
            return None
        found = marshal.loads(data[16:])
    except (OSError, ValueError, EOFError, TypeError):
        return None
    return found if isinstance(found, CodeType) else None


def _all(file: int) -> bytes:
    parts = []
    while part := os.read(file, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _private(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & OF_OTHERS


def _keep(cache: str, place: str, code: CodeType) -> None:
    data = marshal.dumps(code)
    beside = f"{place}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        for directory in (os.path.dirname(cache), cache, os.path.dirname(place)):
            os.makedirs(directory, 0o700, exist_ok=True)  # makedirs gives its mode to the last one only
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(blake2b(data, digest_size=16).digest() + data)
        os.replace(beside, place)
    except OSError:
        pass  # without a cache it is made again next time
