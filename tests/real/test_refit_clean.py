"""Five architectures, 20 steps each, every transport: bit-equal after every refit, and no alarm."""

from __future__ import annotations

import pytest

from tests.real.inside import run_cases

CASES = ("case_deepseek_v3", "case_gpt2", "case_llama_untied", "case_qwen2_tied", "case_qwen3_moe")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    return run_cases("tests/real/refit_clean_cases.py", CASES)


@pytest.mark.real
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
