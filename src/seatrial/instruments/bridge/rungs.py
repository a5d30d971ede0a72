"""The rungs of the conformance ladder in order, what a rung's process gets (`Rank`, `BridgeSession`), and the models made for it.

- The checkout under test builds, imports, runs and exports the model; set here are sizes, precision and the fusions that need CUDA
  kernels. Every rank calls every function: exports and gathered logits are whole on each of them.
- `FAMILIES` has every architecture that the Bridge is known to support: how to make a tiny checkpoint, or `needs`, the part without which
  the family cannot run here. Sizes make mistakes visible: vocabulary, rotary base, norm epsilon and head size differ from every default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from seatrial.instruments import facts
from seatrial.instruments.engines import tiny_models
from seatrial.instruments.megatron import shims


@dataclass(frozen=True)
class Rung:
    title: str
    run: str
    """`module:function`, below this package."""
    ranks: int = 1
    minutes: float = 5


TABLE: dict[str, Rung] = {
    "build": Rung("provider builds from the configuration", "rungs_weights:run_build"),
    "import": Rung("HF weights reach every parameter", "rungs_weights:run_import"),
    "roundtrip": Rung("export is the checkpoint, bit for bit", "rungs_weights:run_roundtrip"),
    "reload": Rung("saved checkpoint reloads in transformers", "rungs_weights:run_reload"),
    "mapping": Rung("every name is mapped exactly once", "rungs_weights:run_mapping"),
    "order": Rung("refit export has the names and order that vLLM expects", "rungs_weights:run_order"),
    "parity": Rung("logits are transformers' logits", "rungs_numbers:run_parity"),
    "tp": Rung("tensor parallel, 2 ranks", "rungs_numbers:run_parallel", ranks=2),
    "pp": Rung("pipeline parallel, 2 ranks", "rungs_numbers:run_parallel", ranks=2),
    "ep": Rung("expert parallel, 2 ranks", "rungs_numbers:run_parallel", ranks=2),
    "cp": Rung("context parallel, 2 ranks", "rungs_numbers:run_parallel", ranks=2),
    "sp": Rung("sequence parallel, 2 ranks", "rungs_numbers:run_parallel", ranks=2),
    "optimizer": Rung("DDP and distributed optimizer step like a plain one", "rungs_training:run_optimizer", ranks=2),
    "checkpoint": Rung("distributed checkpoint and resume, bit for bit", "rungs_training:run_checkpoint"),
    "lora": Rung("LoRA adapters", "rungs_training:run_lora"),
    "policy": Rung("policy-gradient steps agree with transformers", "rungs_training:run_policy"),
    "loop": Rung("closed loop: generate, reward, step, export, refit", "rungs_loop:run_loop", minutes=15),
}


SEED = 11
FUSIONS = (
    *("persist_layer_norm", "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("apply_rope_fusion", "cross_entropy_loss_fusion", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"),
)
UNFUSED = {**dict.fromkeys(FUSIONS, False), "use_cpu_initialization": True, "transformer_impl": "local"}
"""Settings of a provider that are CUDA kernels."""


@dataclass(frozen=True)
class Sizes:
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    sp: bool = False


ALONE = Sizes()


class BridgeSession:
    """One model on one rank. `torch.distributed` must be up."""

    def __init__(self, directory: Path, device: str = "cpu", dtype: str = "float32") -> None:
        from megatron.bridge import AutoBridge

        self.directory, self.device, self.dtype = directory, device, dtype
        self.bridge = AutoBridge.from_hf_pretrained(str(directory), torch_dtype=self.torch_dtype(), local_files_only=True)
        if not _transformer_engine():
            shims.add(self.bridge)

    def torch_dtype(self) -> Any:
        import torch

        return getattr(torch, self.dtype)

    def provider(self, sizes: Sizes = ALONE, load: bool = True, **settings: Any) -> Any:
        """The provider that the Bridge makes of the HF configuration, ready to build; `settings` are set on it."""
        provider = self.bridge.to_megatron_provider(load_weights=load)
        half = self.dtype != "float32"
        named = {
            "tensor_model_parallel_size": sizes.tp,
            "pipeline_model_parallel_size": sizes.pp,
            "context_parallel_size": sizes.cp,
            "expert_model_parallel_size": sizes.ep,
            "sequence_parallel": sizes.sp,
            "params_dtype": self.torch_dtype(),
            "pipeline_dtype": self.torch_dtype(),
            "bf16": self.dtype == "bfloat16",
            "fp16": self.dtype == "float16",
            "autocast_dtype": self.torch_dtype() if half else None,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            # As training/setup.py has it in a real run, where ranks cannot share the vocabulary otherwise.
            "should_pad_vocab": bool(provider.vocab_size % sizes.tp),
            **(UNFUSED if not _transformer_engine() else {}),
            **settings,
        }
        for name, value in named.items():
            if hasattr(provider, name):
                setattr(provider, name, value)
        provider.finalize()
        return provider

    def build(self, sizes: Sizes = ALONE, load: bool = True, provider: Any = None, **wrap: Any) -> list[Any]:
        """The model's chunks on this rank, with the HF weights in them; without DDP unless `wrap` asks for it."""
        from megatron.core import parallel_state

        provider = provider or self.provider(sizes, load)
        if not parallel_state.model_parallel_is_initialized():
            provider.initialize_model_parallel(seed=SEED)
        wrap = {"wrap_with_ddp": False, "mixed_precision_wrapper": None, **wrap}
        made: list[Any] = provider.provide_distributed_model(use_cpu_initialization=self.device == "cpu", **wrap)
        return [chunk.to(self.device) for chunk in made] if self.device != "cpu" else made

    def export(self, model: list[Any], **options: Any) -> dict[str, Any]:
        """What the Bridge exports, in its order, as copies. A name that comes twice is an error: one of the two would be lost."""
        made: dict[str, Any] = {}
        for name, value in self.stream(model, **options):
            if name in made:
                raise ValueError(f"{name} was exported twice")
            made[name] = value
        return made

    def stream(self, model: list[Any], **options: Any) -> Iterator[tuple[str, Any]]:
        """The export as it comes: names, and copies of tensors on the CPU."""
        for name, value in self.bridge.export_hf_weights(model, cpu=False, show_progress=False, **options):
            yield name, value.detach().to("cpu", copy=True)

    def hf(self, dtype: str | None = None) -> Any:
        """The same checkpoint in transformers, with its plain attention."""
        import torch
        from transformers import AutoModelForCausalLM

        wanted = getattr(torch, dtype or self.dtype)
        made = AutoModelForCausalLM.from_pretrained(self.directory, dtype=wanted, attn_implementation="eager", local_files_only=True)
        return made.eval().to(self.device)


