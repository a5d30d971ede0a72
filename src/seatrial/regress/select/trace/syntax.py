"""A module's tree cut into blocks: which functions there are, what they are called, which statements are their own.

- Names are Python's qualified names (`Class.method`, `f.<locals>.g`); the second function of one name is `name#2`, in source order.
- The tracer and the digests must agree on names, so both take them from here.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

BROKEN = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What parsing raises for text that is no module that Python would run."""


def parse(source: bytes) -> ast.Module:
    """The tree; bytes, so that Python itself finds out the encoding. Warnings are the import's business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def check(source: bytes) -> None:
    """Raise for what can be parsed and is no program all the same: `break` outside of a loop, `await` outside of a coroutine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(source, "<checked>", "exec", dont_inherit=True)


def functions(tree: ast.Module) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its name, the outer before the inner."""
    counts: dict[str, int] = {}
    found = []
    for name, node in _named(tree, ""):
        counts[name] = counts.get(name, 0) + 1
        found.append((name if counts[name] == 1 else f"{name}#{counts[name]}", node))
    return found


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in _statements(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + child.name, child
            yield from _named(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from _named(child, f"{prefix}{child.name}.")
        else:
            yield from _named(child, prefix)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    # Functions stand in lists of statements only, so expressions need not be looked through.
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        part = getattr(node, field, None)
        if isinstance(part, list):
            yield from part


def documented(body: list[ast.stmt]) -> bool:
    """Whether the first statement is a docstring."""
    first = body[0] if body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def inside(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module) -> Iterator[ast.AST]:
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
