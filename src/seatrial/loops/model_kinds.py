"""What architecture a model is of, by its own config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = {
    "moe": ("num_experts", "n_routed_experts", "num_local_experts"),
    "vlm": ("vision_config",),
    "mtp": ("num_nextn_predict_layers", "mtp_num_layers", "mtp_num_hidden_layers"),
}
"""Keys of a config.json that tell an architecture."""


def is_kind(settings: Mapping[str, Any], kind: str) -> bool:
    """Whether a config.json says so, for the whole model or for the text part of it."""
    inner = settings.get("text_config")
    return any(source.get(key) for source in (settings, inner) if isinstance(source, Mapping) for key in KINDS[kind])
