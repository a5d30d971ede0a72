#!/bin/bash
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
source $SCRIPT_DIR/prelude.env

bash "$PROJECT_ROOT/tools/install_audio_deps.sh"
$COVERED $PROJECT_ROOT/examples/run_vlm_grpo.py \
    --config $PROJECT_ROOT/examples/configs/audio_grpo_3B_megatron.yaml \
    policy.model_name=Qwen/Qwen2.5-Omni-3B \
    $SMALL cluster.gpus_per_node=2 grpo.max_num_steps=2 \
    $LOGGED logger.log_dir=$LOG_DIR checkpointing.enabled=false \
    $@ \
    2>&1 | tee $RUN_LOG

uv run tests/json_dump_tb_logs.py $LOG_DIR --output_path $JSON_METRICS

uv run tests/check_metrics.py $JSON_METRICS \
    'max(data["train/token_mult_prob_error"]) < 1.05' \
    'mean(data["train/token_mult_prob_error"]) < 1.05'
