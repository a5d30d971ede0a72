#!/bin/bash
SCRIPT_DIR=$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd)
source $SCRIPT_DIR/prelude.env

train() {
$COVERED $PROJECT_ROOT/examples/run_sft.py \
    policy.model_name=Qwen/Qwen3-0.6B \
    sft.val_period=1 sft.val_batches=2 sft.val_global_batch_size=2 sft.max_num_steps=2 \
    policy.train_global_batch_size=4 policy.train_micro_batch_size=1 \
    cluster.gpus_per_node=1 $LOGGED checkpointing.enabled=false checkpointing.save_period=1 \
    $@
}
one() {
    local name=$1 part=$2 dump=${1// /_}
    shift 2
    if [[ $part == baseline ]]; then dump=baseline; fi
    train logger.log_dir=$LOG_DIR/$part $@ 2>&1 | sed "s/^/[$name] /" | tee $RUN_LOG.${name// /_}
    uv run tests/json_dump_tb_logs.py $LOG_DIR/$part --output_path $EXP_DIR/$dump.json
}
DTENSOR="policy.dtensor_cfg.enabled=true policy.megatron_cfg.enabled=false"
MCORE="policy.dtensor_cfg.enabled=false policy.megatron_cfg.enabled=true"
FIRST="checkpointing.checkpoint_must_save_by=0:0:0:1"

one "baseline 2step" baseline $DTENSOR $@
one "dtensor 1step" dtensor $FIRST checkpointing.enabled=true checkpointing.checkpoint_dir=$EXP_DIR/ckpts/dtensor $DTENSOR $@
one "dtensor 2step" dtensor checkpointing.enabled=true checkpointing.checkpoint_dir=$EXP_DIR/ckpts/dtensor $DTENSOR $@
one "mcore 1step" mcore $FIRST checkpointing.enabled=true checkpointing.checkpoint_dir=$EXP_DIR/ckpts/mcore $MCORE $@
one "mcore 2step" mcore checkpointing.enabled=true checkpointing.checkpoint_dir=$EXP_DIR/ckpts/mcore $MCORE $@

uv run python - <<EOF $EXP_DIR/baseline.json $EXP_DIR/mcore_2step.json
import json, sys
one, two = (json.load(open(name)) for name in sys.argv[1:3])
assert one["train/loss"].keys() == two["train/loss"].keys()
EOF
