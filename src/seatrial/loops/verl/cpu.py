"""verl on this machine's CPU: real training of a tiny model with FSDP2, and a generation server of ours.

Each phase is one call of `drive/train.py`, which starts verl's own `main_ppo`. What the proofs rest on is set here and
cannot be overridden (`OWNED`); everything else after `--` is handed to verl, last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.loops.options import number
from seatrial.loops.verl.cpu_claims import ROLLOUT, STRATEGY
from seatrial.loops.verl.cpu_proofs import CONTROL_STEPS
from seatrial.loops.verl.cpu_proofs import prove as proofs
from seatrial.loops.verl.witness import witness_variables
from seatrial.model.knowledge import Level
from seatrial.model.loop import Context, Phase
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

__all__ = ["DEFAULT_MODEL", "findings", "levels", "limitations", "phases", "proofs"]

DEFAULT_MODEL = "tiny-dense"
DRIVE = "seatrial.loops.verl.drive"
PLUGINS = (f"{DRIVE}.cpu_platform", f"{DRIVE}.plugin")
LEARNING_STEPS = (20, 100)
EXACT = "mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
"""In full precision the log-probabilities of trainer and generator agree to rounding, so that a stale weight is seen."""
# verl cuts a batch into whole micro batches only: 32 rows are the smallest batch of any level.
# Ray counts CPUs and a GPU that are only numbers: each of verl's processes asks for some, and would wait for them forever.
COMMON = (
    *"""
    data.train_batch_size=8 data.max_prompt_length=256 data.max_response_length=8 data.truncation=error data.seed=42
    data.dataloader_num_workers=0 data.filter_overlong_prompts=False
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa +critic.model.override_config.attn_implementation=sdpa
    actor_rollout_ref.model.use_remove_padding=False critic.model.use_remove_padding=False
    actor_rollout_ref.model.enable_gradient_checkpointing=False critic.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 critic.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.agent.num_workers=1 reward.num_workers=1
    trainer.v1.sampler.custom_sampler.name=Sampler
    +trainer.v1.sampler.sampler_kwargs.train=${actor_rollout_ref.rollout.n}
    +trainer.v1.sampler.sampler_kwargs.val=${actor_rollout_ref.rollout.val_kwargs.n}
    trainer.device=cpu trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.total_epochs=1000
    trainer.logger=[console,file] trainer.project_name=seatrial trainer.experiment_name=cpu
    ray_kwargs.ray_init.num_cpus=12 +ray_kwargs.ray_init.num_gpus=1 +ray_kwargs.ray_init.object_store_memory=200000000
    +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init._node_ip_address=127.0.0.1
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1
    """.split(),  # noqa: SIM905 - one override per word is easier to read
    *(f"actor_rollout_ref.actor.strategy={STRATEGY}", f"critic.strategy={STRATEGY}", f"actor_rollout_ref.rollout.name={ROLLOUT}"),
    *(f"+{part}.{EXACT}" for part in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")),
)
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.optim.lr=1e-3")
PPO = ("algorithm.adv_estimator=gae", "critic.optim.lr=1e-3")
# verl 0.9.1 fails with adapters, a critic and a reference together: the call for the reference's log-probabilities leaves
# `no_lora_adapter` in the batch, and the critic has no adapter to switch off. So there is no reference beside adapters here.
LORA = (
    *("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"),
    *("actor_rollout_ref.actor.use_kl_loss=False", "actor_rollout_ref.actor.optim.lr=1e-2"),
)
SCHEDULE = ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "critic.optim.lr_scheduler_type=cosine")
LEARN = ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.optim.lr=3e-3", "actor_rollout_ref.rollout.val_kwargs.temperature=1.0")
NO_SAVE = ("trainer.save_freq=-1", "trainer.resume_mode=disable")
NO_TEST = ("trainer.val_before_train=False", "trainer.test_freq=-1")

OWNED = (
    *("actor_rollout_ref.model.", "actor_rollout_ref.ref.", "actor_rollout_ref.rollout.", "critic.", "data.", "hydra.", "ray_kwargs."),
    *("reward.", "trainer.", "transfer_queue.", "algorithm.adv_estimator", "actor_rollout_ref.actor.strategy"),
    *(
        f"actor_rollout_ref.actor.{name}"
        for name in ("checkpoint", "fsdp_config", "optim", "ppo_epochs", "ppo_mini_batch_size", "use_kl_loss")
    ),
)
"""Beginnings of keys that the proofs rest on; the algorithm's own settings are free."""


def levels(ladder: Sequence[Level], options: Mapping[str, str]) -> tuple[Level, ...]:
    """The ladder, with the asked number of steps for level 5."""
    steps = number(options, "steps", LEARNING_STEPS[0], *LEARNING_STEPS)
    return tuple(level.model_copy(update={"steps": steps} if level.name == "learning" else {}) for level in ladder)


