"""Functions that work once and keep the result, so that whoever comes later may not run them at all.

- By decorator: its name has cache, memo, once, lazy or singleton in it.
- By `global`: whoever needs what was set need not call it.
- `__missing__`, and `__getattr__` or `__get__` that sets something.

Those that run again and do less then are in `slices`. Too many is safe (tests depend on more), too few is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef

WORDS = ("cache", "memo", "once", "lazy", "singleton", "defaultdict")
KEEPERS = frozenset({"setdefault", "append", "add", "update", "insert", "extend", "pop", "popleft", "popitem"})
"""What is taken from a pool was put there by somebody."""


def skips(node: Function, inside: Sequence[ast.AST]) -> bool:
    """Whether the work of the function may be had without running it."""
    if any(word in name.lower() for part in node.decorator_list for name in names(part) for word in WORDS):
        return True
    if any(isinstance(inner, (ast.Global, ast.Nonlocal)) for inner in inside):
        return True
    return node.name == "__missing__" or (node.name in ("__getattr__", "__get__") and any(True for _ in set_here(inside)))


def caches(value: ast.AST) -> bool:
    """Whether something is called here whose name says that it keeps results."""
    calls = (part.func for part in ast.walk(value) if isinstance(part, ast.Call))
    return any(word in name.lower() for call in calls for name in names(call) for word in WORDS)


def names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr


def set_here(inside: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What is set: an attribute itself, of an item what holds it."""
    for part in inside:
        if isinstance(part, (ast.Attribute, ast.Subscript)) and isinstance(part.ctx, ast.Store):
            yield part.value if isinstance(part, ast.Subscript) else part
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in KEEPERS:
            yield part.func.value
        elif isinstance(part, ast.Call) and last(part.func) in ("setattr", "__setattr__") and len(part.args) == 3:
            target, name = part.args[0], part.args[1]
            yield ast.Attribute(target, name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "?", ast.Store())


def last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
