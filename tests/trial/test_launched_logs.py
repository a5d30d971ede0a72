"""Logs whose every line has a head that a launcher put there: stamps, containers, ranks. Nothing that a head hides is a Pass, and a
healthy run stays one."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.log_text import Samples, is_sample, split_process, without_head
from seatrial.core.verdict import Verdict
from seatrial.loops import get_loop
from seatrial.trial.files_judge import FileVerdict, judge_files
from tests.trial.made_runs import write_rows
from tests.trial.test_falsified import healthy

HEADS = (
    "2026-11-15T01:02:03.123456Z ",
    "2026-11-15 01:02:03,123 ",
    "[2026-11-15 01:02:03] ",
    "2026-11-15T01:02:03+00:00 ",
    "01:02:03 ",
    "2026-11-15 01:02:03,123 - INFO - ",
    "[rank0]: ",
    "[default0]:",
    "0: ",
    "1794706888.123 ",
    "trainer-0  | ",
    "2026-11-15T01:02:03.123456789Z stdout F ",
)
TRACEBACK = 'Traceback (most recent call last):\n  File "/w/train.py", line 1, in <module>\n    main()\nRuntimeError: boom\n'


def judged(name: str, head: str, place: Path, *, before: str = "", after: str = "", twice: bool = False) -> FileVerdict:
    run = healthy(name)
    text = before + run.log() * (2 if twice else 1) + after
    (place / "run.log").write_text("\n".join(head + line if line else line for line in text.split("\n")), encoding="utf-8")
    return judge_files(get_loop(run.loop), place / "run.log", write_rows(run, place), None, run.steps)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["trl", "sft", "grpo", "nemo"])
def test_a_healthy_run_passes_under_any_head(name: str, head: str, tmp_path: Path) -> None:
    found = judged(name, head, tmp_path)
    assert found.verdict is Verdict.PASS, found.reason


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["trl", "grpo"])
def test_a_head_hides_no_crash(name: str, head: str, tmp_path: Path) -> None:
    found = judged(name, head, tmp_path, after=TRACEBACK)
    assert found.verdict is Verdict.FAIL
    assert "boom" in found.text


@pytest.mark.parametrize("head", HEADS)
def test_a_head_hides_no_nan(head: str, tmp_path: Path) -> None:
    assert judged("trl", head, tmp_path, before="loss: nan\n").verdict is Verdict.FAIL


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["trl", "nemo"])
def test_a_head_hides_no_second_run(name: str, head: str, tmp_path: Path) -> None:
    assert judged(name, head, tmp_path, twice=True).verdict is not Verdict.PASS


def test_the_indentation_behind_a_head_stays() -> None:
    assert without_head('2026-11-15 01:02:03   File "x.py"') == '  File "x.py"'
    assert split_process("[rank1]: x") == ("[rank1]: ", "x")


@pytest.mark.parametrize("text", ["loss  | nan", "12 | 5", "step 3 | loss nan", "5.5 x", "[INFO] x", "100%|██| 2/2 [00:52<00:00]"])
def test_what_is_no_head_stays(text: str) -> None:
    assert without_head(text) == text


def test_samples_of_one_process_end_at_their_score() -> None:
    samples = Samples()
    told = ["[response] so:", "loss: nan", "[score] 0.0", "loss: nan"]
    assert [samples.holds("a", text) for text in told] == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "quoted"),
    [
        ("Response: loss nan", True),
        ("│ loss nan │", True),
        ("generation loss: nan", False),
        ("rollout reward: nan", False),
        ("| loss nan |", False),
    ],
)
def test_only_a_speaker_is_quoted(text: str, quoted: bool) -> None:
    assert is_sample(text) is quoted


@pytest.mark.parametrize("name", ["trl", "grpo"])
def test_losses_that_are_text_are_no_losses(name: str, tmp_path: Path) -> None:
    run = healthy(name)
    for row in run.rows:
        for tag in ("loss", "actor/pg_loss"):
            if tag in row:
                row[tag] = str(row[tag])
    found = run.judge(tmp_path)
    assert found.verdict in (Verdict.FAIL, Verdict.BLOCKED), found.reason
