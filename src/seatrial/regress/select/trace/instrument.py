"""Put a hit into every place of a tree where execution enters or re-enters a block.

- `__seatrial_hit__[NUMBER]`: an item of a mapping, which costs a third of a call. First statement of every function after its docstring;
  in lambdas `(hit, body)[1]` with the number of the block around.
- A block that sleeps and goes on in another epoch is hit again: after every `yield` and `await`, at the start of the body of every
  `while`, `async for`, `async with` and `for … in iter(f, stop)` of a function (a thread that waits for work).
- Positions are those of the statement that follows, so tracebacks and line coverage stay as they are. The module level is not hit: who
  imported it is known.
"""

from __future__ import annotations

import ast
from typing import TypeVar

from seatrial.regress.select.trace import blocks, memo, slices, syntax
from seatrial.regress.select.trace.name import NAME

N = TypeVar("N", bound=ast.AST)


def numbers(tree: ast.Module, path: str) -> dict[int, int]:
    """What stands for each function (its id): its number, and what it is beside; `path` is relative to the root."""
    named = syntax.functions(tree)
    inside = {name: list(syntax.inside(node)) for name, node in named}
    known = slices.file(((node.name, inside[name]) for name, node in named), syntax.inside(tree))
    found = {}
    for name, node in named:
        keeps = memo.skips(node, inside[name]) or slices.left_out(node, inside[name], known)
        found[id(node)] = blocks.number(path, name) | (blocks.KEEPS if keeps else 0)
    return found


def instrument(tree: ast.Module, numbers: dict[int, int], module: int) -> None:
    """Change the tree in place."""
    _Instrument(numbers, module).visit(tree)


class _Instrument(ast.NodeTransformer):
    def __init__(self, numbers: dict[int, int], module: int) -> None:
        self.numbers = numbers
        self.module = module
        self.current = module

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        # Decorators and defaults run in the block around; annotations are never touched, since they may be turned into text.
        node.decorator_list = [self.visit(part) for part in node.decorator_list]
        node.args.defaults = [self.visit(part) for part in node.args.defaults]
        node.args.kw_defaults = [part and self.visit(part) for part in node.args.kw_defaults]
        around, self.current = self.current, self.numbers[id(node)]
        first = int(syntax.documented(node.body))
        node.body[first:] = [self.visit(part) for part in node.body[first:]]
        self._enter(node.body, first)
        self.current = around
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        node.body = self._beside(node.body, 1)
        return node

    def visit_Yield(self, node: ast.Yield) -> ast.AST:
        return self._again(node)

    def visit_YieldFrom(self, node: ast.YieldFrom) -> ast.AST:
        return self._again(node)

    def visit_Await(self, node: ast.Await) -> ast.AST:
        return self._again(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._loop(node)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        return self._loop(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        return self._loop(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        over = node.iter
        if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "iter" and len(over.args) == 2:
            return self._loop(node)
        return self.generic_visit(node)

    def _again(self, node: ast.Yield | ast.YieldFrom | ast.Await) -> ast.AST:
        self.generic_visit(node)
        return self._beside(node, 0)

    def _loop(self, node: ast.While | ast.For | ast.AsyncFor | ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        if self.current != self.module:
            self._enter(node.body, 0)
        return node

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
        name, number = _at(ast.Name(NAME, ast.Load()), where), _at(ast.Constant(self.current), where)
        return _at(ast.Subscript(name, number, ast.Load()), where)


def _at(node: N, where: ast.AST) -> N:
    """At the start of `where`, and without width: a statement of many lines must not lend them all."""
    line, column = getattr(where, "lineno", 1), getattr(where, "col_offset", 0)
    for name, value in (("lineno", line), ("end_lineno", line), ("col_offset", column), ("end_col_offset", column)):
        setattr(node, name, value)
    return node
