"""Every way a refit can fail: real tensors inside the loop's environment; the cases are in refit_failures_cases.py."""

from __future__ import annotations

import pytest

from tests.real.inside import run_cases

pytestmark = pytest.mark.real

CASES = (
    "case_truncated_at_every_boundary",
    "case_truncated_file",
    "case_one_flipped_bit_anywhere",
    "case_replay",
    "case_version_gap",
    "case_wrong_base",
    "case_consumer_fails_in_the_middle",
    "case_no_memory_for_the_undo_loses_nothing",
    "case_planes_that_do_not_fit_are_refused",
    "case_a_sparse_misfit_is_refused_before_anything_is_written",
    "case_hashes_of_the_base_must_fold_into_its_root",
    "case_a_zstd_frame_is_what_it_says",
    "case_a_write_that_does_nothing_is_a_mismatch",
    "case_commit_needs_the_generators_own_root",
    "case_failed_write_restores_the_baseline",
    "case_dead_consumer",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/refit_failures_cases.py", CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
