"""The exact-bit kernels with torch: every dtype and layout, and C against plain torch against the specification."""

from __future__ import annotations

import os

import pytest

from tests.real.inside import run_cases

pytestmark = pytest.mark.real

HASH = (
    "case_the_c_kernels_are_used",
    "case_every_dtype_hashes_as_the_specification_says",
    "case_layouts_and_views_hash_as_their_contiguous_copy",
    "case_nan_payloads_and_signed_zeros_count",
    "case_what_order_blind_sums_miss_is_seen",
    "case_a_tensor_hashes_like_the_stream_of_its_bytes",
    "case_fingerprints_keep_names_order_and_refuse_duplicates",
    "case_a_tensor_without_its_memory_is_refused",
    "case_a_sharded_tensor_is_hashed_once_it_is_gathered",
    "case_the_tree_names_the_tensor",
)
DELTA = (
    "case_both_kernels_encode_as_the_specification_says",
    "case_every_density_goes_there_and_back",
    "case_every_dtype_goes_there_and_back",
    "case_full_rows_and_partial_rows",
    "case_overwriting_twice_is_overwriting_once_and_has_no_inverse",
    "case_what_does_not_fit_is_refused_and_nothing_is_written",
    "case_broken_planes_are_refused_and_nothing_is_written",
    "case_broken_gaps_are_refused",
    "case_only_empty_tensors_are_no_work_for_a_gpu",
)


CUDA = (
    "case_sums_on_a_gpu_are_those_of_the_cpu",
    "case_encoding_on_a_gpu_is_that_of_the_cpu",
    "case_applying_and_reverting_on_a_gpu_is_that_of_the_cpu",
    "case_only_empty_tensors_on_a_gpu_are_no_work",
    "case_a_tensor_without_its_memory_is_refused_on_a_gpu",
)
ABSENT = "no CUDA device"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/bits_cases.py", HASH) | run_cases("tests/real/delta_cases.py", DELTA)


@pytest.fixture(scope="module")
def on_gpu() -> dict[str, str | None]:
    """The environment's torch is for a CPU: who has a GPU names an interpreter whose torch can use it."""
    return run_cases("tests/real/cuda_cases.py", CUDA, python=os.environ.get("SEATRIAL_CUDA_PYTHON"))


@pytest.mark.parametrize("name", [*HASH, *DELTA])
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]


@pytest.mark.parametrize("name", CUDA)
def test_case_on_a_gpu(name: str, on_gpu: dict[str, str | None]) -> None:
    found = on_gpu[name]
    if found is not None and found.rstrip().endswith(f"\nunittest.case.SkipTest: {ABSENT}"):
        pytest.skip(f"{ABSENT}: SEATRIAL_CUDA_PYTHON=FILE names a Python whose torch has one")
    assert found is None, found
