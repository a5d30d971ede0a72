"""A worker extension that makes modules of the live model compute with other weights than their parameters hold. For vllm_cases only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seatrial.instruments.engines.vllm_extension import Extension

_UNDO: list[Callable[[], None]] = []


class Broken(Extension):
    """Ours, and two methods more."""

    def broken_start(self, fault: str) -> None:
        """Break one module; its parameters stay as they are."""
        import torch

        model = self.model_runner.get_model()  # type: ignore[attr-defined]  # mixed into vLLM's worker
        if fault == "embedding-copy":
            copy = model.model.embed_tokens.weight.detach() + 1e-7
            _replace(model.model.embed_tokens.quant_method, "embedding", lambda _, ids: torch.nn.functional.embedding(ids, copy))
        elif fault == "norm-copy":
            norm = model.model.norm
            original = norm._forward_method
            _replace(norm, "_forward_method", lambda *given: _scaled(original(*given)))
        elif fault == "few-rows-copy":
            layer = model.model.layers[0].self_attn.o_proj
            whole = layer.cpu_linear
            _replace(layer, "cpu_linear", lambda x, weight, bias: whole(x, weight, bias) * (1.01 if len(x) < 17 else 1))
        elif fault == "rotary-bit":
            table = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache.view(torch.int32).view(-1)
            table[70] ^= 1
            _UNDO.append(lambda: table[70].bitwise_xor_(1))
        else:
            raise ValueError(fault)

    def broken_end(self) -> None:
        """Put it right."""
        while _UNDO:
            _UNDO.pop()()


def _scaled(answer: Any) -> Any:
    return (answer[0] * 1.001, answer[1]) if isinstance(answer, tuple) else answer * 1.001


def _replace(owner: Any, name: str, value: Any) -> None:
    before, own = getattr(owner, name), name in vars(owner)
    setattr(owner, name, value)
    _UNDO.append(lambda: setattr(owner, name, before) if own else delattr(owner, name))
