"""Drivers of the refit probe and rollouts of the embedded loop: what is seen of buffers, loaders that raise, and unproven tensors."""

from __future__ import annotations

import pytest

from tests.real.inside import run_cases

CASES = (
    "case_a_clean_run_commits_every_refit",
    "case_what_was_read_back_decides_over_the_base_of_the_next_delta",
    "case_refused_payloads_leave_a_fact_and_no_bit",
    "case_a_buffer_of_the_generator_that_moves_is_in_its_hashes",
    "case_a_loader_that_raises_is_a_fact_before_the_run_ends",
    "case_a_policy_without_a_buffer_cannot_have_the_fault",
    "case_a_tensor_without_a_method_is_named",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/rollout_cases.py", CASES)


@pytest.mark.real
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
