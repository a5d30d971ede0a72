"""What a line between two steps says in words that no loop prints: a falsified run is no Pass, and a healthy one keeps its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from seatrial.core.verdict import Verdict
from tests.trial.made_runs import Run, grpo, trl

NOT_FINITE = (
    *("gradients contain NaN", "advantages contain NaN values", "logits contain nan", "nan in advantages", "loss -> nan"),
    *("loss turned into NaN", "Loss is infinite", "Loss is infinite or NaN!", "total_norm=nan"),
)
SURVIVED = (
    *("AssertionError", "KeyError: 'reward' (ignored)", "TypeError: compute_score() got an unexpected keyword argument"),
    *("RuntimeError: The size of tensor a (3) must match the size of tensor b (4)", "ValueError: shapes (3,4) and (5,) not aligned"),
    *("Killed process 1234 (python) total-vm:1kB", "SIGKILL received by rank 1", "*** Aborted at 1700000 (unix time) ***"),
    *("pure virtual method called", "worker pid=77 was OOM killed and relaunched", "GPU 3 fell off the bus", "ECC uncorrectable error"),
    *("EngineDeadError: engine core died", "vLLM engine died; using HF generate", "### reward server died ###"),
    *("rank 1 fell behind and was dropped", "gradient sync skipped on rank 1", "no gradients were computed for this step"),
    *("update_weights returned False", "weight update rejected by server: 400", "weights were not refreshed since step 1"),
    *("checksum of lm_head.weight does not match", "bit mismatch in 4 of 30 tensors after refit", "generator weights lag by 12 versions"),
    *("policy version 3 expected, generator reports 2", "trainer and generator disagree on logprobs (max 3.2)"),
    *("token_mult_prob_error exceeded 1.05, ignoring", "lora weights not applied in vLLM, generating with base model"),
    *("dropping 64 of 64 rollouts", "no reward was computed for this batch", "advantages were all zeroed"),
    *("rewards defaulted to 0 because the verifier was down", "skip step: no valid samples", "could not write optimizer shard 1"),
    *("Failed to resume; training from random init", "all gradients are zero", "optimizer has no parameters"),
    *("update had no effect: parameters unchanged", "weights unchanged after step", "trainable params: 0 || all params: 97344"),
)
EXITS = ("$? = 1", "pod failed: Error", "BackoffLimitExceeded")
BENIGN = (
    *("num skipped batches: 0", "stale weights: 0", "skipped 0 of 64 rollouts", "refit mismatch: 0 of 30 tensors", "weights are in sync"),
    *(
        "Will skip optimizer step if gradients are non finite",
        "best loss inf -> 2.3",
        "checking for nan loss: ok",
        "trainable params: 6,656",
    ),
    *("max_grad_norm: inf", "tool call failed: the model called an unknown tool", "Filtering out 3 prompts that exceed the maximum length"),
    *("INFO reward function compute_score loaded", "DEBUG reward: answer could not be parsed, scored 0", "Avg throughput: nan tokens/s"),
    *("{'input': 'q', 'output': 'x loss = nan y', 'score': 1.0}", "{'step': 3, 'completion': 'AssertionError: refit mismatch'}"),
)
ENDED = ("EngineCore received signal 15", "$? = 0", "exited with code 0")
HEADS = ("[pod/trainer-0/main] ", "Nov 15 01:02:03 ", "Nov 15 01:02:03 host0 python3[123]: ", "[   12.345678] ", "[trainer0|0]:")
MADE = {"trl": (trl(), "STEP 9 "), "grpo": (grpo(), "step:9 - ")}


def said(name: str, text: str, *, last: bool = False) -> Run:
    """A run whose log says this in its middle, or at its end."""
    run, step = MADE[name]
    lines = run.log().rstrip("\n").split("\n")
    at = len(lines) if last else next(number for number, line in enumerate(lines) if step in line) + (2 if name == "trl" else 1)
    return replace(run, head=(*lines[:at], text, *lines[at:]), printed=[], tail=())


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("text", [*NOT_FINITE, *SURVIVED])
def test_no_pass(tmp_path: Path, name: str, text: str) -> None:
    found = said(name, text).judge(tmp_path)
    assert found.verdict in (Verdict.FAIL, Verdict.BLOCKED)
    assert text.split()[0] in found.reason + found.text


@pytest.mark.parametrize("text", EXITS)
def test_no_pass_by_the_last_line(tmp_path: Path, text: str) -> None:
    assert said("trl", text, last=True).judge(tmp_path).verdict is Verdict.FAIL


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("text", BENIGN)
def test_a_pass(tmp_path: Path, name: str, text: str) -> None:
    found = said(name, text).judge(tmp_path)
    assert found.verdict is Verdict.PASS, found.reason


@pytest.mark.parametrize("text", ENDED)
def test_a_pass_whatever_ended_beside_it(tmp_path: Path, text: str) -> None:
    assert said("trl", text, last=True).judge(tmp_path).verdict is Verdict.PASS


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("head", HEADS)
def test_a_pass_behind_the_head_of_a_launcher(tmp_path: Path, name: str, head: str) -> None:
    run = MADE[name][0]
    found = replace(run, head=tuple(f"{head}{line}" for line in run.log().rstrip("\n").split("\n")), printed=[], tail=()).judge(tmp_path)
    assert found.verdict is Verdict.PASS, found.reason


@pytest.mark.parametrize(
    "text", ["loss = nan", "AssertionError: refit mismatch", "skipping optimizer step", "Killed", "ERROR weight update failed, continuing"]
)
def test_a_traceback_that_a_model_wrote_into_its_answer(tmp_path: Path, text: str) -> None:
    rows = ("[prompt] q", "[response] The code prints", "Traceback (most recent call last):", '  File "a.py", line 1, in f', text)
    closed = (*rows, "[ground_truth] 4", "[score] 1.0")
    shown = "\n".join(f"(TaskRunner pid=11) {row}" for row in closed)
    found = said("grpo", shown).judge(tmp_path)
    assert found.verdict is Verdict.PASS, found.reason
    cut = "\n".join(f"(TaskRunner pid=11) {row}" for row in rows)
    assert said("grpo", cut).judge(tmp_path).verdict is not Verdict.PASS
