"""A model directory that is whole, as far as files go; its parts can be spoiled one by one."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

ROWS = 16


def safetensors(tensors: Mapping[str, tuple[int, ...]]) -> bytes:
    """A safetensors file of zeros with these tensors."""
    header, end = dict[str, object](), 0
    for name, shape in tensors.items():
        size = 4
        for number in shape:
            size *= number
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def make_model(place: Path, config: Mapping[str, object] | None = None) -> Path:
    """Configuration, tokenizer and weights below `place`."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": ROWS, **(config or {})}))
    (place / "tokenizer.json").write_text("{}")
    (place / "tokenizer_config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(safetensors({"model.embed_tokens.weight": (ROWS, 2), "model.norm.weight": (2,)}))
    return place
