"""Single-line mutations of Python source and of data files; pure.

- `mutations(text)`: every mutation that this file allows: one line changes, the file still parses, and the change is more than layout.
- `data_mutations(text)`: one character of one line of a data file.
- `draw(shares, count, seed)`: a seeded choice, by line first, so that a line with many mutators is not drawn more often.
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

COMPARISONS = {
    "==": "!=",
    "!=": "==",
    "<=": ">",
    ">=": "<",
    "<": ">=",
    ">": "<=",
    "not in": "in",
    "in": "not in",
    "is not": "is",
    "is": "is not",
}
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise, ast.Delete, ast.Assert)


@dataclass(frozen=True)
class Mutation:
    """One line of one file."""

    file: str
    line: int
    kind: str
    before: str
    after: str

    @property
    def key(self) -> str:
        return hashlib.sha256("\0".join((self.file, str(self.line), self.after)).encode()).hexdigest()[:16]

    def applied(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        old = lines[self.line - 1]
        if old.rstrip("\r\n") != self.before:
            raise ValueError(f"{self.file}:{self.line} is not the line that was drawn")
        lines[self.line - 1] = self.after + old[len(self.before) :]
        return "".join(lines)


def mutations(text: str, file: str = "") -> list[Mutation]:
    """Every mutation of Python source."""
    return [one for one in candidates(text, file) if holds(one, text)]


def candidates(text: str, file: str = "") -> list[Mutation]:
    """The same, not yet parsed: for large files, where only few are drawn."""
    lines = text.splitlines()
    if len(lines) != text.count("\n") + (not text.endswith("\n")):
        return []  # form feeds and the like: line numbers of ast and of splitlines differ
    found: dict[tuple[int, str], Mutation] = {}
    for number, kind, after in _edits(ast.parse(text), lines):
        before = lines[number - 1]
        if after != before:
            found.setdefault((number, after), Mutation(file, number, kind, before, after))
    return list(found.values())


def holds(mutation: Mutation, text: str) -> bool:
    """The file still parses, and says something else."""
    try:
        return ast.dump(ast.parse(mutation.applied(text))) != ast.dump(ast.parse(text))
    except (SyntaxError, ValueError):
        return False


def data_mutations(text: str, file: str = "") -> list[Mutation]:
    """One character of each line that has one; comments are left out."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        match = re.search(r"[A-Za-z0-9](?=[^A-Za-z0-9]*$)", line)
        if match and not line.lstrip().startswith(("#", "//")):
            after = line[: match.start()] + _next(match.group()) + line[match.end() :]
            found.append(Mutation(file, number, "data", line, after))
    return found


def draw(
    shares: Sequence[tuple[float, Mapping[str, Sequence[Mutation]]]],
    count: int,
    seed: int,
    fits: Callable[[Mutation], bool] = lambda _: True,
) -> list[Mutation]:
    """`count` different mutations: a share is (weight, mutations by file); first a share, then a line, then a mutator."""
    source = random.Random(seed)
    lines = [(weight, _by_line(files)) for weight, files in shares]
    lines = [(weight, table) for weight, table in lines if table]
    drawn: dict[str, Mutation] = {}
    for _ in range(count * 50):
        if len(drawn) == count or not lines:
            break
        table = source.choices([table for _, table in lines], [weight for weight, _ in lines])[0]
        one = source.choice(source.choice(table))
        if one.key not in drawn and fits(one):
            drawn[one.key] = one
    return list(drawn.values())


def _by_line(files: Mapping[str, Sequence[Mutation]]) -> list[list[Mutation]]:
    table: dict[tuple[str, int], list[Mutation]] = {}
    for file in sorted(files):
        for one in files[file]:
            table.setdefault((file, one.line), []).append(one)
    return list(table.values())


def _edits(tree: ast.Module, lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """(line number, mutator, the new line)."""
    quoted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    told = _docstrings(tree)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in quoted or id(node) in told or not hasattr(node, "lineno"):
            continue
        if isinstance(node, ast.IfExp | ast.If | ast.While) and node.test.lineno == node.test.end_lineno:
            yield node.test.lineno, "negate", _put(node.test, lines, f"not ({_text(node.test, lines)})")
        if node.lineno != node.end_lineno:
            continue
        yield from _of_expression(node, lines)
        if isinstance(node, SIMPLE):
            yield from _of_statement(node, lines, id(node) in inside)


def _of_expression(node: ast.AST, lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.Compare):
        yield from _operator(node.left, node.comparators[0], lines, "comparison", COMPARISONS)
    elif isinstance(node, ast.BinOp):
        yield from _operator(node.left, node.right, lines, "arithmetic", {"+": "-", "-": "+"})
    elif isinstance(node, ast.Constant):
        after = _other(node.value)
        if after is not None:
            yield node.lineno, "constant", _put(node, lines, after)


def _of_statement(node: ast.stmt, lines: Sequence[str], inside: bool) -> Iterator[tuple[int, str, str]]:
    yield node.lineno, "delete", _put(node, lines, "pass")
    if isinstance(node, ast.Return) and node.value is not None:
        yield node.lineno, "return None", _put(node, lines, "return None")
    if inside:
        yield node.lineno, "raise", _put(node, lines, 'raise RuntimeError("mutated")')


def _operator(left: ast.expr, right: ast.expr, lines: Sequence[str], kind: str, table: Mapping[str, str]) -> Iterator[tuple[int, str, str]]:
    """The operator stands between two operands; brackets around them may stand there too."""
    if left.end_lineno != right.lineno:
        return
    line = lines[right.lineno - 1].encode()
    start, end = left.end_col_offset or 0, right.col_offset
    between = line[start:end].decode()
    words = "|".join(rf"\b{re.escape(word)}\b" if word.isalpha() or " " in word else re.escape(word) for word in table)
    match = re.search(words, between)
    if match:
        new = between[: match.start()] + table[match.group()] + between[match.end() :]
        yield right.lineno, kind, line[:start].decode() + new + line[end:].decode()


def _docstrings(tree: ast.Module) -> set[int]:
    """The statements and the constants that are only prose."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= {id(node), id(node.value)}
    return found


def _other(value: object) -> str | None:
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int | float):
        return repr(value + 1)
    if isinstance(value, str):
        return repr(value + "x")
    return None


def _text(node: ast.expr, lines: Sequence[str]) -> str:
    return lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()


def _put(node: ast.expr | ast.stmt, lines: Sequence[str], new: str) -> str:
    line = lines[node.lineno - 1].encode()
    return line[: node.col_offset].decode() + new + line[node.end_col_offset :].decode()


def _next(character: str) -> str:
    if character.isdigit():
        return str((int(character) + 1) % 10)
    return {"z": "a", "Z": "A"}.get(character) or chr(ord(character) + 1)
