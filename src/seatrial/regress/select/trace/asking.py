"""Expressions of a function: what it asks for, tells, gives to its locals, and what an expression says of a name."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

from seatrial.regress.select.trace.memo import last, names

OWNERS = frozenset({"self", "cls"})
"""Parameters whose attributes outlive the call; their methods are functions of the project, where it is seen what they keep."""
MAKERS = frozenset({"list", "dict", "set", "bytearray", "deque", "Counter", "OrderedDict", "StringIO", "BytesIO"})
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.Tuple, ast.ListComp, ast.DictComp, ast.SetComp, ast.Constant, ast.JoinedStr, ast.BinOp)
TRIES = (ast.Try, ast.TryStar)


def told(inside: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, str]]:
    """What is told something, and by which method, and nobody looks at the answer: it may keep it."""
    for part in inside:
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) and isinstance(part.value.func, ast.Attribute):
            base = part.value.func.value
            if not (isinstance(base, ast.Name) and base.id in OWNERS):
                yield base, part.value.func.attr


def asked(inside: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for part in inside:
        if isinstance(part, (ast.If, ast.IfExp, ast.While)):
            yield part.test
        elif isinstance(part, ast.BoolOp):
            yield from part.values
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in {"get", "setdefault"}:
            yield part.func.value
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in {"getattr", "hasattr"}:
            yield part


def looked_through(inside: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for part in inside:
        if isinstance(part, (ast.For, ast.AsyncFor, ast.comprehension)):
            yield part.iter
        elif isinstance(part, ast.Match):
            yield part.subject


def tried(inside: Iterable[ast.AST]) -> Iterator[list[ast.stmt]]:
    for part in inside:
        if isinstance(part, TRIES) or suppresses(part):
            yield part.body


def every_question(inside: Sequence[ast.AST]) -> Iterator[ast.AST]:
    yield from [*asked(inside), *looked_through(inside)]
    for body in tried(inside):
        yield from body


def suppresses(part: ast.AST) -> TypeGuard[ast.With]:
    return isinstance(part, ast.With) and any("suppress" in name for item in part.items for name in names(item.context_expr))


def given(part: ast.AST) -> Iterator[tuple[set[str], ast.expr]]:
    """Locals that get a value here, and from what."""
    if isinstance(part, ast.Assign):
        yield {name for target in part.targets for name in stored(target)}, part.value
    elif isinstance(part, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and part.value is not None:
        yield set(stored(part.target)), part.value
    elif isinstance(part, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield set(stored(part.target)), part.iter
    elif isinstance(part, ast.withitem) and part.optional_vars is not None:
        yield set(stored(part.optional_vars)), part.context_expr


def stored(target: ast.AST) -> Iterator[str]:
    return (part.id for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, (ast.Store, ast.Del)))


def loaded(node: ast.expr) -> ast.expr:
    """The same without load or store, so that both compare equal."""
    if isinstance(node, ast.Attribute):
        return ast.Attribute(loaded(node.value), node.attr, ast.Load())
    if isinstance(node, ast.Name):
        return ast.Name(node.id, ast.Load())
    return node


def root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def uses(asked: ast.AST, names: set[str]) -> set[str]:
    """Which attributes of these names are asked here, "" if it is more than an attribute."""
    found = set()
    pending = [asked]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and node.id in names:
            found.add("")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in names:
                found.add(node.attr)
        elif isinstance(node, ast.Attribute | ast.Subscript | ast.Call) and root(node) in names:
            found.add("")
        else:
            pending.extend(ast.iter_child_nodes(node))
    return found


def without_arguments(tried: ast.AST) -> ast.AST:
    """The same where names that are only passed on are not mentioned: nobody asks them."""
    plain: ast.AST = _Unnamed().visit(copy.deepcopy(tried))
    return plain


def as_it_is(node: ast.AST) -> ast.AST:
    return node


class _Unnamed(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node.args = [part for part in node.args if not isinstance(part, ast.Name)]
        node.keywords = [part for part in node.keywords if not isinstance(part.value, ast.Name)]
        return node


def is_text(part: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(part, ast.Constant) and isinstance(part.value, str)


def made(inside: Iterable[ast.AST]) -> set[str]:
    """Locals that hold nothing but what was made here."""
    made: dict[str, bool] = {}
    for part in inside:
        if isinstance(part, (ast.Assign, ast.AnnAssign)):
            fresh = isinstance(part.value, DISPLAYS) or (isinstance(part.value, ast.Call) and last(part.value.func) in MAKERS)
            for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                if isinstance(target, ast.Name):
                    made[target.id] = fresh and made.get(target.id, True)
    return {name for name, fresh in made.items() if fresh}


def caught(inside: Iterable[ast.AST]) -> set[str]:
    return {part.name for part in inside if isinstance(part, ast.ExceptHandler) and part.name}
