"""A stand-in for NeMo-RL's trainer: `python -m nemo_trainer examples/run_X.py [--config FILE] OVERRIDES`.

It prints and writes what NeMo-RL 7ea279ab prints and writes, in the same places. SIM names what goes wrong.
"""

from __future__ import annotations

import json
import math
import os
import pprint
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE.parents[2])]  # for the writer of event files

import nemo_rl  # type: ignore[import-not-found]  # noqa: E402, F401 - the driver of the checkout imports its package
from tests.metrics.writer import event, simple, version  # noqa: E402

SIM = os.environ.get("SIM", "pass")
TITLE = "=" * 25
RESULTS = """📊 Training Results:
  • Loss: 0.1000{draft}
  • Generation KL Error: 0.0005
  • Avg Reward: 0.2000
⏱️  Timing:
  • Total step time: 12.34s"""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def base(program: str) -> dict[str, Any]:
    sizes = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    megatron = "sft" not in program
    made: dict[str, Any] = {
        "policy": {
            "model_name": "Qwen/Qwen2.5-0.5B",
            "tokenizer": {"name": "Qwen/Qwen2.5-0.5B"},
            "megatron_cfg": {
                "enabled": megatron,
                "peft": {"enabled": False, "dim": 8},
                "fp8_cfg": {"enabled": False},
                "sequence_parallel": False,
                **{f"{name}_parallel_size": 1 for name in sizes},
            },
            "dtensor_cfg": {"enabled": not megatron},
            "draft": {"enabled": False},
            "generation": {
                "backend": "vllm",
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": None,
                "refit_transport": None,
                "colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
                "vllm_cfg": {"async_engine": False},
            },
        },
        "data": {"shuffle": True},
        "checkpointing": {"enabled": False},
        "logger": {"log_dir": "logs", "tensorboard_enabled": False},
    }
    return made | (
        {"sft": {"max_num_steps": 60}} if "sft" in program else {"grpo": {"max_num_steps": 60, "seq_logprob_error_threshold": None}}
    )


def override(config: dict[str, Any], word: str) -> None:
    key, _, text = word.lstrip("+").partition("=")
    *path, last = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    try:
        config[last] = json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        config[last] = text


def configured_by(words: list[str]) -> str:
    """The configuration that is named last, which counts."""
    return next((after for word, after in reversed(list(pairwise(words))) if word == "--config"), "default.yaml")


def configuration(program: str, words: list[str]) -> dict[str, Any]:
    config = base(program)
    file = Path(configured_by(words)).name
    config["policy"]["draft"]["enabled"] = "eagle3" in file
    config["policy"]["megatron_cfg"]["fp8_cfg"]["enabled"] = "fp8" in file
    for word in [word for word in words if "=" in word]:
        override(config, word)
    if SIM == "dtensor":
        config["policy"]["megatron_cfg"]["enabled"], config["policy"]["dtensor_cfg"]["enabled"] = False, True
    return config


def value_of(tag: str, step: int) -> float:
    """A healthy value, or the one that goes wrong."""
    if SIM == "nan" and tag == "train/loss" and step == 2:
        return math.nan
    if tag == "train/token_mult_prob_error":
        return {"metric-miss": 7.5, "all-masked": 0.0}.get(SIM, 1.01 + step / 1000)
    if SIM == "all-masked" and tag in ("train/global_valid_toks", "train/num_unmasked_tokens"):
        return 0.0
    if tag == "train/num_masked_seqs_by_logprob_error":
        return 3.0 if SIM == "masking" else 0.0
    return TAGS.get(tag, 0.5) + (0.01 * step if tag in ("train/reward", "train/approx_entropy") else 0.0)


