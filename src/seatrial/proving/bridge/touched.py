"""Which functions a change touches: a Pass of a ladder that called none of them says nothing about the change."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.evidence.changes import changed_lines
from seatrial.model.guarded import parse_python, read_file
from seatrial.model.record import RepoState

SUBMODULE = "3rdparty/Megatron-LM/"


@dataclass(frozen=True, slots=True)
class Function:
    """One function with changed lines in it; line 0 stands for what is outside of functions, or cannot be placed in one."""

    path: str
    line: int
    """Its first, decorators included."""
    name: str

    def __str__(self) -> str:
        return f"{self.path}: {self.name}" if self.line else self.path


def touched(changes: Sequence[RepoState]) -> tuple[Function, ...]:
    """The innermost functions around every added line of source files, and each changed file of which no function can be told."""
    return tuple(dict.fromkeys(found for repo in changes if repo.base for found in _of(repo)))


def _of(repo: RepoState) -> Iterator[Function]:
    lines: dict[str, set[int]] = {}
    for line in changed_lines(Path(repo.path), repo.base).lines:
        if is_source(line.path):
            # Where a line is gone, nothing is left to be placed: the file stands for it.
            lines.setdefault(line.path, set()).update(() if line.removed else (line.number,))
    for path, numbers in lines.items():
        found = list(_around(path, _tree(Path(repo.path, path)), numbers))
        yield from found or [Function(path, 0, "")]


def _tree(file: Path) -> ast.Module:
    try:
        return parse_python(read_file(file))
    except (OSError, ValueError):  # it is gone, or the ladder will say so itself
        return ast.Module([], [])


def is_source(path: str) -> bool:
    """Whether a path is one that a rung could run."""
    inner = path.removeprefix(SUBMODULE)
    return path.endswith(".py") and not path.endswith("__init__.py") and inner.startswith(("src/", "megatron/"))


def _around(path: str, tree: ast.Module, numbers: set[int]) -> Iterator[Function]:
    spans = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
            spans.append((first, node.end_lineno or first, node.name))
    for number in sorted(numbers):
        inner = max((span for span in spans if span[0] <= number <= span[1]), default=None)
        if inner is not None:
            yield Function(path, inner[0], inner[2])
