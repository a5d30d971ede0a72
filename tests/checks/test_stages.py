"""Lists of stages and refits: complete ones pass, and nothing that was cut off or lacks its control does."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.verdict import Boundary, Verdict
from seatrial.trial.files_judge import read_stages

TRIAGE = Path(__file__).parents[1] / "data" / "triage"


def verdict(path: Path) -> tuple[Verdict, int] | None:
    found = read_stages(path)
    return (found.judgement().verdict, found.line()) if found else None


@pytest.mark.parametrize(
    ("name", "first"),
    [("core0.19.2_tp2", 20), ("bridge0.6.2_qwen2", 27), ("bridge0.6.2_lora_ddp_distopt", 54), ("refit_llama_inprocess", 36)],
)
def test_no_cut_of_a_list_passes(name: str, first: int, tmp_path: Path) -> None:
    """`first` is the line with which the list is complete."""
    lines = (TRIAGE / f"{name}.log").read_bytes().split(b"\n")
    passed = []
    for count in range(len(lines)):
        log = tmp_path / "cut.log"
        log.write_bytes(b"\n".join(lines[:count]) + b"\n")
        found = verdict(log)
        if found and found[0] is Verdict.PASS:
            passed.append(count)
    assert passed == list(range(first, len(lines)))


def listed(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "stages.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_log_without_stages_is_none(tmp_path: Path) -> None:
    assert read_stages(listed(tmp_path, "PASSED tests/test_a.py::test_b", "3 passed in 0.1s", "rc=0", "the tests PASS quickly")) is None


def test_a_line_that_ends_with_fail_fails(tmp_path: Path) -> None:
    found = read_stages(listed(tmp_path, "PASS import", "logits max|diff| 0.31 argmax agree 0.4 FAIL", "PASS save_hf_pretrained -> reload"))
    assert found is not None
    judgement = found.judgement()
    assert (judgement.verdict, judgement.boundary, found.line()) == (Verdict.FAIL, Boundary.PROVIDER, 2)


def test_a_switch_that_was_only_off_is_inconclusive(tmp_path: Path) -> None:
    off = ("PASS DDP wrap dist=False (0.1s)", "PASS save+load dist=False (0.2s)")
    for lines in (off, (*off, "PASS DDP wrap dist=True (0.1s)")):
        found = read_stages(listed(tmp_path, *lines))
        assert found is not None
        assert found.judgement().verdict is Verdict.BLOCKED
        assert "only one setting" in found.judgement().reason
    assert verdict(listed(tmp_path, *off, *(text.replace("False", "True") for text in off))) == (Verdict.PASS, 4)


STALE = '{"tag": "stale_before_file", "token_mult_prob_error": 858.8}'
AFTER = '{"tag": "after_file", "token_mult_prob_error": 1.0000003}'


def test_a_refit_needs_its_control_and_its_end(tmp_path: Path) -> None:
    assert verdict(listed(tmp_path, STALE, AFTER, "rc=0")) == (Verdict.PASS, 2)
    for lines in ((AFTER, "rc=0"), (STALE.replace("858.8", "1.0"), AFTER, "rc=0"), (STALE, AFTER), (STALE, AFTER, "rc=10")):
        assert verdict(listed(tmp_path, *lines)) == (Verdict.BLOCKED, lines.index(AFTER) + 1)
    assert verdict(listed(tmp_path, STALE, "rc=0")) is None


@pytest.mark.parametrize("error", ["1.088", "nan", "inf", "2e+3"])
def test_a_refit_that_is_off_fails(error: str, tmp_path: Path) -> None:
    wrong = AFTER.replace("1.0000003", error)
    found = read_stages(listed(tmp_path, STALE, AFTER, wrong, "rc=0"))
    assert found is not None
    judgement = found.judgement()
    assert (judgement.verdict, judgement.boundary, found.line()) == (Verdict.FAIL, Boundary.REFIT, 3)
    assert [check.passed for check in found.checks()] == [True, False]
