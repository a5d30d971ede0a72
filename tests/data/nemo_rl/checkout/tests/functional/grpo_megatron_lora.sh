#!/bin/bash
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
trap "rm -rf /tmp/grpo_megatron_lora_checkpoints" EXIT
source $SCRIPT_DIR/prelude.env

$COVERED $PROJECT_ROOT/examples/run_grpo.py \
    --config $PROJECT_ROOT/examples/configs/grpo_math_1B_megatron.yaml \
    policy.model_name=Qwen/Qwen2.5-0.5B \
    grpo.max_num_steps=3 grpo.num_prompts_per_step=8 grpo.num_generations_per_prompt=4 data.shuffle=false \
    policy.megatron_cfg.peft.enabled=true policy.megatron_cfg.peft.dim=32 \
    policy.train_global_batch_size=32 policy.train_micro_batch_size=1 policy.logprob_batch_size=32 \
    cluster.gpus_per_node=2 \
    $LOGGED logger.log_dir=$LOG_DIR \
    checkpointing.enabled=true checkpointing.save_period=3 checkpointing.checkpoint_dir=/tmp/grpo_megatron_lora_checkpoints \
    $@ \
    2>&1 | tee $RUN_LOG

uv run tests/json_dump_tb_logs.py $LOG_DIR --output_path $JSON_METRICS

uv run tests/check_metrics.py $JSON_METRICS \
    'max(data["train/reward"]) > 0.03' \
    'max(data["train/gen_kl_error"]) < 0.001'
