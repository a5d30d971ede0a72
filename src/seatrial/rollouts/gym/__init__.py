"""NeMo Gym as a backend: its servers are started in its own environment, its agents are driven, or its own collector is."""

from __future__ import annotations

from pathlib import Path

ENVIRONMENT = "gym"
LOCK = Path(__file__).parent / "gym.lock"
"""Of the environment that `seatrial env build gym` makes."""
