def apply(value: int) -> int:
    return value * value
