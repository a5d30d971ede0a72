"""Which levels a changed path asks for: rows of the table in the notes on Megatron-Bridge, with paths of its own history."""

from __future__ import annotations

import pytest

from seatrial.loops.nemo_rl.loop import LOOP
from seatrial.trial.globs import matches

BRIDGE = "src/megatron/bridge/"


def asked(path: str) -> set[int]:
    return {level.number for level in LOOP.levels() for glob in level.required_when if matches(path, glob)}


@pytest.mark.parametrize(
    ("path", "levels"),
    [
        (f"{BRIDGE}models/gpt_provider.py", {0}),
        (f"{BRIDGE}models/qwen/qwen3_bridge.py", {0, 1, 2}),
        (f"{BRIDGE}models/conversion/param_mapping.py", {0, 1, 2}),
        (f"{BRIDGE}models/conversion/peft_bridge.py", {0, 1, 2, 6}),
        (f"{BRIDGE}peft/lora.py", {0, 1, 6}),
        (f"{BRIDGE}training/checkpointing.py", {0, 1}),
        (f"{BRIDGE}training/fsdp_compat.py", {0, 1, 4}),
        (f"{BRIDGE}training/optim.py", {0, 1, 6}),
        (f"{BRIDGE}training/config.py", {0}),
        (f"{BRIDGE}training/utils/packed_seq_utils.py", {0, 4}),
        (f"{BRIDGE}models/minimax_m3/minimax_m3_bridge.py", {0, 1, 2, 4}),
        (f"{BRIDGE}models/hy_v3/__init__.py", {0, 4}),
        (f"{BRIDGE}models/glm_moe_dsa/glm5_provider.py", {0, 4}),
        (f"{BRIDGE}models/kimi_vl/kimi_k25_vl_bridge.py", {0, 1, 2, 4, 5}),
        (f"{BRIDGE}models/qwen_vl/modelling_qwen3_vl/rope.py", {0, 5}),
        (f"{BRIDGE}models/conversion/quant_bridge.py", {0, 1, 2, 5}),
        (f"{BRIDGE}inference/text_generation.py", {0, 3}),
        ("3rdparty/Megatron-LM", {0, 1, 2, 4}),
        ("uv.lock", {0, 1, 2, 4}),
        (f"{BRIDGE}recipes/qwen/h100/qwen3_moe.py", set()),
        (f"{BRIDGE}perf_recipes/glm_moe_dsa/gb200/glm5.py", set()),
        (f"{BRIDGE}data/collators/sft.py", set()),
        ("docs/bridge-guide.md", set()),
    ],
)
def test_a_changed_path_asks_for_its_levels(path: str, levels: set[int]) -> None:
    assert asked(path) == levels
