"""The check language: one assertion over metrics, with what it measured. Nothing is ever run by `eval`.

- A whitelist over Python's expression syntax: one or more comparisons, joined by `and`, `or`, `not` and parentheses.
- Strict: NaN or infinity among the points that are used, or a missing step, makes a check miss, before anything is trimmed.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

from seatrial.core.errors import UserError
from seatrial.core.files import number_to_json
from seatrial.core.guarded import as_float
from seatrial.core.records import CheckResult
from seatrial.core.series import Metrics, Series
from seatrial.core.verdict import Boundary
from seatrial.metrics.readings import number
from seatrial.metrics.stats import t_pvalue

Value = float | str
Values = tuple[float, ...]


class MetricFunction(NamedTuple):
    """A function of a series."""

    compute: Callable[[Values, Mapping[str, float]], float]
    parameters: tuple[str, ...] = ()
    required: int = 0
    """How many of them must be given."""


FUNCTIONS = {
    "min": MetricFunction(lambda values, _: min(values)),
    "max": MetricFunction(lambda values, _: max(values)),
    "len": MetricFunction(lambda values, _: float(len(values))),
    "mean": MetricFunction(
        lambda values, given: statistics.mean(_without_top(values, given.get("ignore_top_p", 0.0))),
        ("range_start", "range_end", "ignore_top_p"),
    ),
    "median": MetricFunction(lambda values, _: statistics.median(values), ("range_start", "range_end")),
    "ratio_above": MetricFunction(
        lambda values, given: sum(value >= given["threshold"] for value in values) / len(values), ("threshold",), required=1
    ),
    "std": MetricFunction(lambda values, _: statistics.stdev(values)),
    "t_pvalue": MetricFunction(lambda values, _: t_pvalue(values)),
    "all_finite": MetricFunction(lambda values, _: float(len(values))),
}


class Operator(NamedTuple):
    """A comparison, as it is written, and with its sides swapped."""

    symbol: str
    swapped: str
    holds: Callable[[Any, Any], bool]


COMPARISONS: dict[type[ast.cmpop], Operator] = {
    ast.Lt: Operator("<", ">", operator.lt),
    ast.LtE: Operator("<=", ">=", operator.le),
    ast.Gt: Operator(">", "<", operator.gt),
    ast.GtE: Operator(">=", "<=", operator.ge),
    ast.Eq: Operator("==", "==", operator.eq),
    ast.NotEq: Operator("!=", "!=", operator.ne),
}
_MEMBERSHIP = (ast.In, ast.NotIn)
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
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
            if not isinstance(node.value, int | float):
                self.refuse(node, "only a number can stand here")
            if not math.isfinite(as_float(node.value)):
                self.refuse(node, "the number is too large")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            self.quantity(node.operand, depth + 1)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
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
        if isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Call):
            self.refuse(node, "a condition cannot stand inside a quantity")
        self.refuse(node, f"{type(node).__name__} is not supported")

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
        parameters, required = FUNCTIONS[name].parameters, FUNCTIONS[name].required
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


def tags(expr: str) -> tuple[str, ...]:
    """The metrics that a check names, in the order in which it does."""
    found = (node for node in ast.walk(parse(expr).tree) if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name))
    return tuple(_key(node) for node in sorted(found, key=lambda node: (node.lineno, node.col_offset)))


def one_step(expr: str) -> bool:
    """Whether a check asks for the value of a metric at one step."""
    return any(isinstance(node, ast.Subscript) and isinstance(node.value, ast.Subscript) for node in ast.walk(parse(expr).tree))


class Miss(Exception):
    """The check misses: its value cannot be measured.

    Carries the steps that should have had a finite point, and the first non-finite value if that is the reason.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = (), value: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.missing = missing
        self.value = value


def apply(name: str, series: Series, arguments: Mapping[str, float]) -> tuple[float, tuple[int, ...]]:
    """The value of one function over a series, and the steps whose points it used."""
    if not series.steps:
        raise Miss(f"{series.tag} has no points")
    used = _window(series, arguments) if "range_start" in FUNCTIONS[name].parameters else series
    require_finite(used)
    try:
        return FUNCTIONS[name].compute(used.values, arguments), used.steps
    except (ValueError, ArithmeticError) as error:
        raise Miss(f"{name} of {series.tag}: {error}") from error


def _window(series: Series, arguments: Mapping[str, float]) -> Series:
    """The points that `range_start` and `range_end` select."""
    start, end = int(arguments.get("range_start", 1)), int(arguments.get("range_end", 0))
    last = series.steps[-1]
    start += last + 1 if start < 0 else 0
    end += last + 1 if end <= 0 else 0
    chosen = [(step, value) for step, value in zip(series.steps, series.values, strict=True) if start <= step < end]
    if not chosen:
        raise Miss(f"{series.tag} has no points with {start} <= step < {end}; it has steps {series.steps[0]} to {last}")
    return Series(series.tag, tuple(step for step, _ in chosen), tuple(value for _, value in chosen))


