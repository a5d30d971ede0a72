"""The learner: an actor built on the YAML file."""

import ray

from fleet.config import settings
from fleet.maths import clipped


class Momentum:
    def __init__(self, rate: float, momentum: float) -> None:
        self.rate = rate
        self.momentum = momentum
        self.speed = 0.0

    def step(self, gradient: float) -> float:
        self.speed = self.momentum * self.speed + gradient
        return self.rate * self.speed


@ray.remote(num_cpus=0)
class Learner:
    def __init__(self) -> None:
        asked = settings("learner")
        self.clip = asked["clip"]
        self.optimizer = Momentum(asked["rate"], asked["momentum"])
        self.weight = 0.0
        self.seen = 0

    def reset(self) -> float:
        self.weight = 0.0
        self.seen = 0
        self.optimizer.speed = 0.0
        return self.weight

    def learn(self, gradients: list[float]) -> float:
        for gradient in gradients:
            self.weight -= self.optimizer.step(clipped(gradient, self.clip))
            self.seen += 1
        return self.weight

    def status(self) -> dict:
        return {"weight": self.weight, "seen": self.seen, "name": self.label()}

    def label(self) -> str:
        return f"learner-{self.clip}"
