"""The Hugging Face cache: where it is, and what it holds. No network is ever used."""

from __future__ import annotations

import os
from pathlib import Path

from seatrial.files import room_at
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
    found = room_at(cache)
    enough = found.free_mb >= SPARE_CACHE_MB
    fix = "" if enough else "set HF_HOME to a larger disk"
    message = f"{found.free_mb:.0f} MB free at {found.place}"
    return Finding(name="disk of the model cache", ok=enough, message=message, fix=fix, path=str(found.place))