def require_finite(series: Series) -> None:
    """Refuse NaN and infinities, with the steps where they stand."""
    steps = series.non_finite()
    if steps:
        raise Miss(f"{series.tag} is not finite at {describe(steps)}", steps, series.get(steps[0]))


def describe(steps: tuple[int, ...]) -> str:
    """Steps for a message: the first few by number."""
    shown = ", ".join(map(str, steps[:8])) + (f", … ({len(steps)} in all)" if len(steps) > 8 else "")
    return f"step{'s' if len(steps) > 1 else ''} {shown}"


def _without_top(values: tuple[float, ...], share: float) -> tuple[float, ...]:
    """The values without the highest `share` of them; at least one stays."""
    if share <= 0:
        return values
    return tuple(sorted(values)[: max(1, int(len(values) * (1.0 - share)))])


_STEP = re.compile(r"-?[0-9]{1,18}")


def evaluate(expr: str, metrics: Metrics, boundary: Boundary = Boundary.METRICS) -> CheckResult:
    """Judge one check. A CheckSyntaxError says that the expression is wrong; every other trouble is a miss."""
    check = parse(expr)
    evaluation = _Evaluation(check, metrics)
    outcome = evaluation.condition(check.tree)
    passed = outcome.passed and not evaluation.misses
    message = "; ".join(dict.fromkeys(evaluation.misses))
    measured = not passed and not evaluation.misses
    if measured:
        message = f"measured {_show(outcome.value)}, wanted {outcome.threshold}"
    value = number_to_json(outcome.value) if isinstance(outcome.value, float) else outcome.value
    return CheckResult(
        name=check.text,
        passed=passed,
        value=value,
        threshold=outcome.threshold,
        steps=tuple(sorted(evaluation.used)),
        missing=tuple(sorted(evaluation.missing)),
        message=message,
        boundary=boundary,
        tag=next(iter(evaluation.read), next(iter(tags(expr)), "")),
        measured=measured,
    )


