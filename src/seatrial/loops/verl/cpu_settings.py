"""Hydra overrides of verl's CPU runs, and what each phase claims of the configuration in force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROLLOUT = "seatrial"
RANK = 4
"""Of every adapter."""
_ALWAYS: dict[str, Any] = {
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
    "actor_rollout_ref.rollout.name": ROLLOUT,
    # The generation server starts from random weights: it can only hold what was synchronised.
    "actor_rollout_ref.rollout.load_format": "dummy",
    "reward.reward_model.enable": False,
}
_FSDP2_CLAIMS: dict[str, Any] = {"model_engine": "dp", "actor_rollout_ref.actor.strategy": "fsdp2", "critic.strategy": "fsdp2"}
_MEGATRON_CLAIMS: dict[str, Any] = {
    "model_engine": "megatron",
    "actor_rollout_ref.actor.strategy": "megatron",
    "critic.strategy": "megatron",
    "actor_rollout_ref.model.lora.merge": False,
    **{
        f"{part}.megatron.{key}": value
        for part in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
        for key, value in {
            "use_mbridge": True,
            "vanilla_mbridge": False,
            "use_megatron_fsdp": False,
            "use_distributed_optimizer": True,
            "dtype": "bfloat16",
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
        }.items()
    },
}
_GRPO_CLAIMS: dict[str, Any] = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.use_kl_loss": True}
_PPO_CLAIMS: dict[str, Any] = {"algorithm.adv_estimator": "gae"}
_NO_KL: dict[str, Any] = {"actor_rollout_ref.actor.use_kl_loss": False}
_BY_PHASE: dict[str, dict[str, Any]] = {
    "grpo": _GRPO_CLAIMS,
    "ppo": _PPO_CLAIMS | _NO_KL,
    "full": _PPO_CLAIMS | {"trainer.resume_mode": "disable"},
    "resumed": _PPO_CLAIMS | {"trainer.resume_mode": "resume_path"},
    "learn": _GRPO_CLAIMS,
    "control": _GRPO_CLAIMS | {"actor_rollout_ref.actor.optim.lr": 0},
}
_SAVING = ("full", "resumed")


def phase_claims(strategy: str, phase: str, steps: int) -> dict[str, Any]:
    own = _megatron(phase) if strategy == "megatron" else _fsdp2(phase)
    return _ALWAYS | own | _BY_PHASE[phase] | {"trainer.total_training_steps": steps}


def _fsdp2(phase: str) -> dict[str, Any]:
    made: dict[str, Any] = _FSDP2_CLAIMS | {"actor_rollout_ref.model.lora_rank": RANK if phase == "ppo" else 0}
    if phase in _SAVING:
        made |= {f"{part}.optim.lr_scheduler_type": "cosine" for part in ("actor_rollout_ref.actor", "critic")}
        made["actor_rollout_ref.actor.use_kl_loss"] = True
    return made


def _megatron(phase: str) -> dict[str, Any]:
    made: dict[str, Any] = _MEGATRON_CLAIMS | {"actor_rollout_ref.model.lora.rank": RANK if phase in ("ppo", *_SAVING) else 0}
    made["critic.model.lora.rank"] = RANK if phase == "ppo" else 0
    if phase in _SAVING:
        for part in ("actor_rollout_ref.actor.optim", "critic.optim"):
            made |= {f"{part}.lr_decay_style": "cosine", f"{part}.use_checkpoint_opt_param_scheduler": True}
        made |= _NO_KL
    return made


MEGATRON, FSDP2 = "megatron", "fsdp2"
STRATEGIES = (MEGATRON, FSDP2)
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
# verl cuts a batch into whole micro batches only: 32 rows are the smallest batch of any level.
# Ray counts CPUs and a GPU that are only numbers: each of verl's processes asks for some, and would wait for them forever.
_COMMON = (
    *"""
    data.train_batch_size=8 data.max_prompt_length=256 data.max_response_length=8 data.truncation=error data.seed=42
    data.dataloader_num_workers=0 data.filter_overlong_prompts=False
    actor_rollout_ref.model.use_remove_padding=False critic.model.use_remove_padding=False
    actor_rollout_ref.model.enable_gradient_checkpointing=False critic.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.kl_loss_coef=0.001
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
    f"actor_rollout_ref.rollout.name={ROLLOUT}",
)
_EXACT = "mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
"""In full precision the log-probabilities of trainer and generator agree to rounding, so that a stale weight is seen."""
_FSDP2 = (
    *(
        f"{ACTOR}.strategy={FSDP2}",
        f"critic.strategy={FSDP2}",
        f"{ACTOR}.use_torch_compile=False",
        "actor_rollout_ref.rollout.dtype=float32",
    ),
    *(f"+{part}.override_config.attn_implementation=sdpa" for part in (MODEL, "critic.model")),
    *(f"+{part}.{_EXACT}" for part in (f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")),
)
# Megatron's fused softmax is a CUDA kernel. The rest is what verl's own wrapper sets on GPUs.
_MEGATRON = (
    *("model_engine=megatron", "actor_rollout_ref.rollout.dtype=bfloat16"),
    *(f"{part}.megatron.use_mbridge=True" for part in (ACTOR, "actor_rollout_ref.ref", "critic")),
    *(f"{part}.megatron.vanilla_mbridge=False" for part in (ACTOR, "actor_rollout_ref.ref", "critic")),
    *(f"+{part}.megatron.override_transformer_config.masked_softmax_fusion=False" for part in (ACTOR, "critic")),
)
# By default verl saves the schedule of a Megatron run and does not load it.
_DECAY = ("lr_decay_style=cosine", "use_checkpoint_opt_param_scheduler=True")
GRPO = ("algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=True")
PPO = ("algorithm.adv_estimator=gae",)
NO_KL = (f"{ACTOR}.use_kl_loss=False",)
NO_SAVE = ("trainer.save_freq=-1", "trainer.resume_mode=disable")
NO_TEST = ("trainer.val_before_train=False", "trainer.test_freq=-1")
UPDATES = 4
"""Optimizer steps of one round of a recorded run: two mini-batches, twice."""
RECORDED = ("--prompts", "20")
"""Prompts for two rounds and a rest that is left out: a third round begins the second epoch."""
_PROVING = (
    *("actor_rollout_ref.rollout.temperature=0.8", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=8"),
    # The V1 trainer of verl 0.9.1 does not read the critic's micro-batch size: it cuts by tokens, up to this many.
    *("+critic.ppo_infer_max_token_len_per_gpu=300", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.entropy_coeff=0.01"),
    *(f"{ACTOR}.clip_ratio_low=0.05", f"{ACTOR}.clip_ratio_high=0.08", f"{ACTOR}.clip_ratio_c=1.1"),
    *("algorithm.gamma=0.95", "algorithm.lam=0.9", "critic.cliprange_value=0.05"),
    *(f"{part}.optim.{word}" for part in (ACTOR, "critic") for word in ("weight_decay=0.1", "lr_warmup_steps=2", "clip_grad=0.3")),
)
"""Settings under which faults show: none of them is the value that makes its formula have no effect."""
_PROVING_FSDP2 = tuple(
    f"{part}.optim.{word}"
    for part in (ACTOR, "critic")
    for word in ("betas=[0.8,0.95]", "lr_scheduler_type=cosine", "min_lr_ratio=0.1", "zero_indexed_step=False")
)
_PROVING_MEGATRON = (
    "actor_rollout_ref.rollout.dtype=float32",  # as the engines of a recorded run: see `instruments/verl/megatron_engine.py`
    *(f"{part}.optim.{word}" for part in (ACTOR, "critic") for word in ("lr_decay_style=cosine", "lr_warmup_init=2e-3", "min_lr=1e-3")),
    *(
        f"+{part}.optim.override_optimizer_config.{word}"
        for part in (ACTOR, "critic")
        for word in ("adam_beta1=0.8", "adam_beta2=0.95", "adam_eps=1e-7")
    ),
)
GRPO_LOSS = (f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean")
LEARN = ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.val_kwargs.temperature=1.0")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    common: tuple[str, ...]
    actor_lora: tuple[str, ...]
    critic_lora: tuple[str, ...]
    schedule: tuple[str, ...]
    """A learning rate that depends on the step, so that a wrong step shows after a resume."""
    rate: str
    """Of full weights."""
    lora_rate: str
    learning_rate: str
    engine: str
    """The module in `instruments/verl` that registers the engines."""
    proving: tuple[str, ...] = ()
    """Of a recorded run; empty where none is recorded."""

    def rates(self, actor: str) -> tuple[str, ...]:
        """Learning rates; the critic's is that of full weights, whatever the actor's."""
        return (f"{ACTOR}.optim.lr={actor}", f"critic.optim.lr={self.rate}")


_AT = f"rank={RANK}"
SETTINGS = {
    FSDP2: EngineSettings(
        common=(*_COMMON, *_FSDP2),
        actor_lora=(f"{MODEL}.lora_{_AT}", f"{MODEL}.lora_alpha={2 * RANK}"),
        critic_lora=(),
        schedule=tuple(f"{part}.optim.lr_scheduler_type=cosine" for part in (ACTOR, "critic")),
        rate="1e-3",
        lora_rate="1e-2",
        learning_rate="3e-3",
        engine="fsdp_engine",
        proving=(*_PROVING, *_PROVING_FSDP2),
    ),
    MEGATRON: EngineSettings(
        common=(*_COMMON, *_MEGATRON),
        actor_lora=(f"{MODEL}.lora.{_AT}", f"{MODEL}.lora.alpha={2 * RANK}", f"{MODEL}.lora.merge=False"),
        critic_lora=(f"critic.model.lora.{_AT}", f"critic.model.lora.alpha={2 * RANK}"),
        schedule=tuple(f"{part}.optim.{word}" for part in (ACTOR, "critic") for word in _DECAY),
        rate="1e-2",  # a norm's weight of 1 moves in bf16 when it moves by 0.004 or more
        lora_rate="1e-2",
        learning_rate="3e-3",
        engine="megatron_engine",
        proving=(*_PROVING, *_PROVING_MEGATRON),
    ),
}
