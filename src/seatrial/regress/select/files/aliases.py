"""Other names of a function: under which name may somebody use a function that keeps what it did?

- `aliases`: what was assigned at module or class level (`c = m.f`, `TABLE = {"a": f}`, `run = partial(f, 1)`, `TABLE = Lazy()`) or
  imported `as`, with the names that it stands for. What is called there has run at import and is seen, but for classes.
- `kept`: names that hold a cache made by a call (`cheap = lru_cache()(f)`), also of attributes and inside functions.
- `decorators` of each function: one of them may keep what the function did.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from seatrial.regress.select.trace import memo, syntax

Names = dict[str, frozenset[str]]


class Other(NamedTuple):
    """The other names in one file."""

    aliases: Names
    kept: frozenset[str]
    decorators: Names


def other(tree: ast.Module) -> Other:
    """Look at one file; does not change the tree."""
    found: dict[str, set[str]] = {}
    kept: set[str] = set()
    for node, inside in _nodes(tree):
        for name, value in _given(node):
            keeps = memo.caches(value)
            if keeps:
                kept.add(name)
            if keeps or not inside:
                found.setdefault(name, set()).update(_words(value, called=keeps))
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if alias.asname and alias.asname != alias.name:
                    found.setdefault(alias.asname, set()).add(alias.name.rpartition(".")[2])
    decorators = {
        name: frozenset(word for part in node.decorator_list for word in _words(part, called=True))
        for name, node in syntax.functions(tree)
        if node.decorator_list
    }
    return Other({name: frozenset(words - {name}) for name, words in found.items() if words - {name}}, frozenset(kept), decorators)


def _nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it stands inside a function."""
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, inside = pending.pop()
        yield node, inside
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        pending.extend((child, inside) for child in ast.iter_child_nodes(node))


def _given(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    yield part.id, node.value
                elif isinstance(part, ast.Attribute):
                    yield part.attr, node.value


def _words(value: ast.AST, *, called: bool) -> Iterator[str]:
    """Names in an expression: of `a.b.c` the last; without what is called unless that is asked for."""
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
            if not isinstance(node.value, ast.Name | ast.Attribute):
                pending.append(node.value)
        elif isinstance(node, ast.Call) and not called:
            inner = node.func
            pending.extend([*node.args, *(part.value for part in node.keywords)])
            if not isinstance(inner, ast.Name | ast.Attribute) or _is_class(inner):
                pending.append(inner)
        else:
            pending.extend(ast.iter_child_nodes(node))


def _is_class(node: ast.Name | ast.Attribute) -> bool:
    """Whether it is called like a class: its instances do things later."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id
    return name.lstrip("_")[:1].isupper()
