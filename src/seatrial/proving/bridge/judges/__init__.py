"""The judge of every rung."""

from __future__ import annotations

from seatrial.proving.bridge.judgement import Judge
from seatrial.proving.bridge.judges import loop, numbers, training, weights

JUDGES: dict[str, Judge] = {
    "build": weights.judge_build,
    "import": weights.judge_import,
    "roundtrip": weights.judge_roundtrip,
    "reload": weights.judge_reload,
    "mapping": weights.judge_mapping,
    "order": weights.judge_order,
    "parity": numbers.judge_parity,
    **dict.fromkeys(("tp", "pp", "ep", "cp", "sp"), numbers.judge_parallel),
    "optimizer": training.judge_optimizer,
    "checkpoint": training.judge_checkpoint,
    "lora": training.judge_lora,
    "policy": training.judge_policy,
    "loop": loop.judge_loop,
}
