"""What the pinned Bridge (0.6.2, with Megatron-Core 0.19.2, transformers 5.17.0 and PEFT 0.21.0) is known not to do, by family and rung.

Everything else must pass. A line that no longer holds fails its test: an upgrade then either mended it, or broke it in another way.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from seatrial.instruments.bridge.rungs import RUNNING, TABLE

DENSE = tuple(name for name, family in RUNNING.items() if not family.moe)
LOOPS = ("qwen2", "qwen3-moe")
"""Those whose closed loop is run here, since it takes longer than all other rungs together; that of llama is run beside its seeded bugs."""
ALL = bool(os.environ.get("SEATRIAL_ALL_LEVELS"))
SHAPES = ("qwen2", "qwen2-odd", "qwen3-moe", "llama")
"""Dense with biases, a vocabulary that needs padding (upstream fails), experts with query and key norms, dense without biases."""
RUNGS = tuple(name for name in TABLE if name != "loop")
TRAINING = ("pp", "optimizer", "checkpoint", "policy")


class Known(NamedTuple):
    """Rungs of one family that fail upstream, and what the failure must name."""

    model: str
    rungs: tuple[str, ...]
    names: str
    why: str


UPSTREAM = (
    Known("qwen2-odd", ("tp", "sp"), "model.embed_tokens.weight: [100, 128]", "padding rows are exported; mended in Megatron-Bridge #5375"),
    Known("gpt-oss", ("tp", "sp"), "Bias in Moe is only supported when ETP==1", "the provider leaves expert tensor parallelism at TP"),
    Known("gpt-oss", TRAINING, "_ReduceFromModelParallelRegion is a view", "megatron/core/transformer/mlp.py adds expert biases in place"),
    Known("gpt-oss", ("lora",), "size of tensor a (256) must match", "the merge of adapters takes expert weights for untransposed ones"),
    Known("olmoe", ("tp", "sp"), "normalized_shape=[128]", "olmoe_provider.py builds q and k norms for the heads of all ranks"),
    Known(
        "minimax-m2", ("sp",), "self_attn.q_norm.weight", "gradients of its norms, which ranks share, are added up, and pass no all-reduce"
    ),
    Known("hy-v3", ("lora",), "shared_experts.down_proj", "PEFT does not rename shared_mlp as transformers does, nor pack its experts"),
    Known("ernie4.5-moe", ("build",), "the provider has rotary_base 500000.0", "ernie_45_bridge.py has a base of its own"),
    Known("ernie4.5-moe", ("parity", "tp", "pp", "ep", "sp"), "the last rotary frequency is", "the same"),
    Known("ernie4.5-moe", ("policy",), "exp|dlogp|", "the same"),
    Known("ernie4.5-moe", ("lora",), "the merged export computes what Megatron computes", "the same"),
    Known(
        "gemma4",
        tuple(name for name in RUNGS if name != "ep"),
        "'head_dim' is a per-layer attribute",
        "gemma4_bridge.py reads what transformers 5.17 refuses to answer",
    ),
)

FAILS = {(known.model, rung): known for known in UPSTREAM for rung in known.rungs}


def tried(model: str) -> bool:
    """Whether a family is climbed in every run of the suite: one of each shape, and one that upstream breaks; the others cost minutes."""
    return model in SHAPES or ALL


def whole(model: str) -> bool:
    """Whether nothing of a family is known to fail."""
    return not any(known.model == model for known in UPSTREAM)


TRIED = tuple(name for name in RUNNING if tried(name))
