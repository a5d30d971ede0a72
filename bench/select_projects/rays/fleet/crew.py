"""An actor that starts other actors, by names from the configuration."""

import ray

from fleet.config import settings
from fleet.greetings import greeting


@ray.remote(num_cpus=0)
class Member:
    def __init__(self, name: str) -> None:
        self.name = name

    def greet(self) -> str:
        return greeting(self.name)


@ray.remote(num_cpus=0)
class Crew:
    def __init__(self) -> None:
        asked = settings("workers")
        self.members = [Member.remote(name) for name in asked["names"][: asked["count"] - 1]]

    def roll_call(self) -> list[str]:
        return sorted(ray.get([member.greet.remote() for member in self.members]))
