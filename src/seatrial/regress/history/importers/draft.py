"""What an importer found, before it is decided whether the run is trusted; strict reading of JSON.

- None means that the file does not say: an unknown state of the tree is not a clean one, and no outcome is not a pass.
- `flaws` are what could not be read, or what contradicts itself: such a run is kept and never trusted.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from seatrial.model.errors import UserError
from seatrial.model.guarded import BadValue, has_every_key, parse_json_once, read_file
from seatrial.regress.history.record import Kind, Point
from seatrial.regress.history.tables import EARLIEST, LATEST

_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The state of a repository that a run ran on, as far as the run says it."""

    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None
    path: Path | None = None
    """A checkout in which the commit can be looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One run as its files tell it."""

    kind: Kind
    project: str | None = None
    name: str
    trees: tuple[Tree, ...] = ()
    time: float
    machine: str = ""
    """What it ran on; empty where the files do not say: never the machine on which they are read."""
    gpus: tuple[str, ...] = ()
    """GPUs that the files name, where they name no machine."""
    passed: bool | None = None
    source: Path
    digest: str
    points: list[Point]
    flaws: list[str] = field(default_factory=list)
    again: bool = False
    """A later import of the same run takes the place of this one."""


def require_sound(draft: Draft) -> None:
    """Raise a ValueError for a time that no calendar has, and for what is no text where text belongs."""
    if not EARLIEST < draft.time < LATEST:
        raise ValueError(f"the time {draft.time!r} is in no calendar")
    texts = {"project": draft.project, "name": draft.name, "machine": draft.machine}
    for what, value in [*texts.items(), *((what, getattr(tree, what)) for tree in draft.trees for what in ("commit", "branch"))]:
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{what} is no text: {value!r}")


def digest_of(kind: Kind, *parts: bytes) -> str:
    """The identity of what was imported."""
    made = hashlib.blake2b(str(kind).encode(), digest_size=20)
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.hexdigest()


def commit_in(value: Any) -> str | None:
    """A commit id, or None for `unknown` and the like."""
    return value if isinstance(value, str) and _COMMIT.fullmatch(value) else None


def read_bytes(path: Path) -> bytes:
    """The whole file, or a UserError that names it."""
    try:
        return read_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}", "check the path and its permissions") from error


def parse(path: Path, data: bytes) -> Any:
    """JSON without a key that stands twice, where Python would keep the last one without a word.

    The fast reader decides only where it can vouch for that. Otherwise, and for NaN, which it does not read, the slow one does.
    """
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError:
        found = None
    if found is not None and has_every_key(found, data):
        return found
    try:
        return parse_json_once(data)
    except BadValue as error:
        raise UserError(f"{path}: not valid JSON: {error.what}", "the file is torn or was edited; restore it") from error
