"""What is true of one content of one Python file, whatever the session: its blocks, imports and names.

- A content is known by its hash, so facts can be kept between sessions; those of another Python version are thrown away with the map.
- A file that Python cannot compile has one block, "*": any change of it is a change of everything in it.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from seatrial.regress.select.files.aliases import Names, Other, other
from seatrial.regress.select.files.imports import Import, imports
from seatrial.regress.select.trace import syntax
from seatrial.regress.select.trace.blocks import look


@dataclass(frozen=True, slots=True)
class Facts:
    """One content of a Python file; `level` holds names used at module level outside import statements."""

    blocks: dict[str, str]
    imports: tuple[Import, ...]
    mentions: dict[str, frozenset[str]]
    sticky: frozenset[str]
    keepers: frozenset[str]
    remote: frozenset[str]
    level: frozenset[str]
    other: Other

    def to_json(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks,
            "imports": self.imports,
            "mentions": _lists(self.mentions),
            "sticky": sorted(self.sticky),
            "keepers": sorted(self.keepers),
            "remote": sorted(self.remote),
            "level": sorted(self.level),
            "aliases": _lists(self.other.aliases),
            "kept": sorted(self.other.kept),
            "decorators": _lists(self.other.decorators),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        return cls(
            dict(data["blocks"]),
            tuple((level, module, tuple(names)) for level, module, names in data["imports"]),
            _sets(data["mentions"]),
            frozenset(data["sticky"]),
            frozenset(data["keepers"]),
            frozenset(data["remote"]),
            frozenset(data["level"]),
            Other(_sets(data["aliases"]), frozenset(data["kept"]), _sets(data["decorators"])),
        )


def _lists(names: Names) -> dict[str, list[str]]:
    return {name: sorted(found) for name, found in names.items()}


def _sets(names: dict[str, list[str]]) -> Names:
    return {name: frozenset(found) for name, found in names.items()}


def sha(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def facts(source: bytes) -> Facts:
    """Look at one content."""
    try:
        tree = syntax.parse(source)
        syntax.check(source)
    except syntax.BROKEN:
        return Facts({"*": sha(source)}, (), {}, frozenset(), frozenset(), frozenset(), frozenset(), Other({}, frozenset(), {}))
    imported, level, names = tuple(imports(tree)), frozenset(_level(tree)), other(tree)
    found = look(tree)  # the last: it changes the tree
    return Facts(found.digests, imported, found.mentions, found.sticky, found.keepers, found.remote, level, names)


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
