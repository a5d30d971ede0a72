"""The refit probe on verl's own code path of the policy: its sender, its receiver, its checkpoint engines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.real.inside import run_cases

pytestmark = pytest.mark.real
FILE = Path(__file__).with_name("attach_verl_cases.py")
CASES = tuple(node.name for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.FunctionDef) and node.name.startswith("case_"))
MODULES = ("seatrial.instruments.verl.import_witness", "seatrial.instruments.verl.cpu_platform")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    place = tmp_path_factory.mktemp("attached")
    told = {
        "VERL_USE_EXTERNAL_MODULES": ",".join(MODULES),
        "SEATRIAL_IMPORTS": str(place),
        "SEATRIAL_REFIT_FACTS": str(place / "facts.jsonl"),
    }
    return run_cases("tests/real/attach_verl_cases.py", CASES, "verl-cpu", told)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
