"""A model that the Bridge under test builds, imports, runs and exports, in one process of a (possibly parallel) world.

- The checkout under test does everything; what is set here are sizes, precision and the fusions that need CUDA kernels.
- Every rank calls every function: exports and gathered logits are whole on each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.probes.megatron import local_names

SEED = 11
UNFUSED = {
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "use_cpu_initialization": True,
    "transformer_impl": "local",
}
"""Settings of a provider that are CUDA kernels."""


@dataclass(frozen=True)
class Sizes:
    """How many ranks share the model, by kind."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    sp: bool = False


ALONE = Sizes()


class Session:
    """One model on one rank. `torch.distributed` must be up."""

    def __init__(self, directory: Path, device: str = "cpu", dtype: str = "float32") -> None:
        from megatron.bridge import AutoBridge

        self.directory, self.device, self.dtype = directory, device, dtype
        self.bridge = AutoBridge.from_hf_pretrained(str(directory), torch_dtype=self.torch_dtype(), local_files_only=True)
        if not _transformer_engine():
            local_names.add(self.bridge)

    def torch_dtype(self) -> Any:
        """The precision of the weights."""
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
    """Token ids for a forward pass, the same on every rank."""
    import torch

    return torch.randint(0, vocabulary, (rows, width), generator=torch.Generator().manual_seed(seed))


def unwrapped(chunk: Any) -> Any:
    """The model below DDP and precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
