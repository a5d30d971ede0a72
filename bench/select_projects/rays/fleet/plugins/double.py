FACTOR = 2


def apply(value: int) -> int:
    return value * FACTOR
