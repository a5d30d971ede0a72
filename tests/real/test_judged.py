"""Facts that the real hooks wrote in stand-ins of verl's workers, judged by `seatrial probe refit --facts`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import inside
from tests.real.inside import run_cases

pytestmark = pytest.mark.real
PASS, FAIL = 0, 1
EXPECTED: dict[str, tuple[int, str]] = {
    "clean": (PASS, "Result: Pass - 4 tensors are bit-equal after each of 3 refits"),
    "relay": (PASS, "Result: Pass - 4 tensors are bit-equal after each of 3 refits"),
    "cast": (PASS, "Result: Pass - 4 tensors are equal after the same cast (torch.float32 to torch.bfloat16)"),
    "skipped": (FAIL, "Result: Fail - the generator does not hold the policy's weights: k_proj.weight"),
    "missed": (FAIL, "refits [1, 2], although 3 were sent"),
    "class": (FAIL, "verl.checkpoint_engine.base: CheckpointEngine is not there in this version"),
    "senders": (FAIL, "embed: two different hashes sent at version 2"),
    "restarted": (FAIL, "restarted between refits"),
    "error": (FAIL, "no memory for hashes"),
    "corrupt": (FAIL, "got 1 of 4 names otherwise than sent: q_proj.weight"),
}
CASES = (
    *("case_clean", "case_cast", "case_skipped_tensor", "case_missed_last_refit", "case_missing_class", "case_other_senders"),
    *("case_restarted_generator", "case_probe_error", "case_relay", "case_corrupt_relay"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("judged")
    outcomes = run_cases("tests/real/judged_cases.py", CASES, extra={"JUDGED": str(place)})
    assert {name: text for name, text in outcomes.items() if text} == {}
    return place


@pytest.mark.parametrize("name", EXPECTED)
def test_what_hooks_saw(name: str, runs: Path) -> None:
    code, said = EXPECTED[name]
    answer = inside("probe", "refit", "--facts", runs / name, cwd=runs)
    assert (answer.code, answer.err) == (code, ""), answer.out
    assert said in answer.out
    assert ("Result: Pass" in answer.out) == (code == PASS)


def test_a_cast_is_not_called_bit_equal(runs: Path) -> None:
    answer = inside("probe", "refit", "--facts", runs / "cast", cwd=runs)
    assert "are bit-equal" not in answer.out
    assert "4 after the same cast" in answer.out
    assert "what it drops is not seen" in answer.out
