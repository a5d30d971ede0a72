"""The tests of a row, in the formats that datasets have them.

- a list of {"input": text, "output": text}: programs that read and write;
- {"inputs": […], "outputs": […]}, as LiveCodeBench and NeMo Gym's code_gen: the same, or with "fn_name" calls of that function, each
  input one argument as JSON per line (or a list of arguments), each output JSON (or a value);
- a text, or a list of texts: Python that asserts; where it only defines `check(candidate)`, as HumanEval does, the row's `entry_point`
  is checked.
A text that is JSON of one of the first two is read as such. Nothing is guessed: what cannot be read, is empty, or would check nothing
is a ValueError, because a solution would pass it.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from seatrial.model.guarded import BadValue, parse_json, parse_python


@dataclass(frozen=True, slots=True)
class Program:
    """Reads `stdin`, must write `output`."""

    stdin: str
    output: str


@dataclass(frozen=True, slots=True)
class Call:
    """Must return `output`."""

    name: str
    arguments: list[Any]
    output: Any


@dataclass(frozen=True, slots=True)
class Asserts:
    """Must run to its end."""

    code: str


Case = Program | Call | Asserts


def column(data: Mapping[str, Any], name: str) -> Any:
    """A column of a row; dots lead into objects (`verifier_metadata.unit_tests`)."""
    value: Any = data
    for part in [name] if name in data else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"no column {name}")
        value = value[part]
    return value


def cases_of(tests: Any, entry_point: str | None = None) -> list[Case]:
    """Every test of a row, at least one."""
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        try:
            tests = parse_json(tests)
        except ValueError:
            pass  # Python may begin with these signs too; it is parsed below.
    if isinstance(tests, str):
        return [Asserts(_checked(tests, entry_point))]
    if isinstance(tests, Mapping):
        return _lists(tests)
    if not isinstance(tests, list | tuple) or not tests:
        raise ValueError("no tests")
    if all(isinstance(entry, str) for entry in tests):
        return [Asserts(_checked(entry, entry_point)) for entry in tests]
    return [_pair(entry) for entry in tests]


def same_output(got: str, wanted: str) -> bool:
    """Line by line as LiveCodeBench: white space around lines does not matter, and numbers are equal by value."""
    ours, theirs = _lines(got), _lines(wanted)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def same_value(got: Any, wanted: Any) -> bool:
    """Equal, or two numbers that are close, as LiveCodeBench."""
    if got == wanted:
        return True
    try:
        return math.isclose(float(got), float(wanted), rel_tol=1e-5, abs_tol=1e-8)
    except (TypeError, ValueError, OverflowError):
        return False


def _lists(tests: Mapping[str, Any]) -> list[Case]:
    inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("inputs and outputs must be two lists of the same length")
    if not inputs:
        raise ValueError("no tests")
    pairs = zip(inputs, outputs, strict=True)
    if name is None:
        return [Program(_text(given), _text(wanted)) for given, wanted in pairs]
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"fn_name = {name!r} is no name")
    return [Call(name, _arguments(given), parse_json(wanted) if isinstance(wanted, str) else wanted) for given, wanted in pairs]


def _pair(entry: Any) -> Case:
    if not isinstance(entry, Mapping) or "input" not in entry or "output" not in entry:
        raise ValueError("a test must have input and output")
    if entry.get("testtype", "stdin") != "stdin":
        raise ValueError("tests of functions are written as fn_name, inputs and outputs")
    return Program(_text(entry["input"]), _text(entry["output"]))


def _text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"input and output of a program are texts, not {value!r:.80}")
    return value


def _arguments(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        raise ValueError(f"arguments are JSON, one per line, or a list, not {value!r:.80}")
    return [parse_json(line) for line in value.split("\n") if line.strip()]


def _checked(code: str, entry_point: str | None) -> str:
    """Asserts that parse, and of which something is executed."""
    try:
        body = parse_python(code).body
    except BadValue as error:
        raise ValueError(f"not Python: {error.what}{f' ({error.where})' if error.where else ''}") from error
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body) and not any(map(_runs, body)):
        if entry_point is None or not entry_point.isidentifier():
            raise ValueError("check() is defined and never called, and the row has no entry_point")
        return f"{code}\ncheck({entry_point})\n"
    if not any(map(_runs, body)):
        raise ValueError("nothing in it is executed: a solution could not fail")
    return code


def _runs(node: ast.stmt) -> bool:
    """Whether a statement at the top can check something: not a definition, an import, a constant or a docstring."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Pass)
    return not isinstance(node, kinds)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(got: str, wanted: str) -> bool:
    if got == wanted:
        return True
    try:
        return [Decimal(word) for word in got.split()] == [Decimal(word) for word in wanted.split()]
    except InvalidOperation:
        return False
