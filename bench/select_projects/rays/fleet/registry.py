"""Plugins by name: the module is found when it is asked for."""

import importlib
from collections.abc import Callable

ALIASES = {"twice": "double", "power": "square"}


def plugin(name: str) -> Callable[[int], int]:
    module = importlib.import_module(f"fleet.plugins.{ALIASES.get(name, name)}")
    return module.apply


def chain(names: list[str], value: int) -> int:
    for name in names:
        value = plugin(name)(value)
    return value
