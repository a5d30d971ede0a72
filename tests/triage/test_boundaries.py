"""Failures at every boundary: the verdict, where it belongs, the line that is the cause, and a command that applies.

Each log is made of the lines of its loop and of the traceback that the part prints; what is right was written down before triage was asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.loops.nemo_logs import grpo_log, raised
from tests.triage.runs import RUNNER, judged, traceback, trl_log, verl_log

WORKER = "\x1b[36m(WorkerDict pid=4628)\x1b[0m "
VLLM = "\x1b[36m(vLLMHttpServer pid=99)\x1b[0m "
START = ["Loading weights: 100%|██████████| 26/26 [00:00<00:00, 1000.04it/s]"]
NCCL = (
    "[rank1]:[E1115 01:02:03.1 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)"
)
FAIL, BLOCKED, EITHER = ("Fail",), ("Blocked",), ("Fail", "Blocked")
Case = tuple[str, str, Sequence[str], tuple[str, ...], str, str]
CASES: list[Case] = []


def top(text: str, *calls: str, prefix: str = "") -> list[str]:
    """An exception that nobody caught."""
    return traceback(text, "train.py:<module>", *calls, prefix=prefix)


def until_trl(step: int, *more: str) -> list[str]:
    lines = trl_log(20).split("\n")
    return [*lines[: lines.index(f"STEP {step} 1.5")], *more]


def until_verl(step: int, *more: str, head: int | None = None) -> list[str]:
    lines = verl_log(20).split("\n")
    place = next(number for number, line in enumerate(lines) if f"step:{step} -" in line)
    return [*lines[: place if head is None else head], *more]


def until_nemo(milestone: str, *more: str, steps: int = 2) -> list[str]:
    return [*grpo_log(steps, 4, until=milestone).split("\n"), *more]


def case(name: str, loop: str, lines: Sequence[str], verdicts: tuple[str, ...], boundaries: str, cause: str) -> None:
    CASES.append((name, loop, lines, verdicts, boundaries, cause))


# environment
case(
    "missing module",
    "trl",
    top("ModuleNotFoundError: No module named 'trl'", "train.py:main"),
    BLOCKED,
    "environment",
    "No module named 'trl'",
)
case(
    "no cuda",
    "trl",
    top("RuntimeError: No CUDA GPUs are available", "torch/cuda/__init__.py:_lazy_init"),
    BLOCKED,
    "environment",
    "No CUDA GPUs",
)
case(
    "disk full",
    "trl",
    until_trl(9, *top("OSError: [Errno 28] No space left on device", "transformers/trainer.py:save_model")),
    BLOCKED,
    "environment",
    "No space left",
)
case("oom killer", "trl", until_trl(9, "Killed"), BLOCKED, "environment", "Killed")
case(
    "glibc",
    "trl",
    ["python: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by libtorch.so)"],
    BLOCKED,
    "environment",
    "GLIBC",
)
case(
    "cuda oom",
    "verl",
    until_verl(
        4,
        *traceback(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            "verl/workers/fsdp_workers.py:update_actor",
            prefix=WORKER,
        ),
        *top("ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.update_actor() (pid=4628)", "main_ppo.py:main"),
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ),
    EITHER,
    "environment optimizer",
    "CUDA out of memory",
)
case(
    "ulimit",
    "verl",
    until_verl(1, *top("OSError: [Errno 24] Too many open files", "multiprocessing/popen_fork.py:_launch"), head=3),
    BLOCKED,
    "environment",
    "Too many open files",
)
case(
    "segfault",
    "verl",
    until_verl(
        5, "Fatal Python error: Segmentation fault", "", "Thread 0x00007f (most recent call first):", '  File "/x/y.py", line 3 in f'
    ),
    EITHER,
    "any",
    "Segmentation fault",
)
case(
    "flash",
    "trl",
    [
        *START,
        *top(
            "ImportError: FlashAttention2 has been toggled on, but the package flash_attn seems to be not installed.",
            "transformers/modeling_utils.py:_check",
        ),
    ],
    BLOCKED,
    "environment",
    "FlashAttention2",
)
# config
case(
    "hydra override",
    "verl",
    [
        "Could not override 'actor_rollout_ref.actor.foo'.",
        "Key 'foo' is not in struct",
        "    full_key: actor_rollout_ref.actor.foo",
        "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.",
    ],
    BLOCKED,
    "config",
    "foo",
)
case(
    "argparse",
    "trl",
    ["usage: train.py [-h] [--lr LR]", "train.py: error: unrecognized arguments: --learning-rte 0.1"],
    BLOCKED,
    "config",
    "unrecognized",
)
case(
    "both set",
    "trl",
    top("ValueError: `use_vllm` and `use_transformers_paged` are mutually exclusive", "trl/trainer/grpo_config.py:__post_init__"),
    BLOCKED,
    "config",
    "mutually exclusive",
)
case(
    "batch divisible",
    "trl",
    top("ValueError: generation_batch_size (7) must be divisible by num_generations (8)", "trl/trainer/grpo_config.py:__post_init__"),
    BLOCKED,
    "config environment",
    "divisible",
)
case(
    "omegaconf",
    "nemo-rl",
    top("omegaconf.errors.ConfigAttributeError: Missing key grpo", "examples/run_grpo.py:main"),
    BLOCKED,
    "config",
    "ConfigAttributeError",
)
# data
case(
    "hub",
    "trl",
    top("OSError: We couldn't connect to 'https://huggingface.co' to load the files", "transformers/utils/hub.py:cached_file"),
    BLOCKED,
    "data",
    "couldn't connect",
)
case(
    "torn json",
    "trl",
    [
        *START,
        *top(
            "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)", "datasets/packaged_modules/json.py:_generate_tables"
        ),
    ],
    BLOCKED,
    "data",
    "JSONDecodeError",
)
case(
    "parquet missing",
    "verl",
    until_verl(
        1,
        *top(
            "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.parquet'", "verl/utils/dataset/rl_dataset.py:_read_files"
        ),
        head=2,
    ),
    BLOCKED,
    "data cluster environment",
    "train.parquet",
)
case(
    "key missing in row",
    "verl",
    until_verl(1, *traceback("KeyError: 'prompt'", "verl/utils/dataset/rl_dataset.py:__getitem__", prefix=RUNNER), head=6),
    EITHER,
    "data rollout",
    "prompt",
)
case(
    "gated",
    "trl",
    top(
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. Access to model meta-llama/x is restricted",
        "huggingface_hub/file_download.py:get",
    ),
    BLOCKED,
    "data",
    "GatedRepoError",
)
# reward
case(
    "reward raises trl",
    "trl",
    until_trl(3, *top("KeyError: 'answer'", "trl/trainer/grpo_trainer.py:_calculate_rewards", "rewards.py:accuracy_reward")),
    FAIL,
    "reward",
    "KeyError: 'answer'",
)
case(
    "reward raises verl",
    "verl",
    until_verl(
        3,
        *traceback(
            "ZeroDivisionError: division by zero",
            "verl/trainer/ppo/ray_trainer.py:fit",
            "verl/workers/reward_manager/naive.py:__call__",
            "my_reward.py:compute_score",
            prefix=RUNNER,
        ),
    ),
    FAIL,
    "reward",
    "ZeroDivisionError",
)
case(
    "reward nemo",
    "nemo-rl",
    until_nemo("step begun", steps=2)
    + top("ValueError: bad answer", "nemo_rl/algorithms/grpo.py:grpo_train", "nemo_rl/environments/math_environment.py:step"),
    FAIL,
    "reward",
    "bad answer",
)
case(
    "rm http",
    "verl",
    until_verl(
        3,
        *traceback(
            "aiohttp.client_exceptions.ClientResponseError: 500, message='Internal Server Error', url='http://rm/score'",
            "verl/workers/reward_manager/http.py:score",
            prefix=RUNNER,
        ),
    ),
    EITHER,
    "reward rollout",
    "500",
)
# cluster
case(
    "address",
    "trl",
    top(
        "torch.distributed.DistNetworkError: The server socket has failed to listen. name: EADDRINUSE, message: address already in use",
        "torch/distributed/rendezvous.py:_create_c10d_store",
    ),
    BLOCKED,
    "cluster",
    "EADDRINUSE",
)
case(
    "slurm time",
    "verl",
    until_verl(9, "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-11-15T01:02:03 DUE TO TIME LIMIT ***"),
    BLOCKED,
    "cluster",
    "TIME LIMIT",
)
case(
    "ray node died",
    "verl",
    until_verl(
        9,
        *top("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.", "main_ppo.py:main"),
        "\tThe actor is dead because its node has died. Node Id: 8",
    ),
    BLOCKED,
    "cluster",
    "actor",
)
case(
    "placement",
    "verl",
    until_verl(
        1,
        *top(
            "ValueError: Total available GPUs 4 is less than total desired GPUs 8",
            "verl/single_controller/ray/base.py:create_resource_pool",
        ),
        head=2,
    ),
    BLOCKED,
    "cluster",
    "Total available GPUs",
)
case(
    "connection refused",
    "trl",
    [
        *START,
        *top(
            "requests.exceptions.ConnectionError: Max retries exceeded (Caused by NewConnectionError('[Errno 111] Connection refused'))",
            "trl/extras/vllm_client.py:check_server",
        ),
    ],
    EITHER,
    "cluster rollout",
    "Connection refused",
)
# rollout
case(
    "vllm engine dead",
    "verl",
    until_verl(
        5,
        *traceback(
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "vllm/v1/worker/gpu_model_runner.py:execute_model",
            prefix=VLLM,
        ),
        *top("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)", "main_ppo.py:main"),
    ),
    FAIL,
    "rollout provider",
    "illegal memory access",
)
case(
    "vllm config",
    "verl",
    until_verl(
        1,
        *traceback(
            "ValueError: The model's max seq len (32768) is larger than what the KV cache can hold (1024).",
            "vllm/v1/core/kv_cache_utils.py:check",
            prefix=VLLM,
        ),
        head=4,
    ),
    EITHER,
    "rollout environment config",
    "max seq len",
)
case(
    "generate raise trl",
    "trl",
    until_trl(
        4,
        *top(
            "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
            "trl/trainer/grpo_trainer.py:_generate",
            "transformers/generation/utils.py:sample",
        ),
    ),
    FAIL,
    "rollout optimizer",
    "probability tensor",
)
case(
    "server 500",
    "trl",
    until_trl(
        4,
        *top(
            "Exception: Request failed: 500, Internal Server Error",
            "trl/trainer/grpo_trainer.py:_generate",
            "trl/extras/vllm_client.py:generate",
        ),
    ),
    FAIL,
    "rollout",
    "500",
)
# provider
case(
    "bridge mapping",
    "nemo-rl",
    raised(
        "MegatronPolicyWorker.__init__",
        ["megatron/bridge/models/conversion/model_bridge.py:load_weights_hf_to_megatron"],
        "KeyError: 'model.layers.0.self_attn.q_norm.weight'",
    ),
    EITHER,
    "provider environment",
    "q_norm",
)
case(
    "provider shape",
    "nemo-rl",
    until_nemo("policy being built", steps=1)
    + top(
        "RuntimeError: The size of tensor a (64) must match the size of tensor b (128) at non-singleton dimension 3",
        "megatron/core/transformer/attention.py:forward",
    ),
    FAIL,
    "provider",
    "size of tensor",
)
case(
    "unknown arch",
    "trl",
    [
        *START,
        *top("AttributeError: 'Qwen3Attention' object has no attribute 'q_norm'", "transformers/models/qwen3/modeling_qwen3.py:forward"),
    ],
    FAIL,
    "provider",
    "q_norm",
)
# peft
case(
    "peft targets",
    "trl",
    [
        *START,
        *top(
            "ValueError: Target modules {'q_prj'} not found in the base model. Please check the target modules and try again.",
            "peft/tuners/tuners_utils.py:inject_adapter",
        ),
    ],
    EITHER,
    "peft",
    "Target modules",
)
case(
    "lora rank vllm",
    "trl",
    until_trl(2, *top("ValueError: LoRA rank 64 is greater than max_lora_rank 16.", "vllm/lora/peft_helper.py:validate_legal")),
    EITHER,
    "peft rollout config",
    "LoRA rank",
)
case(
    "lora verl",
    "verl",
    until_verl(
        2,
        *traceback(
            "KeyError: 'base_model.model.lm_head.lora_A.weight'", "peft/utils/save_and_load.py:get_peft_model_state_dict", prefix=WORKER
        ),
    ),
    FAIL,
    "peft refit",
    "lora_A",
)
# ddp
case(
    "nccl timeout",
    "trl",
    until_trl(
        9,
        NCCL,
        "[rank1]:[E1115 01:02:04.1 ProcessGroupNCCL.cpp:1895] Process group watchdog thread terminated with exception: timeout",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
    ),
    FAIL,
    "ddp",
    "Watchdog caught",
)
case(
    "rank died first",
    "trl",
    until_trl(
        5,
        *top("RuntimeError: shapes differ on rank 1", "train.py:main", prefix="[rank1]: "),
        *top(
            "torch.distributed.DistBackendError: NCCL error, remote process exited or there was a network error",
            "train.py:main",
            prefix="[rank0]: ",
        ),
    ),
    FAIL,
    "any",
    "shapes differ on rank 1",
)
case(
    "unused params",
    "trl",
    until_trl(
        2,
        *top(
            "RuntimeError: Expected to have finished reduction in the prior iteration. Your module has parameters that were not used.",
            "torch/nn/parallel/distributed.py:forward",
        ),
    ),
    FAIL,
    "ddp",
    "finished reduction",
)
case(
    "allreduce",
    "nemo-rl",
    until_nemo("update", steps=2)
    + top(
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.1]:4242",
        "torch/distributed/distributed_c10d.py:all_reduce",
    ),
    FAIL,
    "ddp optimizer",
    "closed by peer",
)
# optimizer
case(
    "adam nan",
    "trl",
    until_trl(
        7,
        *top(
            "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
            "transformers/trainer.py:training_step",
            "torch/autograd/graph.py:_engine_run_backward",
        ),
    ),
    FAIL,
    "optimizer",
    "nan values",
)
case(
    "optim state",
    "verl",
    until_verl(3, *traceback("RuntimeError: expected scalar type Float but found BFloat16", "torch/optim/adamw.py:step", prefix=WORKER)),
    FAIL,
    "optimizer",
    "expected scalar type",
)
case(
    "megatron dist opt",
    "nemo-rl",
    until_nemo("update", steps=2) + top("AssertionError: param_range is empty", "megatron/core/optimizer/distrib_optimizer.py:step"),
    FAIL,
    "optimizer",
    "param_range",
)
case(
    "step raise trl",
    "trl",
    until_trl(3, *top("ValueError: grad is None", "torch/optim/lr_scheduler.py:step")),
    FAIL,
    "optimizer",
    "grad is None",
)
# checkpoint
case(
    "load ckpt",
    "trl",
    [*START, *top("ValueError: Can't find a valid checkpoint at /ckpt/checkpoint-10", "transformers/trainer.py:_load_from_checkpoint")],
    EITHER,
    "checkpoint data",
    "valid checkpoint",
)
case(
    "save raises",
    "trl",
    until_trl(
        11,
        *top(
            "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk",
            "transformers/trainer.py:_save_checkpoint",
            "safetensors/torch.py:save_file",
        ),
    ),
    FAIL,
    "checkpoint optimizer",
    "share memory",
)
case(
    "verl save",
    "verl",
    until_verl(
        11,
        *traceback(
            "RuntimeError: Parent directory /ckpt/global_step_10 does not exist.",
            "verl/utils/checkpoint/fsdp_checkpoint_manager.py:save_checkpoint",
            "torch/serialization.py:save",
            prefix=WORKER,
        ),
    ),
    FAIL,
    "checkpoint",
    "Parent directory",
)
case(
    "nemo save",
    "nemo-rl",
    [
        *until_nemo("update", steps=2),
        "Saving checkpoint for step 2...",
        *top(
            "megatron.core.dist_checkpointing.core.CheckpointingException: Object shard not found",
            "megatron/core/dist_checkpointing/serialization.py:save",
        ),
    ],
    FAIL,
    "checkpoint",
    "shard not found",
)
case(
    "after training save",
    "trl",
    trl_log(20).rstrip("\n").split("\n")
    + top("OSError: [Errno 30] Read-only file system: '/out/final'", "transformers/trainer.py:save_model"),
    EITHER,
    "checkpoint environment",
    "Read-only",
)
# refit
case(
    "weight loader",
    "verl",
    until_verl(
        2,
        *traceback(
            "AttributeError: 'Parameter' object has no attribute 'weight_loader'",
            "verl/workers/sharding_manager/fsdp_vllm.py:update_params",
            "vllm/model_executor/models/qwen2.py:load_weights",
            prefix=WORKER,
        ),
    ),
    FAIL,
    "refit",
    "weight_loader",
)
case(
    "trl sync",
    "trl",
    until_trl(
        2,
        *top(
            "RuntimeError: The size of tensor a (151936) must match the size of tensor b (152064)",
            "trl/trainer/grpo_trainer.py:_move_model_to_vllm",
            "vllm/model_executor/layers/vocab_parallel_embedding.py:weight_loader",
        ),
    ),
    FAIL,
    "refit",
    "151936",
)
case(
    "nemo refit",
    "nemo-rl",
    until_nemo("setup complete", steps=2)
    + top("RuntimeError: Failed to update weights from IPC handles", "nemo_rl/algorithms/grpo.py:refit_policy_generation"),
    FAIL,
    "refit",
    "IPC handles",
)
case(
    "client update",
    "trl",
    until_trl(
        3,
        *top(
            "Exception: Request failed: 500, update_named_param",
            "trl/trainer/grpo_trainer.py:_move_model_to_vllm",
            "trl/extras/vllm_client.py:update_named_param",
        ),
    ),
    FAIL,
    "refit",
    "update_named_param",
)
# metrics / other
case(
    "assert loss nan",
    "trl",
    until_trl(7, *top("AssertionError: loss is nan at step 7", "train.py:check")),
    FAIL,
    "metrics optimizer",
    "loss is nan",
)
case(
    "wandb",
    "trl",
    [
        *START,
        *top(
            "wandb.errors.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
            "wandb/sdk/wandb_login.py:login",
        ),
    ],
    BLOCKED,
    "environment",
    "api_key not configured",
)
case(
    "attribute then sigterm",
    "verl",
    until_verl(
        2,
        *traceback(
            "AttributeError: 'X' object has no attribute 'weight_loader'", "vllm/model_executor/models/qwen2.py:load_weights", prefix=WORKER
        ),
        "*** SIGTERM received at time=1763170000 on cpu 3 ***",
    ),
    FAIL,
    "refit",
    "weight_loader",
)
case(
    "module then core worker",
    "nemo-rl",
    until_nemo("cluster connected", steps=1)
    + top("ModuleNotFoundError: No module named 'nemo_gym'", "examples/run_grpo.py:main")
    + [
        "[2026-11-15 01:02:03,4 C 12 12] core_worker.cc:2000: Check failed: _s.ok() Bad status: IOError: Broken pipe",
        "*** StackTrace Information ***",
        "/x/_raylet.so(+0x12) [0x7f]",
        "*** SIGABRT received at time=1763170000 on cpu 3 ***",
    ],
    BLOCKED,
    "environment",
    "nemo_gym",
)
case("stopped quietly", "trl", until_trl(9), FAIL, "metrics optimizer any", "")


@pytest.mark.parametrize(("loop", "lines", "verdicts", "boundaries", "cause"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_each_boundary(loop: str, lines: Sequence[str], verdicts: tuple[str, ...], boundaries: str, cause: str, tmp_path: Path) -> None:
    found = judged(loop, "\n".join(lines) + "\n", tmp_path)
    assert (found.verdict.value in verdicts, cause in found.text) == (True, True), found
    assert found.boundary is not None
    assert "any" in boundaries or found.boundary.value in boundaries.split(), found
    assert re.search(r"`seatrial (?:doctor|plan|run|judge|probe) [^`]+`", found.advice), found.advice
