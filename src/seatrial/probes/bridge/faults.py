"""Seeded bugs of providers, mappings and adapters, to see the ladder catch them: each patches the Bridge in a rung's own process.

The Bridge's real code runs on, with one mistake in it. `seatrial probe bridge --fault list` names them.
"""

from __future__ import annotations

from seatrial.probes.bridge import faults_loop, faults_numbers, faults_training, faults_weights
from seatrial.probes.bridge.fault import Fault

FAULTS: dict[str, Fault] = {**faults_weights.FAULTS, **faults_numbers.FAULTS, **faults_training.FAULTS, **faults_loop.FAULTS}


def apply(name: str) -> None:
    """Make the Bridge of this process have the bug."""
    FAULTS[name].apply()
