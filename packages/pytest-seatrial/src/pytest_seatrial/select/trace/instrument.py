"""Cuts a module into blocks with digests, puts a hit into each, and keeps the code in a cache that all checkouts share."""

from __future__ import annotations

import ast
import os
import warnings
from _blake2 import blake2b  # hashlib would load OpenSSL in every child
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

from pytest_seatrial.select.trace import memoized
from pytest_seatrial.select.trace.trace_events import HIT_NAME

BROKEN = (SyntaxError, ValueError, RecursionError, MemoryError)  # what parsing raises for text that is no module that Python would run


def parse_source(source: bytes) -> ast.Module:
    """The tree; bytes, so that Python itself finds out the encoding. Warnings are the import's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Raises for what can be parsed and is no program all the same: `break` outside of a loop, `await` outside of a coroutine.
        compile(source, "<checked>", "exec", dont_inherit=True)
        return ast.parse(source)


def functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its name, the outer before the inner."""
    counts: dict[str, int] = {}
    found = []
    for name, node in _named(tree, ""):
        counts[name] = counts.get(name, 0) + 1
        found.append((name if counts[name] == 1 else f"{name}#{counts[name]}", node))
    return found


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    # Functions stand in lists of statements only, so expressions need not be looked through.
    lists = (getattr(node, field, None) for field in ("body", "handlers", "orelse", "finalbody", "cases"))
    for child in (child for part in lists if isinstance(part, list) for child in part):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + child.name, child
            yield from _named(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from _named(child, f"{prefix}{child.name}.")
        else:
            yield from _named(child, prefix)


def documented(body: list[ast.stmt]) -> bool:
    first = body[0] if body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def nodes_inside(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module) -> Iterator[ast.AST]:
    """Every node of a block's own: of functions inside it only what stands around their bodies."""
    pending: list[ast.AST] = list(reversed(node.body[int(documented(node.body)) :]))
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
            pending.extend([part.args, *part.decorator_list, *filter(None, [part.returns])])
        else:
            pending.extend(ast.iter_child_nodes(part))


def _yields(body: list[ast.stmt]) -> bool:
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))
    return False


def cut(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Own statements of each block, "" for the module level; inner functions are left with their docstring, and with a
    `yield` if they are generators. Changes the tree."""
    own = {}
    for name, node in functions(tree):
        body, told = node.body, documented(node.body)
        own[name] = body[1:] if told else body
        # Calling a generator function runs nothing of it: that it is one belongs to the block around.
        node.body = [*(body[:1] if told else []), *([ast.Expr(ast.Yield())] if _yields(body) else [])]
    return {"": tree.body, **own}


WHOLE = "*"
MODULE = ""
KEEPS = 1 << 61  # beside the number, where it is hit: the block keeps something


def block_number(path: str, name: str) -> int:
    """61 bits for one block of one file; `path` is relative to the root."""
    return half(f"{path}\0") ^ half(name)  # no block is called like a file


def half(name: str) -> int:
    """The part of a number that comes from the name of a block alone, or (with a zero after it) from that of a file."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big") >> 3


class Slice(NamedTuple):
    mentions: frozenset[str]
    lines: frozenset[int]
    told: str
    asked: frozenset[str]  # these as in `memoized.LeftOut`


class Looked(NamedTuple):
    """Of every block of a file, by name."""

    digests: dict[str, str]
    mentions: dict[str, frozenset[str]]
    """Identifiers: names, attributes, imported names, and those in strings that look like (dotted) names."""
    remote: frozenset[str]  # blocks that contain a call `….remote(…)`
    sticky: frozenset[str]  # blocks that do their work once and keep the result, so that who comes later uses it without running them
    keepers: dict[str, tuple[Slice, ...]]  # blocks that run again, and may do less then: what they may leave out
    setters: dict[str, frozenset[str]]  # what functions set, by their names


