"""What Seatrial adds to verl, through verl's own registries: loaded into each of its processes by VERL_USE_EXTERNAL_MODULES.

The trainer finds the generation server here, the worker its engines and the other end of the weight sync.
"""

from __future__ import annotations

from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from seatrial.loops.verl.drive import engine

NAME = "seatrial"
"""The rollout's name in verl's configuration."""


def _replica() -> type:
    from seatrial.loops.verl.drive.server import Replica

    return Replica


# verl has no function to add to this table.
_ROLLOUT_REGISTRY[(NAME, "async")] = "seatrial.loops.verl.drive.server.Adapter"
RolloutReplicaRegistry.register(NAME, _replica)
# verl's FSDP2 engines are registered for CUDA and NPU only; they run on a CPU as they are, and are watched here.
EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(engine.Actor)
EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")(engine.Critic)
