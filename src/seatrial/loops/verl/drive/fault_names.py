"""The faults that can be injected into this loop on a CPU: what each does, and the levels that are to catch it."""

from __future__ import annotations

from seatrial.instruments.fault import Fault

EVERY = (0, 1, 5)
FAULTS: dict[str, Fault] = {
    "stale-generator": Fault("the generation server keeps its first weights: every later sync is dropped", EVERY),
    "frozen": Fault("the actor's optimizer steps with a learning rate of 0, whatever is logged", EVERY),
    "reward-raises": Fault("the reward function raises for every third prompt, and the loop swallows it", EVERY),
    "constant-reward": Fault("every completion earns 0.5: no advantage anywhere", EVERY),
    "fresh-optimizer": Fault("the checkpoint's optimizer state is not restored", (1,)),
}
