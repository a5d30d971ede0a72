"""Errors that a run survives have a limit; what only looks like one has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.records import Diagnosis
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops import get_loop
from seatrial.trial.level import read_diagnosis
from tests.triage.runs import LOGS, judged, traceback, trl_log, verl_log

BLOCKED = Verdict.BLOCKED
WORKER = "\x1b[36m(WorkerDict pid=4628)\x1b[0m "


def diagnosed(loop: str, text: str, tmp_path: Path) -> Diagnosis:
    path = tmp_path / "run.log"
    path.write_text(text)
    return read_diagnosis(get_loop(loop), path)


@pytest.mark.parametrize("loop", LOGS)
def test_a_healthy_run_shows_no_failure(loop: str, tmp_path: Path) -> None:
    assert diagnosed(loop, LOGS[loop](), tmp_path).verdict is None
    if loop != "nemo-rl":  # its console does not print what a Pass needs
        assert judged(loop, LOGS[loop](), tmp_path).verdict is Verdict.PASS


@pytest.mark.parametrize("count", [1, 2, 19])
def test_a_reward_that_raises_and_is_swallowed(count: int, tmp_path: Path) -> None:
    raised = traceback(
        "ValueError: could not parse the answer", "trainer.py:_calculate", "my_reward.py:accuracy_reward", "json/decoder.py:decode"
    )
    found = judged("trl", trl_log(at=dict.fromkeys(range(2, 2 + count), raised)), tmp_path)
    assert (found.verdict, found.boundary, found.signature) == (BLOCKED, Boundary.REWARD, "survived-reward")
    assert found.text == "ValueError: could not parse the answer"
    assert f"{count} time" in found.advice


@pytest.mark.parametrize(
    ("line", "boundary", "signature"),
    [
        ("WARNING: skipping optimizer step", "optimizer", "update-skipped"),
        ("Skipping optimizer step due to high KL", "optimizer", "update-skipped"),
        ("WARNING:trl.trainer:grad norm is inf, skipping update step", "optimizer", "gradient-not-finite-survived"),
        ("Found nan/inf in gradients, setting them to zero", "optimizer", "gradient-not-finite-survived"),
        ("generator is using stale weights (version 3, policy 7)", "refit", "weights-not-synced"),
        ("[WARNING] weights not updated at step 3", "refit", "weights-not-synced"),
        ("refit failed, using previous weights", "refit", "weights-not-synced"),
        ("ERROR 11-15 01:02:03 [worker.py:12] weight sync failed: connection reset; continuing", "refit", "weights-not-synced"),
        ("Skipping batch 12", "data", "batch-skipped"),
        ("Skipping batch 12: loss is nan", "optimizer", "gradient-not-finite-survived"),
        ("[WARNING|trainer.py:812] 2026-11-15 01:02:03,4 >> Skipping step 7 because the loss is too high", "optimizer", "update-skipped"),
        ("WARNING:accelerate.optimizer:Optimizer step was skipped (inf grads)", "optimizer", "update-skipped"),
        ("Detected inf in grad norm; zeroing gradients for this step", "optimizer", "gradient-not-finite-survived"),
        ("vllm_client - update_named_param timed out; generation continues with old weights", "refit", "weights-not-synced"),
        ("\u26a0\ufe0f Refit failed at step 3: NCCL timeout; generation keeps previous weights", "refit", "weights-not-synced"),
        ("update_weights failed on rank 2, using last weights", "refit", "weights-not-synced"),
        ("Error while computing rewards: TimeoutError, using 0.0 for 16 completions", "reward", "reward-replaced"),
        ("reward_func accuracy_reward raised ValueError('bad'), returning None", "reward", "reward-replaced"),
        ("WARNING: reward model server unreachable, using default reward 0.0", "reward", "reward-replaced"),
        ("Unable to load optimizer state from checkpoint-10, continuing with a fresh optimizer", "checkpoint", "checkpoint-not-loaded"),
        ("checkpoint manager: saving checkpoint failed with OSError, training continues", "checkpoint", "checkpoint-not-saved"),
        ("api.py:900] [default] Worker group FAILED. 2/3 attempts left; will restart worker group", "cluster", "worker-restarted"),
        ("EngineCore died unexpectedly, relaunching", "cluster", "worker-restarted"),
        ("(raylet) Worker with PID 4711 was killed due to memory pressure (OOM).", "environment", "process-killed"),
        ("slurmstepd: error: node3: task 1 exited with exit code 137", "environment", "process-crashed"),
        ("srun: error: node7: task 3: Killed", "environment", None),
        ("agent loop failed, padding trajectory with dummy tokens", "rollout", "rollout-replaced"),
        (" number of skipped iterations:   4 | number of nan iterations:   4 |", "optimizer", "gradient-not-finite-survived"),
        ("CUDA out of memory, skipping batch", "environment", "memory-survived"),
        ("OOM caught in backward, batch skipped", "environment", "memory-survived"),
        ("torch.OutOfMemoryError caught; retrying with half the batch", "environment", "memory-survived"),
        ("falling back to the previous checkpoint weights", "rollout", "fell-back"),
        ("vLLM server unreachable, falling back to HF generate", "rollout", "fell-back"),
        ("(raylet) A worker died or was killed while executing a task by an unexpected system error.", "cluster", "worker-restarted"),
        ("WARNING: actor 3 died and was restarted", "cluster", "worker-restarted"),
        ("Restarting dead rollout worker 2", "cluster", "worker-restarted"),
        ("rollout failed, padded with dummy response", "rollout", "rollout-replaced"),
        ("generation timed out for 3 prompts; filling with empty completions", "rollout", "rollout-replaced"),
        ("NCCL error: unhandled system error, retrying (1/3)", "ddp", "collective-survived"),
        ("checkpoint save failed: No space left on device", "checkpoint", "checkpoint-not-saved"),
        ("Failed to save checkpoint at step 10: disk quota exceeded", "checkpoint", "checkpoint-not-saved"),
        ("Failed to load checkpoint, starting from scratch", "checkpoint", "checkpoint-not-loaded"),
        ("reward server timed out, returning 0.0", "reward", "reward-replaced"),
        ("Error in reward function: list index out of range", "reward", "reward-replaced"),
        ("Segmentation fault (core dumped)", "environment", None),
        ("Killed", "environment", None),
        ("./train.sh: line 14: 31337 Killed                  python reward_server.py", "environment", None),
        ("[ 8123.1] Out of memory: Killed process 4711 (python) total-vm:91kB", "environment", "process-killed"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.", "environment", None),
        ("[1234.5] python[4711]: segfault at 0 ip 00007f sp 00007f error 4 in libtorch.so", "environment", "process-crashed"),
    ],
)
@pytest.mark.parametrize("loop", LOGS)
def test_a_line_that_says_that_work_was_lost(loop: str, line: str, boundary: str, signature: str | None, tmp_path: Path) -> None:
    found = judged(loop, LOGS[loop](at={3: [line]}), tmp_path)
    # A crash of the driver, an exit code or a NaN that the judge reads itself may be worse than Blocked; none is a Pass.
    worse = found.verdict is Verdict.FAIL and any(said in line for said in ("Segmentation", "exit code", "is inf", "is nan"))
    assert (found.verdict, found.boundary) == (BLOCKED, boundary) or worse, found.reason
    assert signature is None or found.signature == signature
    assert found.line is not None
    assert (tmp_path / "run.log").read_bytes().decode().split("\n")[found.line - 1].endswith(line)


@pytest.mark.parametrize(
    "line",
    [
        "Skipping import of cpp extensions due to incompatible torch version",
        "Skipping monkey patch for Qwen2ForCausalLM as use_fused_kernels is False",
        "Skipping the first 10 batches to resume from step 10",
        "Resuming: skipping ahead 128 batches",
        "Skipping batch norm folding",
        "loading /data/stale/weights/model.safetensors",
        "UserWarning: Transformer Engine and Apex are not installed. Falling back to Torch optimizers.",
        "Apex is not installed. Falling back to Torch Norm",
        "torch.compile failed, falling back to eager mode",
        "No checkpoint found, training from scratch",
        'the model answered "Killed" and "skipping optimizer step"',
        "[response] I am skipping batch 3 because the weights are stale",
        "│ completion: Killed. Skipping batch 4, reward function failed │",
        "Assistant: The process was Killed and refit failed, using previous weights",
        "WARNING: RotaryEmbedding: Failed to load weights",
        "INFO: checkpoint saved; 0 samples skipped",
        "reward server timed out, retrying (1/3)",
        "max_grad_norm exceeded, clipping gradients",
        "check_for_nan_in_grad: True, skip_update: False",
        "Some weights of the model were not initialized from the checkpoint",
        "staleness of trajectories: mean 1.2 max 2",
        "timeout is set to 600 seconds",
        "Dropped 12 prompts longer than max_prompt_length",
        "No stale weights found",
        "Found 0 nan values in gradients",
        "Skipped 0 rows with errors",
        "using default reward function accuracy",
        "resuming with previous weights from step 10",
        "worker group initialized, 8 workers alive, 0 failed, restarts left 3",
        "Skipping checkpoint at step 3 (save_period=10)",
        "Deleting stale checkpoint /ckpt/step_1",
        "NCCL WARN NET/OFI Failed to initialize sendcomm, falling back to TCP",
        "Dropping last incomplete batch (drop_last=True)",
        "Answer incorrect: reward 0.0 returned",
        "verifier: answer could not be parsed, score 0",
        "Some weights of Qwen2ForCausalLM were newly initialized",
        " number of skipped iterations:   0 | number of nan iterations:   0 |",
    ],
)
@pytest.mark.parametrize("loop", LOGS)
def test_what_only_looks_like_it(loop: str, line: str, tmp_path: Path) -> None:
    found = diagnosed(loop, LOGS[loop](at={step: [line] for step in (1, 2, 3, 4)}), tmp_path)
    assert found.verdict is None, found


def test_a_sample_may_say_anything(tmp_path: Path) -> None:
    sample = [
        "[prompt] what happened?",
        "[response] Let me think.",
        "Killed",
        "Skipping batch 3",
        "Segmentation fault",
        "[ground_truth] 4",
        "[score] 1.0",
    ]
    assert diagnosed("verl", verl_log(at={2: sample}), tmp_path).verdict is None
    assert diagnosed("verl", verl_log(at={2: [*sample, "Killed"]}), tmp_path).boundary is Boundary.ENVIRONMENT


def test_loss_scaling_may_overflow_at_the_start_and_not_always(tmp_path: Path) -> None:
    line = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    assert diagnosed("trl", trl_log(at={1: [line], 2: [line]}), tmp_path).verdict is None
    found = diagnosed("trl", trl_log(at={step: [line] for step in range(1, 21)}), tmp_path)
    assert (found.signature, found.boundary, found.times, found.verdict) == ("update-overflow", Boundary.OPTIMIZER, 20, BLOCKED)
    deepspeed = "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768"
    assert diagnosed("trl", trl_log(at={step: [deepspeed] for step in range(1, 21)}), tmp_path).times == 20


@pytest.mark.parametrize("loop", LOGS)
@pytest.mark.parametrize("prefix", ["[rank1]: ", "1: ", "[default1]:"])
def test_a_rank_that_died_while_the_others_went_on(loop: str, prefix: str, tmp_path: Path) -> None:
    died = traceback("RuntimeError: shapes differ", "train.py:main", prefix=prefix)
    found = judged(loop, LOGS[loop](at={3: died}), tmp_path)
    assert (found.verdict, found.boundary) == (BLOCKED, Boundary.DDP)
    assert found.text.endswith("RuntimeError: shapes differ")


def test_repeated_errors_of_one_class_beside_the_critical_path(tmp_path: Path) -> None:
    raised = traceback("TimeoutError: no answer", "vllm_client.py:generate", prefix=WORKER)
    assert diagnosed("verl", verl_log(at={2: raised}), tmp_path).verdict is None
    found = diagnosed("verl", verl_log(at={2: raised, 3: raised}), tmp_path)
    assert (found.verdict, found.boundary, found.times) == (BLOCKED, Boundary.ROLLOUT, 2)


@pytest.mark.parametrize(
    "calls",
    [
        ("wandb/sdk/internal.py:_send",),
        ("tensorboard/summary/writer.py:add_event",),
        ("ray/dashboard/agent.py:_run",),
    ],
)
def test_services_that_only_carry_metrics_do_not_count(calls: tuple[str, ...], tmp_path: Path) -> None:
    raised = traceback("ConnectionError: gone", *calls)
    assert diagnosed("trl", trl_log(at=dict.fromkeys(range(3, 12), raised)), tmp_path).verdict is None


def test_optional_imports_and_code_of_a_model_do_not_count(tmp_path: Path) -> None:
    optional = [
        "Import of FP8GlobalStateManager from megatron.core.extensions.transformer_engine failed with: Traceback (most recent call last):",
        '  File "/work/megatron/bridge/utils/import_utils.py", line 319, in safe_import_from',
        "    return getattr(imported, symbol), True",
        "AttributeError: module 'megatron.core.extensions.transformer_engine' has no attribute 'FP8GlobalStateManager'",
    ]
    written = ["Traceback (most recent call last):", '  File "<string>", line 1, in <module>', "NameError: name 'reward' is not defined"]
    for lines in (optional, written):
        shown = [f"{WORKER}{line}" for line in lines]
        assert diagnosed("verl", verl_log(at=dict.fromkeys((1, 2, 3, 4), shown)), tmp_path).verdict is None


def test_a_warning_with_a_traceback_counts(tmp_path: Path) -> None:
    raised = traceback("KeyError: 'answer'", "rewards/math.py:compute_score", prefix="WARNING 11-15 01:02:03 [x.py:1] ")
    assert diagnosed("verl", verl_log(at={2: raised}), tmp_path).boundary is Boundary.REWARD


def test_a_missed_check_outranks_what_was_survived(tmp_path: Path) -> None:
    text = trl_log(at={3: ["WARNING: skipping optimizer step"]}).replace("'grad_norm': '1.07'", "'grad_norm': 'nan'")
    found = judged("trl", text, tmp_path)
    assert found.verdict is Verdict.FAIL
    assert "grad_norm" in found.reason


def test_work_that_is_skipped_again_and_again(tmp_path: Path) -> None:
    """One timeout is a note; more than a share of the steps is not."""
    line = "sandbox timed out; skipping 5 rollouts"
    once = diagnosed("trl", trl_log(at={3: [line]}), tmp_path)
    assert once.verdict is None
    assert any(line in text for text in once.noise)
    assert diagnosed("trl", trl_log(at={3: [line], 9: [line]}), tmp_path).boundary is Boundary.DATA


def test_ray_counts_repeated_lines(tmp_path: Path) -> None:
    line = f"{WORKER}Gradient overflow, skipping step [repeated 7x across cluster]"
    assert diagnosed("verl", verl_log(at={2: [line]}), tmp_path).times == 7
