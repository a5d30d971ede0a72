"""Logs as NeMo-RL, Ray and the functional scripts write them, for tests.

The lines are those that NeMo-RL 7ea279ab prints, in its order; workers have Ray's prefix, in colour, with and without an
address. What a test changes is named by the milestone that it follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

ROOT = "/opt/nemo-rl"
SITE = "/opt/ray_venvs/worker/lib/python3.13/site-packages"
POLICY = "\x1b[36m(MegatronPolicyWorker[rank=0] pid=4711, ip=192.0.2.10)\x1b[0m "
EARLY = "\x1b[36m(MegatronPolicyWorker pid=4711, ip=192.0.2.10)\x1b[0m "
"""Ray knows the name with the rank only when the worker is made."""
VLLM = "\x1b[36m(VllmGenerationWorker pid=4629)\x1b[0m "
CONTROLLER = "\x1b[36m(SingleControllerActor pid=4400)\x1b[0m "
HEADER = "Traceback (most recent call last):"
LINE = "=" * 25
VALUES: dict[str, tuple[float, ...]] = {"loss": (0.0123, -0.0045), "kl": (0.0003, 0.0004), "reward": (0.25, 0.5), "length": (201.5, 187.25)}
CONFIG: dict[str, Any] = {
    "policy.model_name": "Qwen/Qwen2.5-0.5B",
    "policy.train_global_batch_size": 4,
    "policy.generation.backend": "vllm",
    "policy.generation.colocated.enabled": True,
    "policy.generation.refit_transport": None,
    "policy.generation.mcore_generation_config.num_cuda_graphs": 4,
    "policy.dtensor_cfg.enabled": False,
    "policy.megatron_cfg.enabled": True,
    "policy.megatron_cfg.tensor_model_parallel_size": 1,
    "policy.megatron_cfg.peft.enabled": False,
    "policy.megatron_cfg.optimizer.lr": 5e-06,
    "loss_fn.ratio_clip_min": 0.2,
    "grpo.num_prompts_per_step": 2,
    "grpo.async_grpo.enabled": False,
    "grpo.seq_logprob_error_threshold": None,
    "logger.tensorboard_enabled": True,
    "cluster.gpus_per_node": 2,
    "checkpointing.enabled": False,
}
CLASSES = {"loss_fn": "ClippedPGLossConfig", "grpo": "GRPOConfig", "grpo.async_grpo": "AsyncGRPOConfig", "sft": "SFTConfig"}
"""Parts of the configuration that are objects, and printed as such."""


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries of values by dotted key."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        place = made
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return made


def printed_config(values: Mapping[str, Any]) -> str:
    """What `pprint` makes of the configuration object: all on one line."""

    def shown(value: Any, key: str) -> str:
        if not isinstance(value, dict):
            return repr(value)
        items = {name: shown(part, f"{key}.{name}") for name, part in value.items()}
        if key in CLASSES:
            return f"{CLASSES[key]}({', '.join(f'{name}={text}' for name, text in items.items())})"
        return "{" + ", ".join(f"{name!r}: {text}" for name, text in items.items()) + "}"

    return "MasterConfig(" + ", ".join(f"{name}={shown(part, name)}" for name, part in nested(values).items()) + ")"


def _setup(config: Mapping[str, Any], overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield "configuration loaded", f"Loaded configuration from: {ROOT}/examples/configs/grpo_math_1B_megatron.yaml"
    yield "", f"Overrides: {list(overrides)!r}"
    yield "", "Applied CLI overrides"
    yield "configuration in force", "Final config:"
    yield "", printed_config(config)
    yield "", f"📊 Using log directory: {ROOT}/tests/functional/grpo_megatron/logs/exp_001"
    yield "cluster connected", "2026-11-15 01:43:53,414\tINFO worker.py:2038 -- Started a local Ray instance."
    yield "", "INFO:nemo_rl.distributed.virtual_cluster:virtual_cluster.py:380: Started local cluster with tag 'nrl_tag_ALL': {'GPU': 2.0}"
    yield "data read", "  ✓ Training dataloader loaded with 4096 samples"
    yield "", "\n▶ Setting up compute cluster..."
    yield "GPUs placed", "  ✓ Ray cluster for policy initialized with 1 nodes"
    yield "workers being made", "\n▶ Setting up model and training..."
    yield "", "  ⚙️  Using sequential worker initialization (colocated mode)"
    yield "", "\rInitializing vllm_policy workers:   0%|          | 0/2 [00:00<?, ?worker/s]"
    yield "", f"{VLLM}INFO 11-15 01:44:20 [gpu_model_runner.py:2602] Starting to load model Qwen/Qwen2.5-0.5B..."
    yield "", "  ✓ 2 workers initialized in 61.35s"
    yield "", f"{EARLY}[GPU_DIAG] [MegatronPolicyWorker] [init_start] host=n1 rank=0 logical_dev=0 physical_dev=0"
    yield "policy being built", f"{EARLY}[GPU_DIAG] [MegatronPolicyWorker] [after_nccl_init] host=n1 rank=0 logical_dev=0 physical_dev=0"
    yield "", f"{EARLY}Reinitializing model parallel after loading model state."
    yield "", f"{EARLY}time to initialize megatron (seconds): 11.304"
    yield "policy built", f"{EARLY}Model, optimizer, and learning rate scheduler built"
    yield "", f"{EARLY}Checkpoint loaded [repeated 2x across cluster]"
    yield "policy and generator ready", "  ✓ Using vLLM backend for generation with Qwen/Qwen2.5-0.5B"
    yield "", "\n▶ Worker Initialization Timing:\n  Generation init: 61.4s\n  Policy init: 48.0s"
    yield "", "\n" + "=" * 60
    yield "setup complete", " " * 18 + "SETUP COMPLETE"
    yield "", "  Total setup time: 112.4s\n" + "=" * 60 + "\n"
    yield "", f"\n{LINE} Epoch 1/1 {LINE}"


def _step(step: int, planned: int, values: Mapping[str, Sequence[float]]) -> Iterator[tuple[str, str]]:
    def at(name: str) -> float:
        return values[name][(step - 1) % len(values[name])]

    yield "step begun", f"\n{LINE} Step {step}/{planned} {LINE}"
    yield "", "▶ Preparing batch...\n▶ Generating responses for batch of size 8..."
    yield "", f"{VLLM}\rProcessed prompts: 100%|██████████| 4/4 [00:02<00:00,  1.71it/s]"
    yield "", "▶ Processing rewards...,\n▶ Preparing for logprob inference..."
    yield "log-probabilities", "▶ Computing logprobs..."
    yield "", "▶ Computing advantages...\n▶ Preparing for training..."
    yield "update", "▶ Training policy..."
    yield "", f"Logged data to {ROOT}/tests/functional/grpo_megatron/logs/exp_001/train_data_step{step}.jsonl"
    yield "", f"\n📊 Training Results:\n  • Loss: {at('loss'):.4f}\n  • Generation KL Error: {at('kl'):.4f}"
    yield "", f"{POLICY}GPU Memory after refit complete: 1.00GB allocated, 2.00GB reserved"
    yield "", f"  • Avg Reward: {at('reward'):.4f}\n  • Mean Generation Length: {at('length'):.4f}"
    yield "", "\n⏱️  Timing:"
    yield "step done", "  • Total step time: 12.34s"
    yield "", "  • policy_training: 5.10s (41.3%)\n  • generation: 4.00s (32.4%)"
    yield "", "  • prepare_for_generation/transfer_and_update_weights: 1.25s (10.1%)"
    yield "", "\n🔍 Performance Metrics:\n  • Throughputs (per GPU):\n    - E2E (Samples/sec/gpu): 0.32"


def grpo_log(
    steps: int = 2,
    planned: int = 2,
    *,
    config: Mapping[str, Any] | None = None,
    values: Mapping[str, Sequence[float]] | None = None,
    overrides: Sequence[str] = ("grpo.max_num_steps=2",),
    extra: Mapping[str, Sequence[str]] | None = None,
    until: str | None = None,
    ended: bool | None = None,
) -> str:
    """The log of a GRPO run that took `steps` of the `planned` steps.

    `config` are values by dotted key, `values` the results by name (`VALUES`), `extra` lines that follow the first line of a
    milestone; the log is cut below the first line of the milestone `until`. `ended` says whether the last line of a run is
    there; it is, unless said, when all steps are.
    """
    full = {**CONFIG, "grpo.max_num_steps": planned, **(config or {})}
    rows = [*_setup(full, overrides)]
    for step in range(1, steps + 1):
        rows += _step(step, planned, {**VALUES, **(values or {})})
    if ended if ended is not None else steps >= planned:
        rows.append(("training done", "Max number of steps has been reached, stopping training early"))
    left, made = dict(extra or {}), []
    for milestone, text in rows:
        made += [text, *left.pop(milestone, ())]
        if until is not None and milestone == until:
            break
    else:
        assert until is None, f"no line of milestone {until!r}"
    assert not left, f"no line of milestone {sorted(left)}"
    return "\n".join(made) + "\n"


def frames(calls: Sequence[str]) -> list[str]:
    """`File` lines of calls as `nemo_rl/utils/config.py:function`; those of the checkout lie in it."""
    made = []
    for call in calls:
        file, _, function = call.rpartition(":")
        place = ROOT if file.startswith(("nemo_rl/", "examples/", "tests/")) else SITE
        made += [f'  File "{place}/{file}", line 93, in {function}', "    return inner(*args, **kwargs)"]
    return made


def raised(call: str, calls: Sequence[str], text: str) -> list[str]:
    """What the driver prints of an exception: its own (no `call`), or one of the remote `Worker.method`."""
    own = [
        HEADER,
        *frames(["examples/run_grpo.py:main", "nemo_rl/algorithms/grpo.py:setup" if "__init__" in call else "ray/_private/worker.py:get"]),
    ]
    if not call:
        return [HEADER, *frames(["examples/run_grpo.py:main", *calls]), *text.split("\n")]
    identity = f"ray::{call}() (pid=4711, ip=192.0.2.10, actor_id=21adfb, repr={call.partition('.')[0]})"
    if call.endswith("__init__"):
        said = f"ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task, {identity}"
    else:
        cause = text.partition(":")[0].rpartition(".")[2]
        said = f"ray.exceptions.RayTaskError({cause}): {identity}"
    return [*own, said, *frames(calls), *text.split("\n")]