def undamaged(metrics: Metrics) -> CheckResult:
    """One more check: nothing was lost while the metrics were read. Damaged metrics cannot pass."""
    return CheckResult(
        name="metrics are undamaged",
        kind="proof",
        passed=not metrics.damage,
        value=float(len(metrics.damage)),
        threshold="== 0",
        message="; ".join(map(str, metrics.damage)),
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a condition came to, with the comparison that decided it."""

    passed: bool
    value: Value | None
    threshold: str


class _Evaluation:
    """Computes one check; collects the steps it used and why it misses."""

    def __init__(self, check: Check, metrics: Metrics) -> None:
        self.check = check
        self.metrics = metrics
        self.used: set[int] = set()
        self.read: list[str] = []
        self.missing: set[int] = set()
        self.misses: list[str] = []
        self.flags = False
        """Whether true and false are what is compared."""

    def condition(self, node: ast.expr) -> _Outcome:
        """All parts are computed, whatever the first ones say: no branch hides a missing metric."""
        if isinstance(node, ast.BoolOp):
            outcomes = [self.condition(part) for part in node.values]
            decisive = isinstance(node.op, ast.Or)
            return next((outcome for outcome in outcomes if outcome.passed is decisive), outcomes[0])
        if isinstance(node, ast.UnaryOp):
            inner = self.condition(node.operand)
            return replace(inner, passed=not inner.passed, threshold=f"not {inner.threshold}")
        try:
            if isinstance(node, ast.Compare):
                return self.membership(node) if isinstance(node.ops[0], ast.In | ast.NotIn) else self.comparison(node)
            return _Outcome(True, self.quantity(node), "all finite")
        except Miss as miss:
            self.misses.append(miss.message)
            self.missing.update(miss.missing)
            return _Outcome(False, miss.value, self.threshold(node) if isinstance(node, ast.Compare) else "all finite")

    def membership(self, node: ast.Compare) -> _Outcome:
        """`"3" in data["tag"]`."""
        series = self.series(_key(node.comparators[0]))
        if not series.steps:
            raise Miss(f"{series.tag} has no points")
        step, wanted = _step(_text(node.left)), isinstance(node.ops[0], ast.In)
        present = step in series.steps
        if present:
            self.point(series, step)
        elif wanted:
            self.missing.add(step)
        return _Outcome(present is wanted, str(present), self.threshold(node))

    def comparison(self, node: ast.Compare) -> _Outcome:
        operands = [node.left, *node.comparators]
        self.flags = any(isinstance(operand, ast.Constant) and isinstance(operand.value, bool) for operand in operands)
        values = [self.quantity(operand) for operand in operands]
        passed = True
        for op, left, right in zip(node.ops, values, values[1:], strict=False):
            if isinstance(left, str) is not isinstance(right, str):
                raise Miss(f"text cannot be compared with a number: {left!r} and {right!r}")
            passed = passed and COMPARISONS[type(op)].holds(left, right)
        return _Outcome(passed, values[_measured(operands)], self.threshold(node, values))

    def threshold(self, node: ast.Compare, values: list[Value] | None = None) -> str:
        """What the measured operand is compared with, turned so that it stands on the left; computed ones with their value."""
        operands = [node.left, *node.comparators]
        texts = [self.check.source(operand) for operand in operands]
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            return f"step {texts[0]} {'in' if isinstance(node.ops[0], ast.In) else 'not in'} {texts[1]}"
        if values is not None:
            for index, operand in enumerate(operands):
                if not isinstance(operand, ast.Constant) and literal(operand) is None:
                    texts[index] += f" (= {_show(values[index])})"
        kinds = [COMPARISONS[type(op)] for op in node.ops]
        measured = _measured(operands)
        parts = [f"{left} {kind.symbol} {right}" for left, kind, right in zip(texts, kinds, texts[1:], strict=False)]
        if measured > 0:
            parts[measured - 1] = f"{kinds[measured - 1].swapped} {texts[measured - 1]}"
        if measured < len(kinds):
            parts[measured] = f"{kinds[measured].symbol} {texts[measured + 1]}"
        return " and ".join(parts)

    def quantity(self, node: ast.expr) -> Value:
        """The value of a quantity; numbers are finite."""
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, str | int | float)
            return node.value if isinstance(node.value, str) else float(node.value)
        if isinstance(node, ast.Subscript):
            return self.lookup(node)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, ast.UnaryOp):
            value = self.number(node.operand)
            return -value if isinstance(node.op, ast.USub) else value
        assert isinstance(node, ast.BinOp)
        left, right = self.number(node.left), self.number(node.right)
        try:
            result = _ARITHMETIC[type(node.op)](left, right)
        except ZeroDivisionError as error:
            raise Miss(f"division by zero: {self.check.source(node)}") from error
        if not math.isfinite(result):
            raise Miss(f"not a finite number: {self.check.source(node)}")
        return result

    def number(self, node: ast.expr) -> float:
        value = self.quantity(node)
        if isinstance(value, str):
            raise Miss(f"text is not a number: {self.check.source(node)} is {value!r}")
        return value

    def call(self, node: ast.Call) -> float:
        assert isinstance(node.func, ast.Name)
        if node.func.id == "abs":
            return abs(self.number(node.args[0]))
        given = [
            *zip(FUNCTIONS[node.func.id].parameters, node.args[1:], strict=False),
            *((keyword.arg or "", keyword.value) for keyword in node.keywords),
        ]
        arguments = {name: self.number(argument) for name, argument in given}
        value, steps = apply(node.func.id, self.series(_key(node.args[0])), arguments)
        self.used.update(steps)
        return value

    def lookup(self, node: ast.Subscript) -> Value:
        """`data["tag"]["step"]`, or `data["tag"]` for a value without steps."""
        if isinstance(node.value, ast.Subscript):
            return self.point(self.series(_key(node.value)), _step(_text(node.slice)))
        tag = _text(node.slice)
        if tag in self.metrics.series:
            raise Miss(f'{tag} is a series: name a step (data["{tag}"]["1"]) or use mean, max, …')
        if tag not in self.metrics.scalars:
            raise Miss(self.unknown(tag))
        scalar = self.metrics.scalars[tag]
        if isinstance(scalar, bool) and not self.flags:
            raise Miss(f"{tag} is {str(scalar).lower()}, which is not a number; compare it with True or False")
        value = scalar if isinstance(scalar, str) else float(scalar) if isinstance(scalar, bool) else number(scalar)
        if isinstance(value, float) and not math.isfinite(value):
            raise Miss(f"{tag} is not finite: {scalar}", value=value)
        return value if value is not None else str(scalar)

    def series(self, tag: str) -> Series:
        if tag in self.metrics.series:
            self.read.append(tag)
            return self.metrics.series[tag]
        raise Miss(f"{tag} is a single value, not a series" if tag in self.metrics.scalars else self.unknown(tag))

    def point(self, series: Series, step: int) -> float:
        value = series.get(step)
        if value is None:
            reach = f"it has steps {series.steps[0]} to {series.steps[-1]}" if series.steps else "it has no points"
            raise Miss(f"{series.tag} has no point at step {step}; {reach}", (step,))
        require_finite(Series(series.tag, (step,), (value,)))
        self.used.add(step)
        return value

    def unknown(self, tag: str) -> str:
        if tag in self.metrics.words:
            return str(self.metrics.words[tag])
        known = [*self.metrics.series, *self.metrics.scalars]
        close = difflib.get_close_matches(tag, known, 3, 0.5)
        return f"no metric {tag!r}" + (f"; did you mean {', '.join(close)}?" if close else f" among {len(known)} metrics")


def _measured(operands: list[ast.expr]) -> int:
    """Which operand is the measured one: the first that reads a metric."""
    return next(index for index, operand in enumerate(operands) if reads_data(operand))


def _key(node: ast.expr) -> str:
    """The tag of a validated `data["tag"]`."""
    assert isinstance(node, ast.Subscript)
    return _text(node.slice)


def _text(node: ast.expr) -> str:
    assert isinstance(node, ast.Constant)
    return str(node.value)


def _step(text: str) -> int:
    if not _STEP.fullmatch(text):
        raise Miss(f"{text!r} is not a step number" + (" (a shell variable that was not expanded?)" if "$" in text else ""))
    return int(text)


def _show(value: Value | None) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