TAGS = {
    "train/loss": 0.1,
    "train/reward": 0.2,
    "train/grad_norm": 1.5,
    "train/lr": 5e-7,
    "train/token_mult_prob_error": 1.01,
    "train/gen_kl_error": 0.0005,
    "train/policy_kl_error": 0.0005,
    "train/approx_entropy": 0.6,
    "train/probs_ratio_clamped_min": 1.0,
    "train/probs_ratio_clamped_max": 1.0,
    "train/advantages/min": -1.0,
    "train/advantages/max": 1.0,
    "train/advantages/mean": 0.0,
    "train/global_valid_seqs": 8.0,
    "train/global_valid_toks": 512.0,
    "train/num_valid_samples": 8.0,
    "train/num_unmasked_tokens": 512.0,
    "train/num_masked_seqs_by_logprob_error": 0.0,
    "train/max_seq_mult_prob_error": 1.02,
    "timing/train/total_step_time": 12.3,
    "timing/train/prepare_for_generation/total": 2.0,
    "timing/train/prepare_for_generation/transfer_and_update_weights": 1.5,
}
DELTA = {
    "refit/transfer/payloads": 4.0,
    "refit/transfer/relay_flush_s": 0.3,
    "refit/transfer/global_commit_s": 0.1,
    "refit/delta/changed_elements": 1000.0,
    "refit/delta/total_elements": 100000.0,
    "refit/delta/changed_pct": 1.0,
    "refit/delta_verify/samples": 16.0,
    "refit/delta_verify/mismatches": 0.0,
}


def saves(config: dict[str, Any], step: int) -> bool:
    return bool(config["checkpointing"]["enabled"]) and step % int(config["checkpointing"].get("save_period", 1)) == 0


