#!/usr/bin/env bash
# The interface of an example script of verl.
set -xeuo pipefail
LAUNCH=(python3)
if [ "${VERL_USE_UV:-1}" != 0 ]; then
    LAUNCH=(uv run --frozen --all-packages --extra vllm --extra megatron python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    data.image_key=images \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.model.mtp.enable=True \
    actor_rollout_ref.model.mtp.enable_train=True \
    actor_rollout_ref.actor.megatron.use_mbridge=True \
    actor_rollout_ref.actor.megatron.use_megatron_fsdp=False \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size="${ACTOR_TP:-2}" \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="${ACTOR_PP:-2}" \
    actor_rollout_ref.actor.megatron.context_parallel_size="${ACTOR_CP:-1}" \
    actor_rollout_ref.rollout.tensor_model_parallel_size="${ROLLOUT_TP:-2}" \
    reward.reward_model.enable=False \
    trainer.n_gpus_per_node="${NGPUS_PER_NODE:-8}" \
    trainer.nnodes="${NNODES:-1}" \
    model_engine=megatron \
    "$@"
