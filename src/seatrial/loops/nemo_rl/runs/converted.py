"""Where the models that NeMo-RL converts are kept: each level has a place of its own, so that the Bridge under test makes them."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "NRL_MEGATRON_CHECKPOINT_DIR"
FOLDER = "converted"


def place(directory: Path, run: str) -> Path:
    """Of a level directory of the run with this name: below the user's own place, where there is one."""
    given = os.environ.get(VARIABLE, "").strip()
    return Path(given, f"seatrial-{run}", directory.name, FOLDER) if given else directory / FOLDER
