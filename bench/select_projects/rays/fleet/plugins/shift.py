from fleet.config import limits


def apply(value: int) -> int:
    low, high = limits()
    if value + low > high:
        return high
    return value + low
