"""Prices, read once per process."""

from functools import lru_cache

from fleet.config import price_list


@lru_cache(maxsize=1)
def table() -> dict:
    return {name.upper(): price for name, price in price_list().items()}


def price(name: str) -> int:
    return table()[name.upper()]


def total(names: list[str]) -> int:
    return sum(price(name) for name in names)