def phases(level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
    """The processes of one level."""
    make = _Maker(context, directory)
    steps = level.steps or 0
    if level.name == "smoke":
        return (
            make.phase("grpo", steps, (*GRPO, *NO_SAVE, *NO_TEST)),
            make.phase("ppo", steps, (*PPO, *LORA, *NO_SAVE, *NO_TEST)),
        )
    if level.name == "save-resume":
        saving = (*GRPO, *PPO, *SCHEDULE, *NO_TEST, f"trainer.save_freq={steps // 2}")
        place = directory / "full" / "checkpoints" / f"global_step_{steps // 2}"
        return (
            make.phase("full", steps, (*saving, "trainer.resume_mode=disable")),
            make.phase("resumed", steps, (*saving, "trainer.resume_mode=resume_path"), ("--resume-from", str(place))),
        )
    if level.name == "learning":
        learn = (*GRPO, *LEARN, *NO_SAVE, "trainer.val_before_train=True")
        idle = ("actor_rollout_ref.actor.optim.lr=0", f"trainer.test_freq={CONTROL_STEPS}")
        return (
            make.phase("control", CONTROL_STEPS, (*learn, *idle), ("--signal",)),
            make.phase("learn", steps, (*learn, f"trainer.test_freq={steps}"), ("--signal", "--control", str(directory / "control"))),
        )
    raise AssertionError(f"level {level.number} has no phases")


class _Maker:
    """Builds the phases of one level."""

    def __init__(self, context: Context, directory: Path) -> None:
        self.context, self.directory = context, directory

    def phase(self, name: str, steps: int, overrides: tuple[str, ...], options: tuple[str, ...] = ()) -> Phase:
        """One call of the driver."""
        context, out = self.context, self.directory / name
        fixed = ("--out", str(out), "--model", context.model, "--models", str(context.run_dir / "models"), *options)
        last = (*COMMON, *overrides, f"trainer.total_training_steps={steps}", *context.arguments)
        return Phase(
            name=name,
            argv=(str(context.python), "-m", f"{DRIVE}.train", *fixed, "--", *last),
            env=self._environment(out),
            steps=steps,
            processes=("driver", "worker"),
        )

    def _environment(self, out: Path) -> dict[str, str]:
        fault = self.context.options.get("fault")
        return {
            **witness_variables(self.context, self.directory, PLUGINS),
            "SEATRIAL_FACTS": str(out / "facts.jsonl"),
            "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
            **({"SEATRIAL_FAULT": str(fault)} if fault else {}),
            **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"},
            **{"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "0"},
            **{"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"},
        }


def findings(context: Context) -> tuple[Finding, ...]:
    """A given model must be a local directory with weights; an override must not touch what the proofs rest on."""
    made = [_argument(word) for word in context.arguments]
    if context.model == DEFAULT_MODEL:
        return (*filter(None, made), _finding("model", True, Boundary.DATA, f"{DEFAULT_MODEL} is made locally"))
    path = Path(context.model)
    ok = (path / "config.json").is_file() and any(path.glob("*.safetensors")) and (path / "tokenizer_config.json").is_file()
    message = (
        f"{path}: model, tokenizer and weights are there" if ok else f"{path}: no directory with config.json, tokenizer and *.safetensors"
    )
    return (*filter(None, made), _finding("model", ok, Boundary.DATA, message, "" if ok else f"--model {DEFAULT_MODEL}"))


def _argument(word: str) -> Finding | None:
    key = word.lstrip("+~").partition("=")[0]
    if "=" not in word or word.startswith("-"):
        return _finding("arguments", False, Boundary.CONFIG, f"{word!r} is no Hydra override", "write KEY=VALUE")
    if key.startswith(OWNED):
        return _finding("arguments", False, Boundary.CONFIG, f"{key} is set by the level: its proofs rest on it", f"leave {key} out")
    return None


def _finding(name: str, ok: bool, boundary: Boundary, message: str, fix: str = "") -> Finding:
    return Finding(name=name, ok=ok, boundary=boundary, message=message, fix=fix)


def limitations(level: Level, context: Context) -> tuple[str, ...]:  # noqa: ARG001 - the contract
    """What holds of every level on a CPU."""
    made = [
        f"the engine was {STRATEGY.upper()} with one process on a CPU in full precision: not Megatron, no sharding across ranks",
        "a transformers model in its own process generated: neither vLLM nor SGLang",
        "rewards came from a rule: no reward model was served",
    ]
    if context.model == DEFAULT_MODEL:
        made.append("a tiny Qwen2 with random weights: not the model under test")
    return tuple(made)
