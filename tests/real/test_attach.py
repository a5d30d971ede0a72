"""The refit probe inside stand-ins of verl's and NeMo-RL's workers, with real tensors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from real.inside import run_cases

pytestmark = pytest.mark.real
FILE = Path(__file__).with_name("attach_cases.py")
CASES = tuple(node.name for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_"))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/attach_cases.py", CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
