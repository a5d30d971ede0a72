"""What Seatrial adds to verl, through verl's own registries: loaded into each of its processes by VERL_USE_EXTERNAL_MODULES.

The trainer finds the generation server here, the worker the other end of the weight sync, and its engines: those of the module
in this folder that SEATRIAL_ENGINE names.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from seatrial.instruments.megatron import import_patches

NAME = "seatrial"
"""The rollout's name in verl's configuration."""


def _replica() -> type:
    from seatrial.instruments.verl.generation_server import Replica

    return Replica


def _engines(_: ModuleType) -> None:
    importlib.import_module(f"seatrial.instruments.verl.{os.environ['SEATRIAL_ENGINE']}")


# verl has no function to add to this table.
_ROLLOUT_REGISTRY[(NAME, "async")] = "seatrial.instruments.verl.generation_server.Adapter"
RolloutReplicaRegistry.register(NAME, _replica)
# Seconds for each process: only where verl itself imports its engines.
import_patches.after("verl.workers.engine", _engines)
