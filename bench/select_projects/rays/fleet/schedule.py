"""The schedule of a run; the driver computes it."""

from fleet.config import settings


def rate(step: int) -> float:
    asked = settings("schedule")
    if step < asked["warmup"]:
        return step / asked["warmup"]
    left = asked["total"] - step
    return max(0.0, left / (asked["total"] - asked["warmup"]))


def steps() -> list[float]:
    return [rate(step) for step in range(settings("schedule")["total"] + 1)]
