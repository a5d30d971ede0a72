"""Families of models that the ladder makes itself: tiny, with random weights, downloaded from nowhere.

- `FAMILIES` has every architecture that the Bridge is known to support: how to make a tiny checkpoint, or `needs`, the exact part without
  which the family cannot run here. Nothing is left out silently.
- Sizes make mistakes visible: two KV groups (TP=2), a vocabulary of its own, a rotary base, a norm epsilon and a head size that are
  nobody's default. No weight is a plain 0 or 1.
- Only the configuration is written down; the class that transformers has for it makes the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial.probes.bridge.rank import Missing
from seatrial.probes.engines import tiny_models

SEED = 7
SPREAD = 0.08
"""Standard deviation of matrices: logits far from flat, so that a wrong rotary base or epsilon is far above rounding."""
VOCABULARY = 100
"""The characters of the tokenizer and a few more. Two ranks can share it; those of `qwen2-odd` need padding."""
ODD = 99
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 3e-5,
    "rope_theta": 50000.0,
    "head_dim": 32,
}
"""Heads of 32: vLLM on a CPU has no smaller ones, and four of them are not the hidden size."""
PLAIN: Mapping[str, Any] = {"head_dim": None, "hidden_size": 128}
"""For configurations that have no head size of their own."""
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED: Mapping[str, Any] = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
WINDOW = 5
"""Shorter than any sequence of the rungs: a window that was ignored is seen."""


@dataclass(frozen=True)
class Family:
    """One architecture of the Bridge."""

    architecture: str
    """As `architectures` of config.json has it."""
    config: str = ""
    """The class of transformers."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What differs from SIZES; None leaves a size out."""
    moe: bool = False
    tied: bool = False
    needs: str = ""
    """The part that is missing here; empty for a family that can be made."""


NO_CLASS = "a transformers class: this model is remote code alone, which is never run here"
NO_TINY = "a tiny checkpoint: no vision or audio model is made yet"
EXPERIMENTAL = (
    "Transformer Engine: megatron/core/models/gpt/experimental_attention_variant_module_specs.py builds its attention with nothing else"
)
MLA = (
    "Transformer Engine: megatron/core/transformer/multi_latent_attention.py gives its attention k_channels and v_channels, "
    "which the local megatron/core/transformer/dot_product_attention.py does not take"
)
ZERO_CENTERED = (
    "Transformer Engine or Apex: the family has layernorm_zero_centered_gamma, "
    "which the local megatron/core/transformer/torch_norm.py refuses"
)
MAMBA = "mamba-ssm: megatron/core/ssm/mamba_mixer.py raises without it"


def _te(place: str, what: str) -> str:
    return f"Transformer Engine: megatron/bridge/models/{place} builds {what}"


