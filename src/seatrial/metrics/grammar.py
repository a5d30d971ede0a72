"""What a check may say: a whitelist over Python's expression syntax. Nothing is ever run by `eval`.

- A check is one or more comparisons, joined by `and`, `or`, `not` and parentheses; `all_finite(series)` is one too.
- A comparison must read a metric: one that cannot fail proves nothing.
- Quantities are numbers, `data["tag"]`, `data["tag"]["step"]`, calls of the functions below, `+ - * /` and signs.
- Everything else is a CheckSyntaxError that shows the place: other names, attributes, comprehensions, a forgotten
  comparison, wrong arguments.
"""

from __future__ import annotations

import ast
import difflib
import math
from dataclasses import dataclass
from typing import NoReturn

from seatrial.model.errors import UserError

# Functions of a series: the parameters behind it, and how many of them must be given.
FUNCTIONS: dict[str, tuple[tuple[str, ...], int]] = {
    "min": ((), 0),
    "max": ((), 0),
    "len": ((), 0),
    "mean": (("range_start", "range_end", "ignore_top_p"), 0),
    "median": (("range_start", "range_end"), 0),
    "ratio_above": (("threshold",), 1),
    "std": ((), 0),
    "t_pvalue": ((), 0),
    "all_finite": ((), 0),
}
COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_MEMBERSHIP = (ast.In, ast.NotIn)
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_LONGEST = 2000
_DEEPEST = 40


class CheckSyntaxError(UserError):
    """The expression is not part of the check language; the message shows it with a caret at the place."""

    def __init__(self, expr: str, column: int, problem: str, fix: str = "see docs/checks.md for what a check may say") -> None:
        super().__init__(f"{problem}\n  {expr}\n  {' ' * column}^", fix)
        self.column = column


@dataclass(frozen=True, slots=True)
class Check:
    """A parsed check."""

    text: str
    tree: ast.expr

    def source(self, node: ast.expr) -> str:
        """The part of the text that `node` stands for."""
        return ast.get_source_segment(self.text, node) or ast.unparse(node)