def look(tree: ast.Module) -> Looked:
    named = functions(tree)
    own = cut(tree)
    inside = {name: [node for part in body for node in ast.walk(part)] for name, body in own.items()}
    known = memoized.file(((node.name, inside[name]) for name, node in named), inside[MODULE])
    less = {name: memoized.left_out(node, inside[name], known) for name, node in named}
    return Looked(
        {
            name: blake2b("\n".join(map(ast.dump, body)).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
            for name, body in own.items()
        },
        {name: frozenset(_words(nodes)) for name, nodes in inside.items()},
        frozenset(
            name
            for name, nodes in inside.items()
            if any(isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "remote" for node in nodes)
        ),
        frozenset(name for name, node in named if memoized.skips(node, inside[name])),
        {name: tuple(map(_slice, some)) for name, some in less.items() if some},
        dict(known.setters),
    )


def _slice(less: memoized.LeftOut) -> Slice:
    inside = {id(node): node for part in less.nodes for node in ast.walk(part)}.values()
    # A function inside is another block: of its text only what stands around its body is here.
    placed = [node for node in inside if isinstance(node, (ast.stmt, ast.expr))]
    spans = ((getattr(node, "lineno", 0), getattr(node, "end_lineno", None) or -1) for node in placed)
    lines = frozenset(line for first, last in spans for line in range(first, last + 1))
    return Slice(frozenset(_words(inside)), lines, less.told, less.asked)


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


N = TypeVar("N", bound=ast.AST)


def numbers(tree: ast.Module, path: str) -> dict[int, int]:
    """What stands for each function (its id): its number, and what it is beside; `path` is relative to the root."""
    named = functions(tree)
    inside = {name: list(nodes_inside(node)) for name, node in named}
    known = memoized.file(((node.name, inside[name]) for name, node in named), nodes_inside(tree))
    found = {}
    for name, node in named:
        keeps = memoized.skips(node, inside[name]) or memoized.left_out(node, inside[name], known)
        found[id(node)] = block_number(path, name) | (KEEPS if keeps else 0)
    return found


def instrument(tree: ast.Module, numbers: dict[int, int], module: int) -> None:
    _Instrument(numbers, module).visit(tree)


class _Instrument(ast.NodeTransformer):
    def __init__(self, numbers: dict[int, int], module: int) -> None:
        self.numbers = numbers
        self.module = module
        self.current = module

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        # Decorators and defaults run in the block around; annotations are never touched, since they may be turned into text.
        node.decorator_list = [self.visit(part) for part in node.decorator_list]
        node.args.defaults = [self.visit(part) for part in node.args.defaults]
        node.args.kw_defaults = [part and self.visit(part) for part in node.args.kw_defaults]
        around, self.current = self.current, self.numbers[id(node)]
        first = int(documented(node.body))
        node.body[first:] = [self.visit(part) for part in node.body[first:]]
        self._enter(node.body, first)
        self.current = around
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        node.body = self._beside(node.body, 1)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        over = node.iter
        if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "iter" and len(over.args) == 2:
            return self.visit_While(node)
        return self.generic_visit(node)

    def visit_Yield(self, node: ast.Yield | ast.YieldFrom | ast.Await) -> ast.AST:
        self.generic_visit(node)
        return self._beside(node, 0)

    visit_YieldFrom = visit_Await = visit_Yield

    def visit_While(self, node: ast.While | ast.For | ast.AsyncFor | ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        if self.current != self.module:
            self._enter(node.body, 0)
        return node

    visit_AsyncFor = visit_AsyncWith = visit_While

    def _enter(self, body: list[ast.stmt], place: int) -> None:
        # `global` has no line of its own in the compiled code, so it lends none.
        rest = [part for part in body[place:] if not isinstance(part, (ast.Global, ast.Nonlocal))]
        after: ast.AST = (rest or body)[0]
        after = (getattr(after, "decorator_list", None) or [after])[0]
        body.insert(place, _at(ast.Expr(self._hit(after)), after))

    def _beside(self, node: ast.expr, keep: int) -> ast.expr:
        """`node` and a hit, in the order that keeps `node` at index `keep`."""
        pair = [self._hit(node), node] if keep else [node, self._hit(node)]
        both = _at(ast.Tuple(pair, ast.Load()), node)
        return _at(ast.Subscript(both, _at(ast.Constant(keep), node), ast.Load()), node)

    def _hit(self, where: ast.AST) -> ast.expr:
        name, number = _at(ast.Name(HIT_NAME, ast.Load()), where), _at(ast.Constant(self.current), where)
        return _at(ast.Subscript(name, number, ast.Load()), where)


def _at(node: N, where: ast.AST) -> N:
    """At the start of `where`, and without width: a statement of many lines must not lend them all."""
    line, column = getattr(where, "lineno", 1), getattr(where, "col_offset", 0)
    for name, value in (("lineno", line), ("end_lineno", line), ("col_offset", column), ("end_col_offset", column)):
        setattr(node, name, value)
    return node


# Paths are text here: pathlib may not be loaded yet, and what it does is watched.
# ruff: noqa: PTH103, PTH105, PTH116, PTH118, PTH120


OF_OTHERS = 0o022


def cached_place(cache: str, key: bytes) -> str:
    """Where the bytes of a key are, or would be; "" without a cache."""
    name = blake2b(key, digest_size=16).hexdigest()
    return os.path.join(cache, name[:2], name) if cache else ""


def load_cached(place: str) -> bytes | None:
    """What is there, if it is ours and whole."""
    if not place:
        return None
    try:
        file = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not (_private(os.fstat(file)) and _private(os.stat(os.path.dirname(place)))):
                return None
            data = b"".join(iter(lambda: os.read(file, 1 << 20), b""))
        finally:
            os.close(file)
    except OSError:
        return None
    return data[16:] if blake2b(data[16:], digest_size=16).digest() == data[:16] else None


def _private(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & OF_OTHERS


def store_cached(cache: str, place: str, data: bytes) -> None:
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
