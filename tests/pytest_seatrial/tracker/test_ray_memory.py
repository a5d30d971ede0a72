"""Memory of Ray nodes, with a real Ray of two nodes in its own environment."""

from __future__ import annotations

import pytest

from tests.real.inside import run_cases
from tests.runtime.rays import environment

pytestmark = pytest.mark.real

CASES = (
    "case_every_node_is_read_and_a_peak_that_is_over_counts",
    "case_a_node_that_does_not_answer_is_an_error_that_names_it",
    "case_a_process_that_connects_anew_gets_new_watchers",
    "case_the_fullest_node_is_the_number_of_a_test",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/pytest_seatrial/tracker/ray_memory_cases.py", CASES, python=str(environment().python))


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
