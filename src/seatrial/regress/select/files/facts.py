"""What is true of one content of one Python file, whatever the session: its blocks, imports and names.

- A content is known by its hash, so facts are kept between sessions, in the cache that instrumented code is kept in, for every checkout.
- A file that Python cannot compile has one block, "*": any change of it is a change of everything in it.
"""

from __future__ import annotations

import ast
import hashlib
import marshal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from seatrial.regress.select.files.aliases import Other, other
from seatrial.regress.select.files.imports import Import, imports
from seatrial.regress.select.trace import kept, syntax
from seatrial.regress.select.trace.blocks import Slice, half, look


class Facts(NamedTuple):
    """One content of a Python file; `level` holds names used at module level outside import statements."""

    blocks: dict[str, str]
    halves: dict[int, str]
    """Blocks by their part of a number (`trace.blocks`)."""
    imports: tuple[Import, ...]
    mentions: dict[str, frozenset[str]]
    sticky: frozenset[str]
    keepers: dict[str, tuple[Slice, ...]]
    setters: dict[str, frozenset[str]]
    remote: frozenset[str]
    level: frozenset[str]
    other: Other

    def to_bytes(self) -> bytes:
        keepers = {name: tuple(tuple(one) for one in some) for name, some in self.keepers.items()}
        plain = self._asdict() | {"keepers": keepers, "other": tuple(self.other)}
        return marshal.dumps(tuple(plain.values()))

    @classmethod
    def from_bytes(cls, data: bytes) -> Facts:
        found = cls(*marshal.loads(data))
        keepers = {name: tuple(Slice(*one) for one in some) for name, some in found.keepers.items()}
        return found._replace(keepers=keepers, other=Other(*found.other))


def sha(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def facts(source: bytes) -> Facts:
    """Look at one content."""
    try:
        tree = syntax.parse(source)
        syntax.check(source)
    except syntax.BROKEN:
        return Facts({"*": sha(source)}, {}, (), {}, frozenset(), {}, {}, frozenset(), frozenset(), Other({}, frozenset(), {}))
    imported, level, names = tuple(imports(tree)), frozenset(_level(tree)), other(tree)
    found = look(tree)  # the last: it changes the tree
    halves = {half(block): block for block in found.digests}
    return Facts(found.digests, halves, imported, found.mentions, found.sticky, found.keepers, found.setters, found.remote, level, names)


class Shelf:
    """Facts from the cache, or found and put there; `version` is that of our own text, which says what facts mean."""

    def __init__(self, cache: Path | None, version: str) -> None:
        self._cache = "" if cache is None else str(cache)
        self._tag = f"facts\0{version}\0{sys.version}\0".encode()

    def __call__(self, source: bytes) -> Facts:
        place = kept.place(self._cache, self._tag + source)
        data = kept.load(place)
        if data is not None:
            return Facts.from_bytes(data)
        found = facts(source)
        kept.keep(self._cache, place, found.to_bytes())
        return found


def _level(tree: ast.Module) -> Iterator[str]:
    """Names that run at import: everything but import statements and the bodies of functions."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending.extend([*node.decorator_list, node.args])
        else:
            pending.extend(ast.iter_child_nodes(node))
