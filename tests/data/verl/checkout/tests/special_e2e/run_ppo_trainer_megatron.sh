#!/usr/bin/env bash
# The interface of verl's Megatron wrapper: its variables and defaults, what it exports, how it starts Python.
set -xeuo pipefail
export PYTHONPATH="/workspace/Megatron-LM${PYTHONPATH:+:${PYTHONPATH}}"
echo "PYTHONPATH=${PYTHONPATH}"
export CUDA_DEVICE_MAX_CONNECTIONS=1

ENGINE=${ENGINE:-vllm}
LAUNCH=(python3)
RAY=(ray_kwargs.ray_init.runtime_env.py_executable=null)
if [ "${VERL_USE_UV:-1}" != 0 ] && [ "${DEVICE:-gpu}" = gpu ]; then
    EXTRAS=(--extra "${ENGINE}" --extra megatron --extra math)
    LAUNCH=(uv run --frozen --all-packages "${EXTRAS[@]}" python3)
    RAY=(ray_kwargs.ray_init.runtime_env.py_executable="uv -v run --frozen --all-packages ${EXTRAS[*]}")
fi

MODEL_ID=${MODEL_ID:-Qwen/Qwen2.5-0.5B}
MODEL_PATH=${MODEL_PATH:-${HOME}/models/${MODEL_ID}}
if [ "${USE_DUMMY_MODEL:-False}" = True ]; then
    "${LAUNCH[@]}" scripts/init_random_model.py --hf_model_path "${MODEL_PATH}" --new_config_path "${DUMMY_MODEL_CONFIG_PATH}" \
        --output_path "${DUMMY_MODEL_PATH}"
    MODEL_PATH=${DUMMY_MODEL_PATH}
fi
LORA_RANK=${LORA_RANK:-0}
TP=${COMMON_TP:-2}
VANILLA_MBRIDGE=${VANILLA_MBRIDGE:-False}
params=(
    algorithm.adv_estimator="${ADV_ESTIMATOR:-gae}"
    data.train_files="${TRAIN_FILES:-${HOME}/data/gsm8k/train.parquet}"
    data.val_files="${VAL_FILES:-${HOME}/data/gsm8k/test.parquet}"
    critic.model.path="${MODEL_PATH}"
    critic.model.lora.rank="${CRITIC_LORA_RANK:-$LORA_RANK}"
    actor_rollout_ref.model.path="${MODEL_PATH}"
    actor_rollout_ref.model.lora.rank="${LORA_RANK}"
    actor_rollout_ref.rollout.name="${ENGINE}"
    actor_rollout_ref.rollout.tensor_model_parallel_size="${INFER_TP:-$TP}"
    reward.reward_model.enable=True
    reward.reward_model.model_path="${RM_MODEL_PATH:-${HOME}/models/reward}"
    trainer.logger=console
    trainer.nnodes=1
    trainer.n_gpus_per_node="${NUM_GPUS:-8}"
    trainer.val_before_train="${VAL_BEFORE_TRAIN:-False}"
    trainer.test_freq="${TEST_FREQ:--1}"
    trainer.save_freq="${SAVE_FREQ:--1}"
    trainer.resume_mode="${RESUME_MODE:-disable}"
    trainer.total_training_steps="${TOTAL_TRAIN_STEPS:-1}"
    global_profiler.steps=[1]
)
for role in actor_rollout_ref.actor actor_rollout_ref.ref critic; do
    params+=(
        $role.megatron.use_mbridge="${USE_MBRIDGE:-True}"
        $role.megatron.vanilla_mbridge="${VANILLA_MBRIDGE}"
        $role.megatron.use_megatron_fsdp="${USE_MEGATRON_FSDP:-False}"
        $role.megatron.tensor_model_parallel_size="${TP}"
        $role.megatron.pipeline_model_parallel_size="${COMMON_PP:-2}"
        $role.megatron.virtual_pipeline_model_parallel_size="${COMMON_VPP:-2}"
        $role.megatron.context_parallel_size="${COMMON_CP:-2}"
        $role.megatron.expert_model_parallel_size="${COMMON_EP:-1}"
        $role.megatron.expert_tensor_parallel_size="${COMMON_ETP:-1}"
        $role.megatron.param_offload="${ALL_OFFLOAD:-True}"
    )
done

device=$("${LAUNCH[@]}" - <<'EOF'
from verl.utils.device import get_device_name
print(get_device_name())
EOF
)
[ "$device" = cuda ] || { echo "Unknown device: $device"; exit 1; }
"${LAUNCH[@]}" -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' "${params[@]}" "${RAY[@]}" $@
