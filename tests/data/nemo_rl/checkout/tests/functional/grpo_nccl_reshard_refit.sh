#!/bin/bash
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
source $SCRIPT_DIR/prelude.env

$COVERED $PROJECT_ROOT/examples/run_grpo.py \
    --config $PROJECT_ROOT/examples/configs/grpo_math_1B_megatron.yaml \
    policy.model_name=Qwen/Qwen3-0.6B \
    $SMALL policy.logprob_batch_size=1 policy.max_total_sequence_length=512 \
    policy.megatron_cfg.enabled=true policy.megatron_cfg.tensor_model_parallel_size=1 \
    policy.megatron_cfg.pipeline_model_parallel_size=1 policy.dtensor_cfg.enabled=false \
    policy.generation.backend=vllm policy.generation.colocated.enabled=false \
    policy.generation.colocated.resources.num_nodes=1 policy.generation.colocated.resources.gpus_per_node=1 \
    policy.generation.vllm_cfg.tensor_parallel_size=1 policy.generation.vllm_cfg.async_engine=true \
    policy.generation.refit_transport=nccl_reshard \
    cluster.num_nodes=1 cluster.gpus_per_node=2 grpo.max_num_steps=2 \
    ${LOGGED% *} logger.log_dir=$LOG_DIR checkpointing.enabled=false \
    $@ \
    2>&1 | tee $RUN_LOG

uv run tests/json_dump_tb_logs.py $LOG_DIR --output_path $JSON_METRICS

uv run tests/check_metrics.py $JSON_METRICS \
    'max(data["train/token_mult_prob_error"]) < 1.05'
