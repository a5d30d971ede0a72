"""Families of models that the ladder makes itself: tiny, with random weights, downloaded from nowhere."""

from __future__ import annotations

from pathlib import Path

from seatrial.probes.engines import tiny_models


def ensure(name: str, directory: Path) -> Path:
    """The tiny checkpoint of a family, made unless it is there."""
    return tiny_models.ensure({"qwen2": "tiny-qwen2", "llama": "tiny-llama", "qwen3-moe": "tiny-moe"}[name], directory)
