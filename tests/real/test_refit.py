"""What arrives, and what is refused before anything is written: the cases are in refit_cases.py."""

from __future__ import annotations

import pytest

from tests.real.inside import run_cases

pytestmark = pytest.mark.real

CASES = (
    "case_every_transport_is_bit_equal",
    "case_coding_follows_the_density",
    "case_wire_takes_few_bits_per_change",
    "case_changed_counts_elements_of_every_dtype",
    "case_names_and_layouts",
    "case_export_need_not_be_contiguous",
    "case_tied_names_are_written_once",
    "case_partly_shared_memory_is_refused",
    "case_one_payload_at_a_time",
    "case_nan_arrives_bit_for_bit_and_is_reported",
    "case_large_finite_values_are_not_reported",
    "case_training_on_does_not_tear_a_payload",
    "case_kind_follows_what_is_known_of_the_generator",
    "case_additive_peer_drifts_and_ours_does_not",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/refit_cases.py", CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
