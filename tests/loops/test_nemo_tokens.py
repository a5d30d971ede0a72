"""Sequences of a training step from `train_data_step<N>.jsonl`, as NeMo-RL writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.loops.nemo_rl.nemo_outputs import tokens

CONFIG = "Final config:\n{'policy': {'generation': {'max_new_tokens': 2, 'temperature': 1.0, 'top_k': None, 'top_p': 0.9}}}\n"


def entry(**changes: Any) -> dict[str, Any]:
    """One row: a prompt of two tokens, two generated ones, one of padding."""
    return {
        "content": ["2+2= 4."],
        "rewards": [1.0],
        "input_lengths": [4],
        "token_ids": [[11, 12, 13, 14, 0]],
        "token_loss_mask": [[0.0, 0.0, 1.0, 1.0, 0.0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.0, 0.0, 0.7, 0.7, 0.0]],
        "generation_logprobs": [[0.0, 0.0, -0.5, -0.25, 0.0]],
        "prev_logprobs": [[0.0, -3.0, -0.5, -0.5, 0.0]],
        "idx": 0,
        **changes,
    }


def write(directory: Path, run: str, step: int, *rows: dict[str, Any]) -> Path:
    path = directory / run / f"train_data_step{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_as_the_loop_writes_it(tmp_path: Path) -> None:
    write(tmp_path, "run/results/logs/exp_001", 1, entry(), entry(sample_loss_mask=[0.0], rewards=[0.0]))
    (tmp_path / "run" / "run.log").write_text(CONFIG)
    first, second = tokens(tmp_path)
    assert (first.source, first.run, first.step, first.row) == ("train_data_step1.jsonl:1", "run", 1, 0)
    assert first.generation == (0.0, 0.0, -0.5, -0.25)
    assert first.training == (0.0, -3.0, -0.5, -0.5)
    assert first.mask == (False, False, True, True)
    assert (first.length, first.reward, first.masked_out, first.truncated) == (4, 1.0, False, True)
    assert first.settings == (("temperature", "1.0"), ("top_p", "0.9"), ("top_k", "None"), ("max_new_tokens", "2"))
    assert (second.row, second.masked_out, second.reward) == (1, True, 0.0)


def test_rows_of_one_prompt_are_known_by_its_token_ids(tmp_path: Path) -> None:
    other = entry(token_ids=[[11, 99, 13, 14, 0]])
    answer = entry(token_ids=[[11, 12, 77, 78, 0]])
    write(tmp_path, "run/results/logs/exp_001", 1, entry(), answer, other)
    one, two, three = (row.prompt for row in tokens(tmp_path))
    assert one == two != three
    assert one.endswith("(2 tokens)")


def test_runs_and_steps_in_order(tmp_path: Path) -> None:
    for step in (10, 2):
        write(tmp_path, "delta/results/logs/exp_001", step, entry())
    write(tmp_path, "full/results/logs/exp_001", 1, entry())
    write(tmp_path, "resume/results/logs/mcore/exp_001", 1, entry())
    found = [(row.run, row.step) for row in tokens(tmp_path)]
    assert found == [("delta", 2), ("delta", 10), ("full", 1), ("resume/mcore", 1)]


def test_without_a_configuration_settings_are_not_known(tmp_path: Path) -> None:
    write(tmp_path, "run/results/logs/exp_001", 1, entry())
    (row,) = tokens(tmp_path)
    assert (row.settings, row.truncated) == ((), None)
    (tmp_path / "run" / "run.log").write_text(CONFIG.replace("'max_new_tokens': 2", "'max_new_tokens': 3"))
    (row,) = tokens(tmp_path)
    assert row.truncated is False
    assert list(tokens(tmp_path / "absent")) == []


def test_numbers_that_are_none_are_kept(tmp_path: Path) -> None:
    write(tmp_path, "run/results/logs/exp_001", 1, entry(prev_logprobs=[[0.0, 0.0, math.nan, -math.inf, 0.0]]))
    (row,) = tokens(tmp_path)
    assert math.isnan(row.training[2])
    assert row.training[3] == -math.inf


def test_a_row_without_a_token_in_the_loss(tmp_path: Path) -> None:
    write(tmp_path, "run/results/logs/exp_001", 1, entry(token_loss_mask=[[0, 0, 0, 0, 0]]))
    (row,) = tokens(tmp_path)
    assert not any(row.mask)
    assert row.prompt.endswith("(4 tokens)")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (json.dumps(entry())[:60], "Unterminated|Expecting"),
        (json.dumps({"idx": 1}), "no 'input_lengths'"),
        (json.dumps(entry(prev_logprobs=[[0.0]])), "the lists have"),
        (json.dumps(entry(input_lengths=[9])), "input_lengths is 9"),
        (json.dumps(entry(token_ids=7)), "int instead of a list"),
        (json.dumps(entry(rewards=["high"])), "could not convert"),
        ("[1]", "list indices"),
    ],
)
def test_a_torn_row_is_an_error_with_its_line(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, "run/results/logs/exp_001", 1, entry())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=rf"train_data_step1\.jsonl:2: not a sequence of a training step: .*(?:{words})"):
        list(tokens(tmp_path))
