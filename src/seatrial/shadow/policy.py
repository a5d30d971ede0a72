"""The independent forward pass: a pinned transformers release in fp64 or fp32, with weights that the record gives.

Adapters are applied by their formula, not by PEFT: the weight of an adapted layer becomes W + scale * B A (DoRA: its columns scaled
to the learned magnitude), and gradients flow back to A and B.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from seatrial.instruments.batch_record import layer_norms
from seatrial.shadow.settings import Lora

Tensor = Any
Layout = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor] | None]


class UnknownArchitectureError(Exception):
    """The release has no such model: there is nothing to compare a forward pass with."""


class Policy:
    """A model of the pinned release, without weights of its own."""

    def __init__(self, path: Path, dtype: Any, lora: Lora | None, critic: bool = False, layout: Layout | None = None) -> None:
        from transformers import (
            CONFIG_MAPPING,
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoModelForTokenClassification,
            __version__,
        )
        from transformers.pytorch_utils import Conv1D

        kind = json.loads((path / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind not in CONFIG_MAPPING:
            raise UnknownArchitectureError(f"transformers {__version__} does not know the architecture {kind!r}")
        config = AutoConfig.from_pretrained(path, **({"num_labels": 1, "classifier_dropout": 0.0} if critic else {}))
        text = config.get_text_config()
        self.has_router = hasattr(text, "output_router_logits")
        how = {"attn_implementation": "sdpa"}  # eager attention gives NaN for padding in fp64
        if self.has_router:
            how["experts_implementation"] = "eager"  # the grouped product knows no fp64
        written = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        made = AutoModelForTokenClassification if critic else written
        self.model = made.from_pretrained(path, dtype=dtype, config=config, **how).eval()
        self.head = tuple(name for name, _ in self.model.named_parameters() if critic and not name.startswith(self.model.base_model_prefix))
        """Parameters that no file holds: a critic's head is new."""
        self.model.requires_grad_(False)
        self.transposed = Conv1D
        self.turned = {name for name, module in self.model.named_modules() if isinstance(module, Conv1D)}
        if layout is not None:
            # An engine of its own trains the row of the padding token where one was sampled; transformers leaves that row out.
            self.model.get_input_embeddings().padding_idx = None
        self.dtype, self.lora, self.config, self.layout = dtype, lora, config, layout
        self.router_coef = float(getattr(text, "router_aux_loss_coef", 0.0)) if self.has_router else 0.0

    def files(self) -> dict[str, Tensor]:
        """The weights of the files, by the release's own names."""
        return {name: value.detach() for name, value in self.model.named_parameters() if name not in self.head}

    def linear_layers(self) -> list[str]:
        """Names of the layers that `all-linear` means: every linear layer but the head, transposed ones (GPT-2) among them."""
        head = self.model.get_output_embeddings()
        kinds = (torch.nn.Linear, self.transposed)
        linear = (name for name, module in self.model.named_modules() if isinstance(module, kinds) and module is not head)
        return [name for name in linear if f"{name}.weight" not in self.head]

    def norms(self) -> set[str]:
        """Parameters of torch's own layer norms."""
        return set(layer_norms(self.model))

    def dropout(self) -> str:
        """The first setting that makes the model's forward pass random while it trains; none: empty."""
        config = self.config.get_text_config()
        rates = {name: value for name, value in config.to_dict().items() if name.endswith(("dropout", "pdrop", "dropout_prob"))}
        return next((f"{name} {value}" for name, value in rates.items() if isinstance(value, float) and value > 0), "")

    def renamed(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Recorded tensors by the release's names; a layout that does not know one of them is a defect of ours."""
        made = weights if self.layout is None else self.layout(weights)
        if made is None:
            raise NotImplementedError("the layout of the model's tensors is not known")
        return dict(made)

    def arguments(self, weights: Mapping[str, Tensor], adapted: bool = True) -> dict[str, Tensor]:
        """The release's parameters from recorded ones: same names, or PEFT's, merged by the formula. A head may lack its bias."""
        weights = self.renamed(weights)
        named = dict(self.model.named_parameters()) if self.head else {}
        absent = {name: torch.zeros_like(named[name]) for name in self.head if name.endswith(".bias") and name not in weights}
        if self.lora is None:
            return {**weights, **absent}
        made, deltas = dict(absent), dict[str, dict[str, Tensor]]()
        for name, value in weights.items():
            plain = name.removeprefix("base_model.model.")
            layer, _, rest = plain.partition(".lora_")
            if rest:
                deltas.setdefault(layer, {})[rest.split(".")[0]] = value
            else:
                made[plain.replace(".base_layer.", ".")] = value
        for layer, parts in deltas.items() if adapted else ():
            delta = self.lora.scale() * parts["B"] @ parts["A"]
            merged = made[f"{layer}.weight"] + (delta.T if layer in self.turned else delta)
            if "magnitude_vector" in parts:
                norm = merged.detach().norm(dim=1, keepdim=True)
                merged = parts["magnitude_vector"].unsqueeze(1) * merged / norm
            made[f"{layer}.weight"] = merged
        return made

    def forward(self, weights: Mapping[str, Tensor], ids: Tensor, mask: Tensor, positions: Tensor | None = None, **extra: Any) -> Any:
        """The model's output, with logits in this policy's precision."""
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": False, **extra}
        if positions is not None:
            given["position_ids"] = positions
        return torch.func.functional_call(self.model, dict(weights), args=(), kwargs=given)


def completion_terms(output: Any, ids: Tensor, width: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the last `width` tokens, at a temperature."""
    logits = output.logits[:, -width - 1 : -1] / temperature
    table = torch.log_softmax(logits, -1)
    logps = table.gather(-1, ids[:, -width:].unsqueeze(-1)).squeeze(-1)
    return logps, -(table.exp() * table).sum(-1)


def token_values(output: Any, width: int) -> Tensor:
    """What a critic expects before each of the last `width` tokens."""
    return output.logits[:, -width - 1 : -1, 0]
