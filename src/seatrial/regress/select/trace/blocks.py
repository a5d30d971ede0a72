"""What of a source file can change by itself: its blocks, their digests, and what they mention.

- A block is the body of one function without the bodies of functions inside it; everything else of a file is its module level, "".
  Name, signature, decorators and docstring of a function belong to the block around it (they are there without running it), and so do
  classes, lambdas and comprehensions.
- Digests are of the syntax tree: comments and layout do not count. A file that cannot be parsed is one block, "*".
- Numbers of blocks are the same in every process and every version of Python.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from seatrial.regress.select.trace import memo, slices, syntax

WHOLE = "*"
MODULE = ""
KEEPS = 1 << 61
"""Beside the number, where it is hit: the block keeps something."""


def digest(data: bytes) -> str:
    """16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def number(path: str, name: str) -> int:
    """61 bits for one block of one file; `path` is relative to the root."""
    return half(f"{path}\0") ^ half(name)  # no block is called like a file


def half(name: str) -> int:
    """The part of a number that comes from the name of a block alone, or (with a zero after it) from that of a file."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big") >> 3


class Slice(NamedTuple):
    """A part of a block."""

    mentions: frozenset[str]
    lines: frozenset[int]
    told: str
    asked: frozenset[str]
    """These as in `slices.LeftOut`."""


class Looked(NamedTuple):
    """Of every block of a file, by name."""

    digests: dict[str, str]
    mentions: dict[str, frozenset[str]]
    """Identifiers: names, attributes, imported names, and those in strings that look like (dotted) names."""
    remote: frozenset[str]
    """Blocks that contain a call `….remote(…)`."""
    sticky: frozenset[str]
    """Blocks that do their work once and keep the result, so that who comes later uses it without running them."""
    keepers: dict[str, tuple[Slice, ...]]
    """Blocks that run again, and may do less then: what they may leave out."""
    setters: dict[str, frozenset[str]]
    """What functions set, by their names."""


def look(tree: ast.Module) -> Looked:
    """Look at one file. Changes the tree."""
    named = syntax.functions(tree)
    own = syntax.cut(tree)
    inside = {name: [node for part in body for node in ast.walk(part)] for name, body in own.items()}
    known = slices.file(((node.name, inside[name]) for name, node in named), inside[MODULE])
    less = {name: slices.left_out(node, inside[name], known) for name, node in named}
    return Looked(
        {name: digest("\n".join(map(ast.dump, body)).encode("utf-8", "surrogatepass")) for name, body in own.items()},
        {name: frozenset(_words(nodes)) for name, nodes in inside.items()},
        frozenset(name for name, nodes in inside.items() if any(map(_is_remote, nodes))),
        frozenset(name for name, node in named if memo.skips(node, inside[name])),
        {name: tuple(map(_slice, some)) for name, some in less.items() if some},
        dict(known.setters),
    )


def _slice(less: slices.LeftOut) -> Slice:
    inside = {id(node): node for part in less.nodes for node in ast.walk(part)}.values()
    lines = {line for node in inside for line in _lines(node)}
    return Slice(frozenset(_words(inside)), frozenset(lines), less.told, less.asked)


def _lines(node: ast.AST) -> range:
    # A function inside is another block: of its text only what stands around its body is here.
    return (
        range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", None) or -1) + 1)
        if isinstance(node, (ast.stmt, ast.expr))
        else range(0)
    )


def blocks(source: bytes) -> dict[str, str]:
    """Digest of each block by name."""
    try:
        return look(syntax.parse(source)).digests
    except syntax.BROKEN:
        return {WHOLE: digest(source)}


def _is_remote(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remote"


def _words(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
            if node.asname:
                yield node.asname
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            # "a.b.c", "module:function": how registries and mocks name functions
            yield from (word for word in node.value.replace(":", ".").split(".") if word.isidentifier())
