"""TRL's own weight sync, over the stand-in for NCCL: the cases are in sync_cases.py."""

from __future__ import annotations

import pytest

from tests.real.inside import run_cases

pytestmark = pytest.mark.real

CASES = (
    "case_what_trl_sends_is_what_the_policy_holds",
    "case_adapters_are_merged_and_taken_out_again",
    "case_a_tensor_that_is_left_out_and_names_that_are_swapped_show",
    "case_a_walk_that_raises_ends_the_sync_and_nobody_waits",
    "case_a_walk_that_is_not_what_it_announced_is_refused",
    "case_every_dtype_and_shape_goes_over_the_stream",
    "case_merging_a_copy_leaves_the_policy_alone",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/sync_cases.py", CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
