"""Whether runs are kept by themselves. Light: every pytest that tracks asks."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE, OFF = "SEATRIAL_HISTORY", "off"


def is_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether automatic imports are turned off."""
    return environment.get(VARIABLE, "").lower() == OFF
