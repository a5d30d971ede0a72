"""A replay buffer as an actor."""

import ray

from fleet.queues import Ring


@ray.remote(num_cpus=0)
class Buffer:
    def __init__(self, size: int) -> None:
        self.ring = Ring(size)

    def add(self, *items: int) -> int:
        for item in items:
            self.ring.push(item)
        return self.ring.length()

    def newest(self, count: int) -> list[int]:
        return self.ring.items()[-count:]

    def oldest(self) -> int:
        if self.ring.length() == 0:
            raise LookupError("nothing is in the buffer")
        return self.ring.items()[0]
