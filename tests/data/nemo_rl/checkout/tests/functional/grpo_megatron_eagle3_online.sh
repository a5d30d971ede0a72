#!/bin/bash
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
source $SCRIPT_DIR/prelude.env

POLICY_MODEL=${NRL_EAGLE3_POLICY_MODEL:-Qwen/Qwen3-1.7B}
DRAFT_MODEL=${NRL_EAGLE3_DRAFT_MODEL:-AngelSlim/Qwen3-1.7B_eagle3}
$COVERED $PROJECT_ROOT/examples/run_grpo.py \
    --config $PROJECT_ROOT/examples/configs/recipes/llm/grpo-qwen3-1.7b-1n4g-megatron-eagle3.yaml \
    policy.model_name="$POLICY_MODEL" policy.tokenizer.name="$POLICY_MODEL" policy.draft.model_name="$DRAFT_MODEL" \
    policy.generation.vllm_kwargs.speculative_config.model="$DRAFT_MODEL" \
    grpo.max_num_steps=2 cluster.gpus_per_node=2 \
    $LOGGED logger.log_dir=$LOG_DIR checkpointing.enabled=false \
    $@ \
    2>&1 | tee $RUN_LOG

grep -q "Draft Loss:" "$RUN_LOG"

uv run tests/json_dump_tb_logs.py $LOG_DIR --output_path $JSON_METRICS

uv run tests/check_metrics.py $JSON_METRICS \
    'min(data["train/draft_loss"]) > 0'
