"""What the configuration files say."""

import json
import tomllib
from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[1] / "config"


def settings(section: str) -> dict:
    with (FOLDER / "fleet.yaml").open() as file:
        return yaml.safe_load(file)[section]


def limits() -> tuple[int, int]:
    table = tomllib.loads((FOLDER / "limits.toml").read_text())["limits"]
    return table["low"], table["high"]


def price_list() -> dict:
    return json.loads((FOLDER / "prices.json").read_text())
