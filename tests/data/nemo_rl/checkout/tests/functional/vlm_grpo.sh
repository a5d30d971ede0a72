#!/bin/bash
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
source $SCRIPT_DIR/prelude.env

uv run $PROJECT_ROOT/examples/run_vlm_grpo.py \
    policy.model_name=Qwen/Qwen2.5-VL-3B-Instruct \
    $SMALL cluster.gpus_per_node=2 grpo.max_num_steps=5 \
    $LOGGED logger.log_dir=$LOG_DIR checkpointing.enabled=false \
    $@ \
    2>&1 | tee $RUN_LOG

uv run tests/json_dump_tb_logs.py $LOG_DIR --output_path $JSON_METRICS

uv run tests/check_metrics.py $JSON_METRICS \
    'max(data["train/token_mult_prob_error"]) < 1.05' \
    'median(data["train/token_mult_prob_error"]) < 1.05'
