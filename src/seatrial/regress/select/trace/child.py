"""What a child process of a recorded test runs first (by `start/sitecustomize.py`)."""

from __future__ import annotations

import os

from seatrial.regress.select.trace.session import VARIABLE, join


def begin() -> None:
    """Record, if we are told where."""
    told = os.environ.get(VARIABLE)
    if told:
        join(told)
