"""Bytes in the cache that all checkouts share: code of modules, and what is known of their sources.

- The key is everything that the bytes depend on. Bytes that were damaged are not there.
- What the cache holds is executed and believed, so it is private: files and directories that belong to somebody else, or that others may
  write, are not read. `""` is no cache.
"""

# Paths are text here: pathlib may not be loaded yet, and what it does is watched.
# ruff: noqa: PTH103, PTH105, PTH116, PTH118, PTH120

from __future__ import annotations

import os
from _blake2 import blake2b  # hashlib would load OpenSSL in every child

OF_OTHERS = 0o022


def place(cache: str, key: bytes) -> str:
    """Where the bytes of a key are, or would be; "" without a cache."""
    name = blake2b(key, digest_size=16).hexdigest()
    return os.path.join(cache, name[:2], name) if cache else ""


def load(place: str) -> bytes | None:
    """What is there, if it is ours and whole."""
    if not place:
        return None
    try:
        file = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not (_private(os.fstat(file)) and _private(os.stat(os.path.dirname(place)))):
                return None
            data = _all(file)
        finally:
            os.close(file)
    except OSError:
        return None
    return data[16:] if blake2b(data[16:], digest_size=16).digest() == data[:16] else None


def _all(file: int) -> bytes:
    parts = []
    while part := os.read(file, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _private(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & OF_OTHERS


def keep(cache: str, place: str, data: bytes) -> None:
    """Put bytes there; without a cache, or where it cannot be written, they are made again next time."""
    if not place:
        return
    beside = f"{place}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        for directory in (os.path.dirname(cache), cache, os.path.dirname(place)):
            os.makedirs(directory, 0o700, exist_ok=True)  # makedirs gives its mode to the last one only
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(blake2b(data, digest_size=16).digest() + data)
        os.replace(beside, place)
    except OSError:
        pass