def parse(expr: str) -> Check:
    """Parse and validate a check; everything that can be wrong without metrics is wrong here."""
    text = expr.strip().replace("\n", " ").replace("\r", " ")
    if len(text) > _LONGEST:
        raise CheckSyntaxError(text[:60] + "…", 0, f"the check is longer than {_LONGEST} characters")
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        variable = text.find("$")
        if variable >= 0:
            raise CheckSyntaxError(text, variable, "a shell variable was not expanded", "expand it before the check gets here") from error
        place = error.offset - 1 if error.offset else len(text)  # Python gives 0 when the text ends too early
        raise CheckSyntaxError(text, place, f"not an expression: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckSyntaxError(text, 0, f"not an expression: {error}") from error
    _Validator(text).check(tree)
    return Check(text, tree)


class _Validator:
    """Walks the tree of one check and refuses what is not on the whitelist."""

    def __init__(self, text: str) -> None:
        self.text = text

    def refuse(self, node: ast.AST, problem: str) -> NoReturn:
        offset = getattr(node, "col_offset", 0)  # counts bytes
        if isinstance(node, ast.Attribute):
            offset = (node.end_col_offset or 0) - len(node.attr.encode())
        raise CheckSyntaxError(self.text, len(self.text.encode()[:offset].decode(errors="ignore")), problem)

    def check(self, tree: ast.expr) -> None:
        """The whole check."""
        for node in ast.walk(tree):
            if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp):
                self.refuse(node, "comprehensions are not supported; use min, max or ratio_above over the series")
            if isinstance(node, ast.Attribute):
                self.refuse(node, "attributes are not supported")
        self.condition(tree, 0)

    def condition(self, node: ast.expr, depth: int) -> None:
        """A comparison, or conditions joined by and, or, not."""
        if depth > _DEEPEST:
            self.refuse(node, "the check is nested too deeply")
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self.condition(part, depth + 1)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.condition(node.operand, depth + 1)
        elif isinstance(node, ast.Compare):
            self.comparison(node, depth + 1)
        elif isinstance(node, ast.Call) and is_predicate(node):
            self.call(node, depth + 1)
        else:
            self.quantity(node, depth + 1)
            self.refuse(node, "no comparison: write what the value must be, for example `… < 1.05`")

    def comparison(self, node: ast.Compare, depth: int) -> None:
        operands = [node.left, *node.comparators]
        if any(isinstance(op, _MEMBERSHIP) for op in node.ops):
            if len(node.ops) > 1 or not isinstance(node.comparators[0], ast.Subscript):
                self.refuse(node.comparators[0], '`in` asks whether a series has a step: "3" in data["tag"]')
            self.key(node.left, "a step")
            self.key(node.comparators[0].slice, "a tag")
            self.data(node.comparators[0].value)
            return
        if any(type(op) not in COMPARISONS for op in node.ops):
            self.refuse(node, "this comparison is not supported; use < <= > >= == != or in")
        only_equality = all(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops)
        for operand in operands:
            text = isinstance(operand, ast.Constant) and isinstance(operand.value, str)
            if not (text and only_equality):
                self.quantity(operand, depth)
        if not any(reads_data(operand) for operand in operands):
            self.refuse(node, "the comparison reads no metric, so it proves nothing")

    def quantity(self, node: ast.expr, depth: int) -> None:
        """Something that has a value once metrics are there."""
        if depth > _DEEPEST:
            self.refuse(node, "the check is nested too deeply")
        if isinstance(node, ast.Constant):
            self.number(node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            self.quantity(node.operand, depth + 1)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
            self.quantity(node.left, depth + 1)
            self.quantity(node.right, depth + 1)
        elif isinstance(node, ast.Call) and not is_predicate(node):
            self.call(node, depth)
        elif isinstance(node, ast.Subscript):
            self.subscript(node)
        else:
            self.unsupported(node)

    def unsupported(self, node: ast.expr) -> NoReturn:
        if isinstance(node, ast.Name):
            self.refuse(node, 'data needs a tag: data["train/loss"]' if node.id == "data" else f"unknown name {node.id!r}")
        if isinstance(node, ast.Attribute):
            self.refuse(node, "attributes are not supported")
        if isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Call):
            self.refuse(node, "a condition cannot stand inside a quantity")
        self.refuse(node, f"{type(node).__name__} is not supported")

    def number(self, node: ast.Constant) -> None:
        if not isinstance(node.value, int | float):
            self.refuse(node, "only a number can stand here")
        try:
            finite = math.isfinite(node.value)
        except OverflowError:
            finite = False
        if not finite:
            self.refuse(node, "the number is too large")

    def subscript(self, node: ast.Subscript) -> None:
        """`data["tag"]` or `data["tag"]["step"]`."""
        inner = node.value
        if isinstance(inner, ast.Subscript):
            self.key(node.slice, "a step")
            node, inner = inner, inner.value
        self.key(node.slice, "a tag")
        self.data(inner)

    def key(self, node: ast.expr, what: str) -> None:
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            example = '"30"' if what == "a step" else '"train/loss"'
            self.refuse(node, f"{what} is written as text in quotes, for example {example}")

    def data(self, node: ast.expr) -> None:
        if not (isinstance(node, ast.Name) and node.id == "data"):
            self.refuse(node, 'only data can be indexed: data["tag"] or data["tag"]["step"]')

    def call(self, node: ast.Call, depth: int) -> None:
        if not isinstance(node.func, ast.Name):
            self.refuse(node.func, "only the functions of the check language can be called")
        name = node.func.id
        if name == "abs":
            if len(node.args) != 1 or node.keywords:
                self.refuse(node, "abs takes one number")
            self.quantity(node.args[0], depth + 1)
            return
        if name not in FUNCTIONS:
            close = difflib.get_close_matches(name, [*FUNCTIONS, "abs"], 1)
            hint = f"did you mean {close[0]}?" if close else f"known: abs, {', '.join(FUNCTIONS)}"
            self.refuse(node, f"unknown function {name!r}; {hint}")
        if not node.args or not isinstance(node.args[0], ast.Subscript) or isinstance(node.args[0].value, ast.Subscript):
            self.refuse(node, f'{name} takes a series first: {name}(data["tag"])')
        self.subscript(node.args[0])
        self.arguments(node, name)

    def arguments(self, node: ast.Call, name: str) -> None:
        """The numbers behind the series."""
        parameters, required = FUNCTIONS[name]
        values = node.args[1:]
        if len(values) > len(parameters):
            self.refuse(values[len(parameters)], f"{name} takes a series{''.join(f', {name}' for name in parameters)} and nothing else")
        given = list(parameters[: len(values)])
        for keyword in node.keywords:
            if keyword.arg not in parameters or keyword.arg in given:
                self.refuse(keyword, f"{name} has no parameter {keyword.arg!r}, or it is given twice")
            given.append(keyword.arg)
            values.append(keyword.value)
        if len(given) < required:
            self.refuse(node, f"{name} needs {', '.join(parameters[:required])}")
        for parameter, value in zip(given, values, strict=True):
            self.argument(parameter, value)

    def argument(self, parameter: str, node: ast.expr) -> None:
        number = literal(node)
        if number is None or not math.isfinite(number):
            self.refuse(node, f"{parameter} must be a plain number")
        if parameter.startswith("range_") and number != int(number):
            self.refuse(node, f"{parameter} must be a whole step number")
        if parameter == "ignore_top_p" and not 0 <= number <= 1:
            self.refuse(node, "ignore_top_p must lie between 0 and 1")


def is_predicate(node: ast.Call) -> bool:
    """Whether a call is a condition by itself."""
    return isinstance(node.func, ast.Name) and node.func.id == "all_finite"


def literal(node: ast.expr) -> float | None:
    """The value of a number with an optional sign; None for anything else."""
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        sign = -1 if isinstance(node.op, ast.USub) else 1
        node = node.operand
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool) or not isinstance(node.value, int | float):
        return None
    return sign * float(node.value) if abs(node.value) < 1e300 else math.inf


def reads_data(node: ast.expr) -> bool:
    """Whether a metric is read anywhere below `node`."""
    return any(isinstance(inner, ast.Name) and inner.id == "data" for inner in ast.walk(node))


def one_step(expr: str) -> bool:
    """Whether a check asks for the value of a metric at one step."""
    return any(isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript) for node in ast.walk(parse(expr).tree))
