#!/bin/bash
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
source $SCRIPT_DIR/prelude.env

must_have() { grep -q "$1" "$2" || { echo "[FAIL] no '$1' in $2"; exit 1; }; }

quantized() {
    local name=$1 quant_cfg=$2 kl=$3 error=$4
    local where="$EXP_DIR/$name" real=()
    shift 4
    [[ "$name" == *real* ]] && real+=(++policy.generation.real_quant=true)
    mkdir -p "$where/logs" "${NRL_MEGATRON_CHECKPOINT_DIR:-$PROJECT_ROOT/.cache}/$name"
    NRL_MEGATRON_CHECKPOINT_DIR="${NRL_MEGATRON_CHECKPOINT_DIR:-$PROJECT_ROOT/.cache}/$name" uv run --no-sync --extra modelopt --group test \
        coverage run -a --data-file="$PROJECT_ROOT/tests/.coverage" --source="$PROJECT_ROOT/nemo_rl" \
        "$PROJECT_ROOT/examples/run_grpo.py" \
        --config "$PROJECT_ROOT/examples/modelopt/qa_grpo_math_megatron.yaml" \
        policy.model_name=Qwen/Qwen2.5-0.5B policy.tokenizer.name=Qwen/Qwen2.5-0.5B \
        policy.quant_cfg=$quant_cfg policy.generation.quant_cfg=$quant_cfg \
        policy.quant_calib_size=4 policy.quant_batch_size=1 policy.quant_sequence_length=128 \
        $SMALL policy.logprob_batch_size=4 policy.generation.max_new_tokens=128 policy.generation.vllm_cfg.max_model_len=256 \
        policy.max_total_sequence_length=256 policy.generation.vllm_cfg.gpu_memory_utilization=0.5 policy.generation.vllm_cfg.enforce_eager=true \
        grpo.max_num_steps=1 grpo.val_period=1 grpo.max_val_samples=8 grpo.val_batch_size=8 env.math.num_workers=2 cluster.gpus_per_node=2 \
        $LOGGED logger.log_dir="$where/logs" checkpointing.enabled=false \
        "${real[@]}" "$@" \
        2>&1 | tee "$where/run.log"
    uv run --no-sync --extra modelopt --group test tests/json_dump_tb_logs.py "$where/logs" --output_path "$where/metrics.json"
    uv run --no-sync --extra modelopt --group test tests/check_metrics.py "$where/metrics.json" \
        "data[\"train/gen_kl_error\"][\"1\"] < $kl" \
        "max(data[\"train/token_mult_prob_error\"]) < $error"
    must_have "Vllm.*Worker" "$where/run.log"
}

quantized w4a16_real_quant examples/modelopt/quant_configs/nvfp4_a16_mlp_only.yaml 0.003 1.05 "$@"
quantized w4a8_fake_quant examples/modelopt/quant_configs/nvfp4_w4a8_fp8.yaml 0.02 1.15 "$@"
