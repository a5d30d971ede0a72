"""The refit probe inside stand-ins of verl's and NeMo-RL's workers, with real tensors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.real.inside import run_cases

pytestmark = pytest.mark.real
FILES = ("attach_cases.py", "attach_held_cases.py")


def cases(file: str) -> tuple[str, ...]:
    """The cases of a file, without its imports, which need torch."""
    body = ast.parse(Path(__file__).with_name(file).read_text()).body
    return tuple(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_"))


CASES = tuple(name for file in FILES for name in cases(file))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return {name: outcome for file in FILES for name, outcome in run_cases(f"tests/real/{file}", cases(file)).items()}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
