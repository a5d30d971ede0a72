"""Single-line mutations of Python functions: operators, constants, swapped arguments, dropped statements, wrong axis, conditions.

Standard library only. A mutation is named by file, line and kind; `mutated` gives the tree of its file with it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.MatMult: ast.Add,
}
COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
AXES = ("dim", "axis")
Change = tuple[str, str, str, Callable[[], None]]
"""Kind, before, after, and a function that applies it."""


@dataclass(frozen=True)
class Mutation:
    """One change of one node: `number` counts the mutations of a file in the order in which they are found."""

    file: str
    line: int
    function: str
    kind: str
    before: str
    after: str
    number: int

    def name(self) -> str:
        """For tables."""
        return f"{Path(self.file).name}:{self.line} {self.kind}"


def mutations(source: str, file: str, lines: set[int]) -> list[Mutation]:
    """Every mutation of the executed `lines` inside functions."""
    return [mutation for mutation, _ in _found(ast.parse(source), file, lines)]


def mutated(source: str, file: str, lines: set[int], number: int) -> tuple[Mutation, ast.Module]:
    """One of them, and the tree of the file with it."""
    tree = ast.parse(source)
    mutation, apply = _found(tree, file, lines)[number]
    apply()
    return mutation, ast.fix_missing_locations(tree)


def _found(tree: ast.Module, file: str, lines: set[int]) -> list[tuple[Mutation, Callable[[], None]]]:
    made: list[tuple[Mutation, Callable[[], None]]] = []
    for function in _outermost(tree):
        for node in list(ast.walk(function)):
            line = getattr(node, "lineno", 0)
            if line not in lines or node is function:
                continue
            for kind, before, after, apply in _of(node):
                made.append((Mutation(file, line, function.name, kind, before, after, len(made)), apply))
    return made


def _outermost(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of the module and methods of its classes, without those inside others."""
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop(0)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        elif isinstance(node, (ast.ClassDef, ast.If, ast.Try)):
            stack += node.body


def _of(node: ast.AST) -> Iterator[Change]:
    """Mutations of one node."""
    text = ast.unparse(node) if isinstance(node, (ast.expr, ast.stmt)) else ""
    if len(text) > 400:
        return
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in BINARY and not _is_text(node):
        yield _swap(node, "op", BINARY[type(node.op)](), "operator", text)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
        yield _swap(node, "ops", [COMPARE[type(node.ops[0])]()], "comparison", text)
    elif isinstance(node, ast.BoolOp):
        yield _swap(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And(), "and/or", text)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
        yield _swap(node, "op", ast.UAdd(), "sign", text) if isinstance(node.op, ast.USub) else _replace_unary(node, text)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        value = node.value + 1 if isinstance(node.value, int) else (node.value * 2 if node.value else 1.0)
        yield _swap(node, "value", value, "constant", text)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield _swap(node, "value", not node.value, "constant", text)
    elif isinstance(node, ast.keyword) and node.arg in AXES and isinstance(node.value, ast.Constant) and isinstance(node.value.value, int):
        yield _swap(node, "value", ast.Constant(0 if node.value.value else 1), "axis", f"{node.arg}={node.value.value}")
    elif isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
        yield _swap(node, "args", [node.args[1], node.args[0], *node.args[2:]], "swapped arguments", text)
    elif isinstance(node, ast.If):
        yield _swap(node, "test", ast.UnaryOp(ast.Not(), node.test), "condition", f"if {ast.unparse(node.test)}")
    if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield _drop(node, text)
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _rebinds(node):
        yield _drop(node, text)


def _is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    if isinstance(node, ast.AugAssign):
        return False
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def _rebinds(node: ast.Assign) -> bool:
    """`x = f(x, …)`: without it, x keeps its value."""
    names = {target.id for target in node.targets if isinstance(target, ast.Name)}
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node.value))


def _swap(node: ast.AST, field: str, value: object, kind: str, before: str) -> Change:
    old = getattr(node, field)
    setattr(node, field, value)
    whole = isinstance(node, (ast.expr, ast.stmt)) and not isinstance(node, ast.If)
    after = ast.unparse(node if whole else value)  # type: ignore[arg-type]
    setattr(node, field, old)
    return kind, before, after, lambda: setattr(node, field, value)


def _replace_unary(node: ast.UnaryOp, before: str) -> Change:
    """`not x` becomes `not not x`, `~x` becomes `~~x`: the sign is gone."""
    return _swap(node, "operand", ast.UnaryOp(node.op, node.operand), "negation", before)


def _drop(node: ast.stmt, before: str) -> Change:
    """The statement becomes `pass`, in place."""

    def apply() -> None:
        place = {key: value for key, value in vars(node).items() if key in ("lineno", "col_offset", "end_lineno", "end_col_offset")}
        vars(node).clear()
        node.__class__ = ast.Pass
        vars(node).update(place)

    return "dropped statement", before, "pass", apply
