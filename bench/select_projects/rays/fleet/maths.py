"""Arithmetic that only workers do."""

SCALE = 10


def clipped(value: float, limit: float) -> float:
    if value > limit:
        return limit
    if value < -limit:
        return -limit
    return value


def mean(values: list[float]) -> float:
    if not values:
        return 0.0
    return sum(values) / len(values)


def spread(values: list[float]) -> float:
    middle = mean(values)
    return mean([abs(value - middle) for value in values])


def scaled(value: float) -> float:
    return value * SCALE


def collatz(number: int) -> int:
    steps = 0
    while number != 1 and steps < 1000:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps
