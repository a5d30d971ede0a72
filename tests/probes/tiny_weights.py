"""A checkpoint of one small tensor, whole or torn."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def weights(path: Path, cut: int = 0, header: bytes | None = None) -> Path:
    """Write a file of one small tensor; the directory it lies in."""
    text = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = struct.pack("<Q", len(text)) + (text if header is None else header) + bytes(8)
    path.write_bytes(data[: len(data) - cut])
    return path.parent
