"""The header of a refit payload as strict JSON, and `RefitRefused`: why a payload was refused, with names, values and the fix.

Unknown, absent or repeated keys, other types, repeated names, planes that are not exactly the body: all are refused, so a parsed header
needs no second look. Code that raises a refusal has left every bit as it was, or has put it back.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

REASONS = {
    "truncated": "the payload is shorter than it says",
    "corrupt": "the payload is not what was sent",
    "replay": "this version or a newer one is held already",
    "gap": "the payload builds on another version than the one that is held",
    "wrong-base": "the weights that are held are not those the payload builds on",
    "unknown-name": "names that the generator does not have",
    "absent-name": "weights that were not sent",
    "layout": "dtype, shape or memory layout do not fit",
    "mismatch": "the weights that are held afterwards are not those that were sent",
    "dead": "the generator is gone",
}
UNMAPPED = "map"
"""Where a driver met the error (`where` of its `probe_error`) when the coordinate map could not be learned."""
SHOWN = 5


class RefitRefused(RuntimeError):
    """A refit that did not happen. `reason` is a key of REASONS."""

    def __init__(self, reason: str, names: Sequence[str] = (), fix: str = "", detail: str = "") -> None:
        if reason not in REASONS:
            raise ValueError(f"refit: {reason!r} is no reason; known: {', '.join(REASONS)}")
        super().__init__(reason, tuple(names), fix, detail)
        self.reason, self.names, self.fix, self.detail = reason, tuple(names), fix, detail

    def __str__(self) -> str:
        text = f"refit: refused ({self.reason}): {self.detail or REASONS[self.reason]}"
        if self.names:
            more = f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
            text += f": {', '.join(self.names[:SHOWN])}{more}"
        return f"{text}; fix: {self.fix}" if self.fix else text


FORMAT = 1
TRANSPORTS = ("full", "packed", "sparse")
KINDS = ("overwrite", "difference")
MODES = ("raw", "same", "sparse", "bitmap", "dense")
CODECS = ("none", "zlib", "zstd")
PLANES = {"raw": 1, "same": 0, "sparse": 3, "bitmap": 3, "dense": 1}
"""How many planes a tensor has in each mode (see payload.py)."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: str
    """The fingerprint of the tensor as it must be afterwards."""
    base: str | None
    """The fingerprint of the tensor that a sparse payload builds on; None for the others."""
    mode: str
    changed: int
    """Elements that differ from the base of the producer."""
    planes: tuple[Pair, ...]


@dataclass(frozen=True)
class Header:
    transport: str
    kind: str
    version: int
    base_version: int | None
    """What a sparse payload builds on; None for the others."""
    base_root: str | None
    target_root: str
    tensors: tuple[Entry, ...]
    codec: str
    frames: tuple[Pair, ...]
    """Lengths of each frame: uncoded, as sent."""
    body: int
    sums: Pair
    format: int = FORMAT


def parse(text: bytes) -> Header:
    try:
        given = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        header = _made(given)
        _check(header)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RefitRefused("corrupt", detail=f"its header is not valid: {error}") from error
    return header


def _made(given: Any) -> Header:
    _keys(given, Header)
    if given["format"] != FORMAT:
        raise ValueError(f"format {given['format']!r}; known: {FORMAT}")
    if not isinstance(given["target_root"], str) or not isinstance(given["base_root"], str | None):
        raise TypeError("target_root is a text, base_root a text or null")
    return Header(
        **{key: given[key] for key in ("transport", "kind", "version", "base_version", "base_root", "target_root", "codec", "body")},
        tensors=tuple(_entry(item) for item in given["tensors"]),
        frames=tuple(_pair(item) for item in given["frames"]),
        sums=_pair(given["sums"]),
    )


def _entry(given: Any) -> Entry:
    _keys(given, Entry)
    made = dict(given) | {"shape": tuple(map(_count, given["shape"])), "planes": tuple(_pair(item) for item in given["planes"])}
    return Entry(**made)


def _keys(given: Any, kind: type) -> None:
    names = {field.name for field in fields(kind)}
    if not isinstance(given, dict) or given.keys() != names:
        found = sorted(given) if isinstance(given, dict) else type(given).__name__
        raise ValueError(f"{kind.__name__} has the keys {sorted(names)}, not {found}")


def _check(header: Header) -> None:
    """Types and values; whatever passes can be used without a second look."""
    _among("transport", header.transport, TRANSPORTS)
    _among("kind", header.kind, KINDS)
    _among("codec", header.codec, CODECS)
    if _count(header.version) == 0:
        raise ValueError("version 0 is where both sides start: it is never sent")
    sparse = header.transport == "sparse"
    if sparse != (header.base_version is not None) or sparse != (header.base_root is not None):
        raise ValueError("base_version and base_root belong to sparse payloads, and only to them")
    if header.base_version is not None and _count(header.base_version) >= header.version:
        raise ValueError(f"version {header.version} cannot build on {header.base_version}")
    if not sparse and header.kind != "overwrite":
        raise ValueError(f"a {header.transport} payload overwrites")
    if not header.tensors:
        raise ValueError("there is no tensor in it")
    if sum(sent for _, sent in header.frames) != _count(header.body):
        raise ValueError("its frames are not its body")
    raw = sum(size for size, _ in header.frames)
    if header.codec == "none" and raw != header.body:
        raise ValueError("without a codec a frame has one length")
    _check_entries(header, raw)


def _check_entries(header: Header, raw: int) -> None:
    modes = MODES[1:] if header.transport == "sparse" else MODES[:1]
    names, end = set(), 0
    for entry in header.tensors:
        if not all(isinstance(text, str) for text in (entry.name, entry.dtype, entry.hash)):
            raise ValueError("name, dtype and hash of a tensor are texts")
        if entry.name in names:
            raise ValueError(f"the name {entry.name!r} occurs twice")
        names.add(entry.name)
        _among(f"mode of {entry.name}", entry.mode, modes)
        if not isinstance(entry.base, str if header.transport == "sparse" else type(None)):
            raise ValueError(f"{entry.name}: a base hash belongs to a tensor of a sparse payload, and only to it")
        if entry.mode == "same" and entry.base != entry.hash:
            raise ValueError(f"{entry.name}: the same as its base, with another hash")
        _count(entry.changed)
        if len(entry.planes) != PLANES[entry.mode]:
            raise ValueError(f"{entry.name}: {len(entry.planes)} planes in mode {entry.mode}")
        for start, length in entry.planes:
            if start != end:
                raise ValueError(f"{entry.name}: a plane begins at {start}, the one before it ends at {end}")
            end = start + length
    if end != raw:
        raise ValueError(f"the planes end at {end}, the body at {raw}")


def _among(what: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{what} is {value!r}; known: {', '.join(known)}")


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _pair(value: Any) -> Pair:
    first, second = value
    return _count(first), _count(second)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")
