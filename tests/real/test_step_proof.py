"""The shadow itself: what its table calls proven would have been seen, and its tests of drawn tokens are calibrated."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.mutants.harness import Server, phases_of, run

from seatrial.runtime.environments import Environment
from tests.real.inside import run_cases, write_shadows

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]


def test_every_proven_setting_diverges_as_another(server: Server, environment: Environment, tmp_path: Path) -> None:
    level = tmp_path / "0"
    assert run(server, 0, level, environment.python) is None
    shadows = write_shadows(tmp_path / "shadows", phases_of(0, level, environment.python))
    case = "case_every_proven_setting_diverges_as_another"
    assert run_cases("tests/real/trl_knob_cases.py", (case,), extra=shadows) == {case: None}


def test_draws_are_judged_by_calibrated_tests() -> None:
    cases = ("case_honest_draws_raise_no_alarm", "case_dishonest_draws_are_seen")
    assert run_cases("tests/real/draws_cases.py", cases) == dict.fromkeys(cases)
