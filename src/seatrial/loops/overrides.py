"""Words that Hydra takes for overrides, as loops whose programs are configured by it get them from a user."""

from __future__ import annotations

import re

OVERRIDE = re.compile(r"(?:\+\+?|~)?[^\s=+~-][^\s=]*=.*|~[^\s=+~-][^\s=]*", re.DOTALL)
WANTED = "write KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY"


def is_override(word: str) -> bool:
    """Whether Hydra takes it for an override: KEY=VALUE, +KEY=VALUE, ++KEY=VALUE or ~KEY. A flag is none."""
    return OVERRIDE.fullmatch(word) is not None


def key_of(word: str) -> str:
    """The key of an override."""
    return word.lstrip("+~").partition("=")[0]