def _transformer_engine() -> bool:
    import importlib.util

    return importlib.util.find_spec("transformer_engine") is not None


def tokens(vocabulary: int, rows: int = 4, width: int = 16, seed: int = 3) -> Any:
    import torch

    return torch.randint(0, vocabulary, (rows, width), generator=torch.Generator().manual_seed(seed))


def unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


class NotApplicable(Exception):
    """This model has nothing that the rung could ask about; the text says why."""


class Missing(Exception):
    """This machine or environment lacks a part that the rung needs; the text names it exactly."""


@dataclass(frozen=True)
class Rank:
    """One process of a rung."""

    model: str
    """The family, or the name of the directory."""
    rung: str
    directory: Path
    """The HF checkpoint. Nothing is written there."""
    out: Path
    """A directory of this rung alone, shared by its ranks; empty at the start."""
    facts: Path
    device: str
    """`cpu` or `cuda`."""
    rank: int = 0
    world: int = 1
    fault: str | None = None
    options: dict[str, Any] | None = None
    """Of the plan: `steps`, `engine_python` and the like."""

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Rank:
        return cls(**{**fields, **{key: Path(fields[key]) for key in ("directory", "out", "facts")}})

    def write(self, fact: str, **fields: Any) -> None:
        """One fact, by the first rank alone: facts that differ between ranks must be gathered first."""
        if self.rank == 0:
            facts.append(self.facts, {"fact": fact, "model": self.model, "rung": self.rung, "fault": self.fault, **fields})

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"seatrial: {self.model}: {self.rung}: {text}", flush=True)

    def session(self, dtype: str = "float32") -> BridgeSession:
        return BridgeSession(self.directory, self.device, dtype)

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.directory, local_files_only=True).get_text_config()


FAMILY_SEED = 7
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


def ensure_family(name: str, directory: Path) -> Path:
    """The tiny checkpoint of a family, made unless it is there. `Missing` when it cannot run here."""
    if name not in FAMILIES:
        raise ValueError(f"no family {name!r}; known: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if family.needs:
        raise Missing(family.needs)
    return tiny_models.whole(directory, lambda place: _make(family, place))


def family_settings(family: Family) -> dict[str, Any]:
    fixed = {"tie_word_embeddings": family.tied, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    return {**{key: value for key, value in {**SIZES, **family.fields}.items() if value is not None}, **fixed}


def _make(family: Family, directory: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(FAMILY_SEED)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, family.config)(**family_settings(family)), dtype=torch.float32
    )
    if type(model).__name__ != family.architecture:
        raise ValueError(f"{family.config} makes a {type(model).__name__}, not the {family.architecture} of the table of families")
    for value in model.state_dict().values():
        if value.is_floating_point() and value.dim() == 1:
            value.add_(0.1 * torch.randn_like(value))
        elif value.is_floating_point():
            value.normal_(0.0, SPREAD)
    model.save_pretrained(directory)
    tiny_models.tokenizer().save_pretrained(directory)
