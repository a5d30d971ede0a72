"""The Hugging Face cache: where it is, and what it holds. No network is ever used."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from seatrial.model.record import Finding

SPARE_CACHE_MB = 1000


def hub_cache() -> Path:
    """The Hugging Face cache, as the hub's own client finds it."""
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()


def snapshot(model: str) -> Path:
    """The directory of the cached `main` revision of a model; it need not exist."""
    stored = hub_cache() / f"models--{model.replace('/', '--')}"
    main = stored / "refs" / "main"
    return stored / "snapshots" / (main.read_text(encoding="utf-8").strip() if main.is_file() else "(none)")


def cache_room() -> Finding:
    """The cache has room for a small model."""
    cache = hub_cache()
    near = next(place for place in (cache, *cache.parents) if place.exists())
    free = shutil.disk_usage(near).free / 1e6
    room = free >= SPARE_CACHE_MB
    fix = "" if room else "set HF_HOME to a larger disk"
    return Finding(name="disk of the model cache", ok=room, message=f"{free:.0f} MB free at {near}", fix=fix)
