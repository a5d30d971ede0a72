"""No module decides by a sentence that another one wrote: results carry codes and fields (see `CheckResult` and `LevelResult`).

- A sentence is an attribute or a variable that is called like one of `WORDS`, or a check's name.
- To decide is to compare it with a text, to look in it for one, or to take it apart with a pattern.
- Text from outside (logs, git, Slurm, pip, pytest) is read like that; `OUTSIDE` lists where, each with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TREE = Path(__file__).parents[1]
ROOTS = (TREE / "src" / "seatrial", TREE / "packages" / "pytest-seatrial" / "src")
WORDS = frozenset({"reason", "reasons", "message", "advice", "limitation", "limitations", "why", "note", "notes"})
CHECKS = frozenset({"check", "missed", "found", "first"})
"""Variables that hold a check, whose `name` is a sentence, too."""
LOOKS = frozenset({"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit", "find", "index"})
PATTERNS = frozenset({"match", "search", "fullmatch", "findall", "finditer"})
OUTSIDE = {
    "seatrial/bisect/git_stores.py:machine_or_tree": "what git printed",
    "seatrial/bisect/search_loop.py:for_skip": "for display only: an end's reason is cut before its remedy",
    "seatrial/cli/typer_base.py:_named": "a message of click",
    "seatrial/instruments/refit/payload_header.py:__init__": "the reason of a refused refit is one of a few codes",
    "seatrial/instruments/refit/refit_driver.py:refit": "the reason of a refused refit is one of a few codes",
    "seatrial/probes/own_tests.py": "what pytest printed of a test",
    "seatrial/rollouts/backends/gym_backend.py": "what a server of Gym answered",
    "seatrial/rollouts/backends/openai_format.py": "the finish reason of a server",
    "seatrial/rollouts/results/campaign_import.py": "the finish reason of a server",
    "seatrial/runtime/slurm_status.py": "Slurm's own column Reason",
    "seatrial/triage/diagnose.py": "the message of an exception in a log",
    "seatrial/triage/log.py": "the message of an exception in a log",
    "seatrial/trial/compare.py": "the message of a test's failure, of pytest",
    "seatrial/trial/pre_tests.py": "the message of a test's failure, of pytest",
    "pytest_seatrial/guards.py": "messages of argparse and of pytest",
}
"""File, or file and function, and why."""


def sentence(node: ast.expr) -> bool:
    """Whether an expression is a sentence, by what it is called; `str(...)`, `.lower()` and the like do not change that."""
    match node:
        case ast.Attribute(value=ast.Name(id=owner), attr="name"):
            return owner in CHECKS
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in WORDS
        case (
            ast.Call(func=ast.Name(id="str"), args=[inner]) | ast.Call(func=ast.Attribute(value=inner, attr="lower" | "strip" | "casefold"))
        ):
            return sentence(inner)
    return False


def wording(node: ast.expr) -> bool:
    """Whether an expression is a text of some length, or several; a constant's name stands for one."""
    match node:
        case ast.Constant(value=str(text)):
            return bool(text.strip())
        case ast.JoinedStr():
            return True
        case ast.Name(id=name):
            return name.lstrip("_").isupper()
        case ast.Tuple(elts=parts) | ast.Set(elts=parts) | ast.List(elts=parts):
            return any(map(wording, parts))
    return False


def decides(node: ast.AST) -> bool:
    """Whether a node decides by a sentence."""
    match node:
        case ast.Compare(left=left, comparators=others):
            both = [left, *others]
            return any(map(sentence, both)) and any(map(wording, both))
        case ast.Call(func=ast.Attribute(value=value, attr=name), args=[first, *_]) if name in LOOKS and sentence(value):
            return wording(first)
        case ast.Call(func=ast.Attribute(attr=name), args=arguments) if name in PATTERNS:
            return any(map(sentence, arguments))
    return False


def found_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Function and line of each place that decides by a sentence."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if decides(child):
                yield function, getattr(child, "lineno", 0)
            yield from walk(child, child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function)

    yield from walk(tree, "")


def test_nobody_decides_by_a_sentence() -> None:
    made, used = [], set()
    for root in ROOTS:
        for file in sorted(root.rglob("*.py")):
            name = file.relative_to(root.parent if root.name == "seatrial" else root).as_posix()
            for function, line in found_in(ast.parse(file.read_text(encoding="utf-8"))):
                known = next((key for key in (name, f"{name}:{function}") if key in OUTSIDE), None)
                used.add(known)
                made += [] if known else [f"{name}:{line} in {function}"]
    assert made == []
    assert OUTSIDE.keys() - used == set(), "listed, and decides by nothing"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('row.reason.startswith("wrong import")', True),
        ('"which is to be edited" in row.reason', True),
        ("COPIED in row.notes", True),
        ('re.search(r"[(](.*)[)]", check.name)', True),
        ("_OWN_END.search(first.reason)", True),
        ('error.message == "x"', True),
        ('str(result.message).lower().startswith(("a", "b"))', True),
        ('any(note.startswith("marked ") for note in row.notes)', True),
        ('result.code == "wrong-import"', False),
        ("level.reason == other.reason", False),
        ('reason == ""', False),
        ('result.message.replace("a", "b")', False),
        ('path.name == "facts.jsonl"', False),
    ],
)
def test_it_sees_what_it_looks_for(text: str, seen: bool) -> None:
    assert [line for _, line in found_in(ast.parse(text))] == ([1] if seen else [])
