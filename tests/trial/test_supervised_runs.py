"""What a sceptic got past the judge: supervised runs of TRL, wrong blame, and errors that a run survived in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.verdict import Boundary, Verdict
from tests.triage.runs import LOGS, judged
from tests.trial.made_runs import Run
from tests.trial.test_falsified import after_another, healthy, put, training

KINDS: dict[str, Any] = {
    "sft": lambda step: {"loss": 2.5 - step / 10 + step % 3 / 50, "mean_token_accuracy": 0.5 + step / 50, "num_tokens": 700.0 * step},
    "dpo": lambda step: {"loss": 0.69 - step / 50, "rewards/margins": step / 90, "rewards/chosen": step / 200, "rewards/accuracies": 0.6},
}


def supervised(kind: str) -> Run:
    run = healthy("trl")

    def made(row: dict[str, Any]) -> dict[str, Any]:
        if not training(row):
            return row
        step = int(row["step"])
        return {**KINDS[kind](step), "grad_norm": 1 + step / 30, "learning_rate": 1e-5, "epoch": row["epoch"], "step": step}

    return replace(run, rows=[made(row) for row in run.rows], printed=[made(row) for row in run.printed])


@pytest.mark.parametrize("files", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_supervised_run_of_trl_needs_no_rewards(kind: str, files: bool, tmp_path: Path) -> None:
    found = replace(supervised(kind), files=files).judge(tmp_path)
    assert found.verdict is Verdict.PASS, found.reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tag", "value"), [("loss", 0.0), ("grad_norm", 0.0), ("learning_rate", 0.0), ("loss", 1e8)])
def test_a_falsified_supervised_run_is_no_pass(kind: str, tag: str, value: float, tmp_path: Path) -> None:
    assert put(value, tag, when=lambda row: row["step"] >= 2)(supervised(kind)).judge(tmp_path).verdict is not Verdict.PASS


def test_a_run_with_completions_still_needs_rewards(tmp_path: Path) -> None:
    run = healthy("trl")
    for rows in (run.rows, run.printed):
        for row in rows:
            for tag in [tag for tag in row if "reward" in tag]:
                del row[tag]
            row.update({"mean_token_accuracy": 0.5} if training(row) else {})
    assert run.judge(tmp_path).verdict is not Verdict.PASS


def test_a_learning_rate_of_zero_is_the_optimizers(tmp_path: Path) -> None:
    found = put(0.0, "learning_rate")(healthy("trl")).judge(tmp_path)
    assert (found.verdict, found.boundary) == (Verdict.BLOCKED, Boundary.OPTIMIZER)


@pytest.mark.parametrize("loop", LOGS)
@pytest.mark.parametrize(
    "line", ["rank 3 died", "WARNING NaN in rewards, replaced by 0", "CUDA error: an illegal memory access was encountered"]
)
def test_one_line_of_a_lost_part_is_no_pass(loop: str, line: str, tmp_path: Path) -> None:
    found = judged(loop, LOGS[loop](at={3: [line]}), tmp_path)
    assert found.verdict is not Verdict.PASS
    assert line in found.text


@pytest.mark.parametrize("line", ["NaN in rewards will be replaced by 0", "no NaN in rewards, nothing replaced", "rank 3 is ready"])
def test_what_is_not_lost_alarms_nobody(line: str, tmp_path: Path) -> None:
    assert judged("trl", LOGS["trl"](at={3: [line]}), tmp_path).verdict is Verdict.PASS


@pytest.mark.parametrize("loop", LOGS)
@pytest.mark.parametrize(
    "line", ["AssertionError: refit mismatch", "AssertionError: weights differ after the sync", "ValueError: refit failed"]
)
def test_one_bare_exception_of_the_weights_is_no_pass(loop: str, line: str, tmp_path: Path) -> None:
    found = judged(loop, LOGS[loop](at={3: [line]}), tmp_path)
    assert (found.verdict, found.boundary, found.text) == (Verdict.BLOCKED, Boundary.REFIT, line)


@pytest.mark.parametrize("loop", LOGS)
@pytest.mark.parametrize(
    ("line", "boundary"),
    [
        ("RuntimeError: gradient norm differs between microbatches", Boundary.OPTIMIZER),
        ("IndexError: the optimizer has 3 param groups", Boundary.OPTIMIZER),
        ("my.pkg.MismatchError: parameter embed_tokens.weight not in the model", Boundary.REFIT),
        ("OSError: cannot open checkpoint file", Boundary.CHECKPOINT),
        ("KeyError: 'old_log_probs'", Boundary.OPTIMIZER),
        ("ValueError: log_probs of vLLM and policy are 3.2 apart", Boundary.REFIT),
        ("torch.distributed.DistBackendError: update_weights_from_ipc got 3 tensors", Boundary.REFIT),
        ("ERROR: weights version 3 at policy version 7", Boundary.REFIT),
        ("[2026-11-15 01:02:03][ERROR] checkpoint step_3 has 2 of 4 shards", Boundary.CHECKPOINT),
        ("E1115 01:02:03.123456 1234 worker.py:12] grad_norm computed on 3 of 4 microbatches", Boundary.OPTIMIZER),
    ],
)
def test_one_error_that_names_a_part_is_no_pass(loop: str, line: str, boundary: Boundary, tmp_path: Path) -> None:
    found = judged(loop, LOGS[loop](at={3: [line]}), tmp_path)
    assert (found.verdict, found.boundary, found.text) == (Verdict.BLOCKED, boundary, line)


LOST = {
    "WARNING weights of the generator are stale by 2 versions": "refit",
    "vLLM engine still serves version 2 of the weights": "refit",
    "refit: broadcast timed out after 600 s; generation goes on": "refit",
    "[rank3]: RuntimeError: NCCL error in ProcessGroupNCCL.cpp: remote process exited": "ddp",
    "all_reduce on rank 2 was skipped": "ddp",
    "rank 1 fell out of the process group": "ddp",
    "12 of 16 completions were empty after a timeout": "rollout",
    "EngineDeadError: EngineCore encountered an issue.": "rollout",
    "checkpoint shard 1 is truncated, keeping the previous one": "checkpoint",
    "disk full while writing checkpoint-10": "environment",
    "torch.OutOfMemoryError: CUDA out of memory": "environment",
    "MemoryError": "environment",
    "actor worker 3 is unresponsive; continuing without it": "cluster",
    "loss scale is 0, gradients are zero": "optimizer",
    "update aborted: KL above 10": "optimizer",
    "the critic was not updated in this step": "optimizer",
    "lost connection to the reward server, using cached rewards": "reward",
    "advantage computation failed; advantages set to zero": "reward",
}


@pytest.mark.parametrize("loop", LOGS)
@pytest.mark.parametrize(("line", "boundary"), LOST.items())
def test_one_line_of_lost_work_is_no_pass(loop: str, line: str, boundary: str, tmp_path: Path) -> None:
    found = judged(loop, LOGS[loop](at={3: [line]}), tmp_path)
    assert (found.verdict, found.boundary) == (Verdict.BLOCKED, Boundary(boundary))


@pytest.mark.parametrize("how", ["Terminated", "Killed", "Segmentation fault (core dumped)", "rc=137"])
@pytest.mark.parametrize("name", ["trl", "ppo", "grpo", "sft", "nemo"])
def test_a_run_that_was_killed_before_another_is_no_pass(name: str, how: str, tmp_path: Path) -> None:
    assert after_another(how, share=0.12)(healthy(name)).judge(tmp_path).verdict is not Verdict.PASS


@pytest.mark.parametrize(
    "line",
    [
        "ERROR: 0 errors while loading weights",
        "ImportError: cannot import name 'Adafactor' from 'torch.optim'",
        "HfHubHTTPError: 429 while uploading checkpoint-10 to the hub",
        "ValueError: no number in the answer",
        "TimeoutError: the tool took 10 s",
    ],
)
def test_one_error_of_something_else_is_tolerated(line: str, tmp_path: Path) -> None:
    assert judged("trl", LOGS["trl"](at={3: [line]}), tmp_path).verdict is Verdict.PASS


def test_one_bare_exception_of_a_reward_is_tolerated(tmp_path: Path) -> None:
    line = "ValueError: the reward of this answer cannot be parsed"
    assert judged("trl", LOGS["trl"](at={3: [line]}), tmp_path).verdict is Verdict.PASS
    assert judged("trl", LOGS["trl"](at={step: [line] for step in (3, 4, 5)}), tmp_path).boundary is Boundary.REWARD


def test_a_gradient_overflow_is_tolerated_once(tmp_path: Path) -> None:
    line = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    assert judged("trl", LOGS["trl"](at={3: [line]}), tmp_path).verdict is Verdict.PASS
    assert judged("trl", LOGS["trl"](at={step: [line] for step in range(3, 12)}), tmp_path).boundary is Boundary.OPTIMIZER


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("tag", ["actor/grad_norm", "actor/entropy", "critic/score/mean"])
def test_true_and_false_are_no_numbers(tag: str, value: bool, tmp_path: Path) -> None:
    found = put(value, tag, when=lambda row: row["step"] == 7, log=False)(healthy("grpo")).judge(tmp_path)
    assert (found.verdict, found.boundary) == (Verdict.FAIL, Boundary.METRICS)
    assert f"the value of '{tag}' is not a number" in found.reason


@pytest.mark.parametrize("value", [True, False, "0.5"])
@pytest.mark.parametrize(("name", "tag"), [("grpo", "actor/entropy"), ("trl", "entropy"), ("nemo", "train/approx_entropy")])
def test_a_metric_that_is_never_a_number_is_damage(name: str, tag: str, value: object, tmp_path: Path) -> None:
    found = put(value, tag, log=False)(healthy(name)).judge(tmp_path)
    assert (found.verdict, found.boundary) == (Verdict.FAIL, Boundary.METRICS)
    assert re.search(rf"(?:line|row) [12]: the value of '\S*{tag}' is not a number", found.reason), found.reason


@pytest.mark.parametrize("files", [True, False])
def test_true_in_a_record_of_verl_is_damage(files: bool, tmp_path: Path) -> None:
    run = put(True, "actor/ppo_kl", when=lambda row: row["step"] == 7, files=False)(healthy("grpo"))
    found = replace(run, files=files).judge(tmp_path)
    assert (found.verdict, found.boundary) == (Verdict.FAIL, Boundary.METRICS)
    assert "the value of 'actor/ppo_kl' is not a number" in found.reason


@pytest.mark.parametrize("text", ["nan", "-nan(ind)", "1.#QNAN", "-1.#IND", "inf", "-inf", "Infinity"])
@pytest.mark.parametrize("name", ["trl", "grpo"])
def test_every_spelling_of_no_number_counts(name: str, text: str, tmp_path: Path) -> None:
    tag = {"trl": "entropy", "grpo": "actor/entropy"}[name]
    found = put(text, tag, log=False)(healthy(name)).judge(tmp_path)
    assert (found.verdict, found.boundary) == (Verdict.FAIL, Boundary.METRICS)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_learning_rate_of_zero_of_verl_is_the_optimizers(name: str, tmp_path: Path) -> None:
    tags = ("actor/lr", "critic/lr", "actor/grad_norm")
    found = put(0.0, *tags)(healthy(name)).judge(tmp_path)
    assert (found.verdict, found.boundary) == (Verdict.BLOCKED, Boundary.OPTIMIZER)
