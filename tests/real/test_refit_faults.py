"""Known refit bugs, injected into the stand-in engine or its transport: each is caught, and the message names it."""

from __future__ import annotations

import pytest

from tests.real.inside import run_cases

CASES = (
    "case_a_right_kernel_layout_is_explained_by_its_slots",
    "case_additive_bf16_delta",
    "case_expert_pair_swapped",
    "case_fp8_scale_missing",
    "case_gate_and_up_halves_swapped",
    "case_layer_shifted_by_one",
    "case_nan_dropped",
    "case_no_other_check_sees_everything",
    "case_non_contiguous_view_sent_raw",
    "case_padded_rows_overwritten",
    "case_replayed_payload",
    "case_skipped_tensor",
    "case_stale_replica",
    "case_stale_replica_that_claims_the_new_version",
    "case_stale_tied_head",
    "case_swapped_q_and_k",
    "case_the_clean_stand_in_is_silent",
    "case_transformed_weight_left_stale",
    "case_unsynced_buffer",
    "case_v_over_k",
    "case_wrong_base",
    "case_xor_applied_twice",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/refit_faults_cases.py", CASES)


@pytest.mark.real
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
