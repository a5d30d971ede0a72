"""Ray tasks."""

import ray

from fleet.maths import collatz, mean, scaled, spread


@ray.remote
def summarise(values: list[float]) -> dict:
    return {"mean": mean(values), "spread": spread(values)}


@ray.remote
def longest(numbers: list[int]) -> int:
    best = numbers[0]
    for number in numbers:
        if collatz(number) > collatz(best):
            best = number
    return best


@ray.remote
def nested(values: list[float]) -> float:
    halves = [values[: len(values) // 2], values[len(values) // 2 :]]
    parts = ray.get([inner.remote(half) for half in halves])
    return sum(parts)


@ray.remote
def inner(values: list[float]) -> float:
    return scaled(mean(values))


@ray.remote
def fails(kind: str) -> None:
    if kind == "value":
        raise ValueError("asked to fail")
    raise KeyError(kind)
