"""Let released Megatron-Core and Megatron-Bridge train below verl on a CPU: importing this installs it.

It stands in VERL_USE_EXTERNAL_MODULES before everything that imports Megatron. The shims are those of `seatrial.instruments.megatron`, and
one that is needed by what verl hands to Megatron.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from seatrial.instruments.megatron import import_patches, shims


def install() -> None:
    shims.install()
    import_patches.after("megatron.core.transformer.dot_product_attention", _causal_attention_ignores_padding_mask)


def _causal_attention_ignores_padding_mask(module: ModuleType) -> None:
    """The engine of verl hands over a (batch, sequence) mask with True = real token, which Transformer Engine ignores for causal attention.
    Megatron's local attention would read it as "True = masked out" and drop the causal mask. Rows are padded on the right, so the causal
    mask alone keeps padding away from every real token."""
    plain = module.DotProductAttention.forward

    @functools.wraps(plain)
    def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = None
        return plain(self, query, key, value, attention_mask, *args, **kwargs)

    module.DotProductAttention.forward = forward


install()
