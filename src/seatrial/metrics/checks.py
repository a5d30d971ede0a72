"""The check language: one assertion over metrics, with what it measured.

- `evaluate` parses by the whitelist of grammar.py and computes by functions.py; nothing is ever run by `eval`.
- Never a false Pass: a metric or step that is missing, a point that is NaN or infinite, a window without points and
  a division by zero make the check miss, under `not` and in either branch of `or` too, and the message says which.
- The result carries the measured value (not the constant of `0.9 < mean(x) < 1.1`), the threshold as text, and the
  steps used. `missing` are the steps that were asked for and have no finite point; gaps in a series are no error.
- Damage is not a matter of one expression: callers add `undamaged(metrics)` to their checks.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from seatrial.files import number_to_json
from seatrial.metrics.functions import Miss, apply, require_finite
from seatrial.metrics.grammar import COMPARISONS, FUNCTIONS, Check, literal, parse, reads_data
from seatrial.metrics.points import number
from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics, Series
from seatrial.model.verdict import Boundary

Value = float | str

_COMPARE: dict[str, Callable[[Value, Value], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_STEP = re.compile(r"-?[0-9]{1,18}")


def evaluate(expr: str, metrics: Metrics, boundary: Boundary = Boundary.METRICS) -> CheckResult:
    """Judge one check. A CheckSyntaxError says that the expression is wrong; every other trouble is a miss."""
    check = parse(expr)
    evaluation = _Evaluation(check, metrics)
    outcome = evaluation.condition(check.tree)
    passed = outcome.passed and not evaluation.misses
    message = "; ".join(dict.fromkeys(evaluation.misses))
    if not passed and not message:
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
        tag=next(iter(evaluation.read), ""),
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
        """The series that were read, in order."""
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
            passed = passed and _COMPARE[COMPARISONS[type(op)]](left, right)
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
        symbols = [COMPARISONS[type(op)] for op in node.ops]
        measured = _measured(operands)
        parts = [f"{left} {symbol} {right}" for left, symbol, right in zip(texts, symbols, texts[1:], strict=False)]
        if measured > 0:
            parts[measured - 1] = f"{_MIRRORED[symbols[measured - 1]]} {texts[measured - 1]}"
        if measured < len(symbols):
            parts[measured] = f"{symbols[measured]} {texts[measured + 1]}"
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
        parameters, _ = FUNCTIONS[node.func.id]
        given = [*zip(parameters, node.args[1:], strict=False), *((keyword.arg or "", keyword.value) for keyword in node.keywords)]
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