RUNNING: dict[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", PLAIN, tied=True),
    "qwen2-odd": Family("Qwen2ForCausalLM", "Qwen2Config", {**PLAIN, "vocab_size": ODD}, tied=True),
    "qwen2-untied": Family("Qwen2ForCausalLM", "Qwen2Config", PLAIN),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config"),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True}, moe=True),
    "llama": Family("LlamaForCausalLM", "LlamaConfig"),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {"sliding_window": WINDOW}),
    "gpt-oss": Family(
        "GptOssForCausalLM", "GptOssConfig", {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": WINDOW}, moe=True
    ),
    "hy-v3": Family("HYV3ForCausalLM", "HYV3Config", {**EXPERTS, "num_experts": 4, "first_k_dense_replace": 1}, moe=True),
    "glm4-moe": Family(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {
            **{**ROUTED, "n_group": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1},
            **{"attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 0},
        },
        moe=True,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM", "OlmoeConfig", {**PLAIN, "num_key_value_heads": 4, "num_experts_per_tok": 2, "num_experts": 4}, moe=True
    ),
    "exaone-moe": Family(
        "ExaoneMoeForCausalLM",
        "ExaoneMoeConfig",
        {**PLAIN, **EXPERTS, "num_experts": 4, "num_hidden_layers": 4, "sliding_window": WINDOW},
        moe=True,
    ),
    "minimax-m2": Family("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {"num_experts_per_tok": 2, "num_local_experts": 4}, moe=True),
    "ernie4.5-moe": Family(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {**PLAIN, "moe_intermediate_size": 32, "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1},
        moe=True,
    ),
    "gemma4": Family("Gemma4ForCausalLM", "Gemma4TextConfig", {"vocab_size": 128, "vocab_size_per_layer_input": 128}, tied=True),
}
"""Those that are made. The last two do not pass with Bridge 0.6.2: what it makes of their configuration is not what transformers does."""

STOPPED: dict[str, Family] = {
    "gemma": Family("GemmaForCausalLM", tied=True, needs=ZERO_CENTERED),
    "nemotron": Family("NemotronForCausalLM", needs=ZERO_CENTERED),
    "gemma2": Family("Gemma2ForCausalLM", tied=True, needs=_te("gemma/gemma2_provider.py", "TERowParallelLinearLayerNorm (post-norms)")),
    "gemma3": Family("Gemma3ForCausalLM", tied=True, needs=_te("gemma/gemma3_provider.py", "TENorm and TEDotProductAttention")),
    "exaone4": Family("Exaone4ForCausalLM", needs=_te("exaone/exaone4/exaone4_provider.py", "TERowParallelLinearLayerNorm (post-norms)")),
    "deepseek-v2": Family("DeepseekV2ForCausalLM", moe=True, needs=MLA),
    "deepseek-v3": Family("DeepseekV3ForCausalLM", moe=True, needs=MLA),
    "glm4-moe-lite": Family("Glm4MoeLiteForCausalLM", moe=True, needs=MLA),
    "deepseek-v4": Family("DeepseekV4ForCausalLM", moe=True, needs=EXPERIMENTAL),
    "glm-moe-dsa": Family("GlmMoeDsaForCausalLM", moe=True, needs=EXPERIMENTAL),
    "qwen3-next": Family("Qwen3NextForCausalLM", moe=True, needs=EXPERIMENTAL),
    "qwen3.5": Family("Qwen3_5ForCausalLM", needs=EXPERIMENTAL),
    "qwen3.5-moe": Family("Qwen3_5MoeForCausalLM", moe=True, needs=EXPERIMENTAL),
    "mimo-v2-flash": Family(
        "MiMoV2FlashForCausalLM", moe=True, needs=_te("mimo_v2_flash/modeling_mimo_v2_flash.py", "TEDotProductAttention")
    ),
    "falcon-h1": Family("FalconH1ForCausalLM", needs=_te("falcon_h1/modeling_falconh1/falconh1_layer_specs.py", "TENorm") + "; " + MAMBA),
    "nemotron-h": Family("NemotronHForCausalLM", needs=MAMBA),
    "bailing-moe-v2": Family("BailingMoeV2ForCausalLM", moe=True, needs=NO_CLASS),
    "llama-nemotron": Family("DeciLMForCausalLM", needs=NO_CLASS),
    "exaone-moe-remote": Family("ExaoneMoEForCausalLM", moe=True, needs=NO_CLASS),
    "kimi-k2": Family("KimiK2ForCausalLM", moe=True, needs=NO_CLASS),
    "mimo": Family("MiMoForCausalLM", needs=NO_CLASS),
    "nemotron-diffusion": Family("NemotronLabsDiffusionModel", needs=NO_CLASS),
    "sarvam-mla": Family("SarvamMLAForCausalLM", moe=True, needs=NO_CLASS),
    "sarvam-moe": Family("SarvamMoEForCausalLM", moe=True, needs=NO_CLASS),
    "step3.5": Family("Step3p5ForCausalLM", moe=True, needs=NO_CLASS),
    "kimi-k2.5": Family("KimiK25ForConditionalGeneration", moe=True, needs=NO_CLASS),
    "nemotron-omni": Family("NemotronH_Nano_Omni_Reasoning_V3", needs=NO_CLASS),
    "nemotron-vl": Family("NemotronH_Nano_VL_V2", needs=NO_CLASS),
    "ernie4.5-vl": Family("Ernie4_5_VLMoeForConditionalGeneration", moe=True, needs=NO_TINY),
    "exaone4.5": Family("Exaone4_5_ForConditionalGeneration", needs=NO_TINY),
    "gemma3-vl": Family("Gemma3ForConditionalGeneration", tied=True, needs=NO_TINY),
    "gemma4-vl": Family("Gemma4ForConditionalGeneration", tied=True, needs=NO_TINY),
    "glm4.5v": Family("Glm4vMoeForConditionalGeneration", moe=True, needs=NO_TINY),
    "minimax-m3": Family("MiniMaxM3SparseForConditionalGeneration", moe=True, needs=NO_TINY),
    "mistral3": Family("Mistral3ForConditionalGeneration", needs=NO_TINY),
    "qwen2-audio": Family("Qwen2AudioForConditionalGeneration", needs=NO_TINY),
    "qwen2.5-omni": Family("Qwen2_5OmniForConditionalGeneration", needs=NO_TINY),
    "qwen2.5-vl": Family("Qwen2_5_VLForConditionalGeneration", needs=NO_TINY),
    "qwen3-asr": Family("Qwen3ASRForConditionalGeneration", needs=NO_TINY),
    "qwen3-omni": Family("Qwen3OmniMoeForConditionalGeneration", moe=True, needs=NO_TINY),
    "qwen3-vl": Family("Qwen3VLForConditionalGeneration", needs=NO_TINY),
    "qwen3-vl-moe": Family("Qwen3VLMoeForConditionalGeneration", moe=True, needs=NO_TINY),
    "qwen3.5-vl": Family("Qwen3_5ForConditionalGeneration", needs=NO_TINY),
    "qwen3.5-moe-vl": Family("Qwen3_5MoeForConditionalGeneration", moe=True, needs=NO_TINY),
    "step3.7": Family("Step3p7ForConditionalGeneration", moe=True, needs=NO_TINY),
}
"""Those that cannot run here, and why."""

FAMILIES: dict[str, Family] = {**RUNNING, **STOPPED}


def ensure(name: str, directory: Path) -> Path:
    """The tiny checkpoint of a family, made unless it is there. `Missing` when it cannot run here."""
    if name not in FAMILIES:
        raise ValueError(f"no family {name!r}; known: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if family.needs:
        raise Missing(family.needs)
    return tiny_models.whole(directory, lambda place: _make(family, place))


def of_architecture(architecture: str) -> str | None:
    """The first family that has the architecture."""
    return next((name for name, family in FAMILIES.items() if family.architecture == architecture), None)


def settings(family: Family) -> dict[str, Any]:
    """Arguments of the configuration's class."""
    fixed = {"tie_word_embeddings": family.tied, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return {**{key: value for key, value in {**SIZES, **family.fields}.items() if value is not None}, **fixed}


def _make(family: Family, directory: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family.config)(**settings(family)), dtype=torch.float32)
    if type(model).__name__ != family.architecture:
        raise ValueError(f"{family.config} makes a {type(model).__name__}, not the {family.architecture} of the table of families")
    for value in model.state_dict().values():
        if value.is_floating_point() and value.dim() == 1:
            value.add_(0.1 * torch.randn_like(value))
        elif value.is_floating_point():
            value.normal_(0.0, SPREAD)
    model.save_pretrained(directory)
    tiny_models.tokenizer().save_pretrained(directory)