def write_step(stream: Any, place: Path, step: int, config: dict[str, Any]) -> None:
    sparse = "sparse" in str(config["policy"]["generation"].get("refit_transport"))
    tags = {**TAGS, **(DELTA if sparse and SIM != "vacuous-delta" else {})}
    if config["policy"]["draft"]["enabled"]:
        tags["train/draft_loss"] = 0.7
    if saves(config, step):
        tags["timing/train/checkpointing"] = 0.5
    values = {tag: DELTA.get(tag, 0.0) if tag in DELTA else value_of(tag, step) for tag in tags}
    stream.write(event(step, *(simple(tag, value) for tag, value in values.items())))
    stream.flush()
    if SIM == "corrupt" and step == 2:
        stream.write(b"\x40" + bytes(30))
    rows = [
        {
            "content": f"prompt {row // 4} answer {row}",
            "rewards": float(row % 2),
            "input_lengths": 8,
            "token_ids": [row // 4, 2, 3, 4, 5, 6, 7, 8],
            "token_loss_mask": [0, 0, 0, 1, 1, 1, 1, 1],
            "sample_loss_mask": 1.0,
            "advantages": [0.5] * 8,
            "generation_logprobs": [0.0, 0.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0],
            "prev_logprobs": [0.0, 0.0, 0.0, *([-1.01] * 5 if SIM != "metric-miss" else [-1.0, -1.0, -2.0, -3.0, -4.0])],
            "idx": row,
        }
        for row in range(8)
    ]
    (place / f"train_data_step{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    say(f"Logged data to {place}/train_data_step{step}.jsonl")


def train(config: dict[str, Any], steps: int, first: int) -> None:
    logs = Path(config["logger"]["log_dir"])
    place = logs / f"exp_{len(list(logs.glob('exp_*'))) + 1:03d}"
    (place / "tensorboard").mkdir(parents=True)
    with (place / "tensorboard" / "events.out.tfevents.1.host").open("wb") as stream:
        stream.write(version())
        for step in range(first, steps + 1):
            say(f"\n{TITLE} Step {step}/{steps} {TITLE}")
            if SIM == "short" and step == steps:
                return
            if SIM == "worker-died" and step == steps:
                say("(MegatronPolicyWorker pid=7) *** SIGSEGV received at time=1 on cpu 3 ***")
                say("ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.")
                sys.exit(1)
            if SIM == "oom" and step == first:
                say("(MegatronPolicyWorker pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
                say("ray.exceptions.RayTaskError(OutOfMemoryError): ray::MegatronPolicyWorker.train() (pid=7)")
                sys.exit(1)
            say("▶ Computing logprobs...")
            say("▶ Training policy...")
            write_step(stream, place, step, config)
            say(RESULTS.format(draft="\n  • Draft Loss: 0.7000" if config["policy"]["draft"]["enabled"] else ""))
            must = config["checkpointing"].get("checkpoint_must_save_by")
            if saves(config, step):
                saved = Path(config["checkpointing"]["checkpoint_dir"]) / f"step_{step}"
                saved.mkdir(parents=True)
                (saved / "weights").write_text("w")
                say(f"Saving checkpoint for step {step}...")
            if must:
                say("Timeout has been reached, stopping training early")
                return
    say("Max number of steps has been reached, stopping training early")


def convert(model: str) -> None:
    """Make the converted model where NeMo-RL would, or take what is there."""
    say(f"(MegatronPolicyWorker pid=7) Using default megatron checkpoint dir: {os.environ['NRL_MEGATRON_CHECKPOINT_DIR']}")
    place = Path(os.environ["NRL_MEGATRON_CHECKPOINT_DIR"], model)
    if SIM == "converted-before":  # something sets the variable anew
        place = place.parents[3] / "nemo_rl" / model
    if SIM == "converted-before" or (place / "iter_0000000").exists():
        say(f"(MegatronPolicyWorker pid=7) Checkpoint already exists at {place}. Skipping import.")
    else:
        (place / "iter_0000000").mkdir(parents=True)
        (place / "iter_0000000" / "run_config.yaml").write_text("model: {}\n")


def main(program: str, words: list[str]) -> None:
    if SIM == "rate-limit":
        say("Loaded configuration from: x.yaml")
        say("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api/models/x")
        sys.exit(1)
    config = configuration(program, words)
    say(f"Loaded configuration from: {configured_by(words)}")
    say(f"Overrides: {[word for word in words if '=' in word]}\nApplied CLI overrides\nFinal config:")
    say(pprint.pformat(config))
    say("INFO:nemo_rl: Started local cluster with tag 'nrl_tag_ALL'")
    say("  ✓ Training dataloader loaded with 100 samples\n  ✓ Ray cluster for policy initialized with 1 nodes")
    say("\n▶ Setting up model and training...")
    inside = dict(os.environ)
    if SIM == "wrong-bridge":  # an environment of its own that puts another Bridge first
        other = Path(config["logger"]["log_dir"], "other")
        (other / "megatron" / "bridge").mkdir(parents=True)
        (other / "megatron" / "bridge" / "__init__.py").touch()
        start, _, rest = inside["PYTHONPATH"].partition(os.pathsep)
        inside["PYTHONPATH"] = os.pathsep.join((start, str(other), rest))
    done = subprocess.run([sys.executable, str(HERE / "default_worker.py")], check=False, env=inside, timeout=60)
    if done.returncode:
        sys.exit(done.returncode)
    say("(MegatronPolicyWorker pid=7) [GPU_DIAG] [MegatronPolicyWorker] [after_nccl_init] x")
    section = "sft" if "sft" in config else "grpo"
    steps, saved = int(config[section]["max_num_steps"]), Path(config["checkpointing"].get("checkpoint_dir") or "/nonexistent")
    resumed = bool(config["checkpointing"]["enabled"]) and (saved / "step_1").exists()
    if config["policy"]["megatron_cfg"]["enabled"]:
        convert(config["policy"]["model_name"])
        if resumed and SIM != "resumed-from-nothing":
            say(f"(MegatronPolicyWorker pid=7)   successfully loaded checkpoint from {saved}/step_1/policy/weights at iteration 1")
    if SIM == "no-mapping":
        say("(MegatronPolicyWorker pid=7) WARNING: No mapping found for megatron_param: decoder.layers.0.new.weight")
    say("(MegatronPolicyWorker pid=7) Model, optimizer, and learning rate scheduler built")
    if SIM == "swallowed-refit":
        say(f"  ✓ Using vLLM backend\n{' ' * 18}SETUP COMPLETE\n❌ Policy generation refit failed: weights went nowhere")
        return
    say(f"  ✓ Using vLLM backend\n{' ' * 18}SETUP COMPLETE")
    if config["policy"]["megatron_cfg"]["peft"]["enabled"]:
        say("(MegatronPolicyWorker pid=7) Total parameters: 500,000\n(MegatronPolicyWorker pid=7) Trainable parameters: 1,000")
    if config["policy"]["generation"]["refit_transport"] == "nccl_reshard":
        say("(MegatronPolicyWorker pid=7) nccl_reshard bulk comm group ready")
    train(config, steps, 2 if resumed else 1)
    if SIM == "teardown":
        os.abort()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
