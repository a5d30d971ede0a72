"""The coordinate map and coverage over a stand-in engine with fused, sharded, tied, padded and quantised weights."""

from __future__ import annotations

import pytest

from tests.real.inside import run_cases

CASES = (
    "case_a_changed_layout_is_an_error_not_a_smaller_comparison",
    "case_a_loader_may_replace_and_register",
    "case_a_loader_that_raises_leaves_every_bit",
    "case_a_transposing_loader_has_many_runs_and_is_exact",
    "case_rows_in_another_order_are_misplaced_and_shards_are_not",
    "case_a_state_that_is_not_restored_is_an_error",
    "case_bits_count_not_values",
    "case_casts_are_said_and_compared_after_the_cast",
    "case_changed_buffers_that_are_not_exported_are_found",
    "case_a_policy_is_watched_with_its_buffers_and_ties",
    "case_a_tensor_that_only_moved_is_not_derived",
    "case_changing_loaders_are_refused_with_the_reason",
    "case_coverage_of_the_stand_in",
    "case_every_dtype_maps_and_compares_element_for_element",
    "case_fp8_is_refused_by_the_map_and_compared_quantised",
    "case_interleaved_views_and_aliases_of_changed_tensors",
    "case_lazy_loaders_and_kept_references",
    "case_meta_empty_and_integers",
    "case_misplaced_names_swapped_parts_layers_and_experts",
    "case_ten_million_elements_take_seconds",
    "case_tied_names_are_one_storage",
    "case_views_into_one_buffer_are_counted_once",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/refit_map_cases.py", CASES)


@pytest.mark.real
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
