"""Loop arguments that are secrets: hidden wherever they are printed or stored, known to the process that was given them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from seatrial.evidence.redact import Redactor
from seatrial.model.errors import UserError


def redactor(arguments: Sequence[str]) -> Redactor:
    """Hides secrets of the environment and those among the loop arguments."""
    return Redactor({**_as_variables(arguments), **os.environ})


def refuse(arguments: Sequence[str]) -> None:
    """A loop argument that is a secret is not stored, so only the process that was given it can run the trial."""
    secret = next((word for word in redactor(arguments).value(tuple(arguments)) if "[redacted:" in word), None)
    if secret:
        message = f"a loop argument is a secret, which is not stored: {secret}"
        raise UserError(message, "pass it as a variable of the environment, or run the trial where you are, without --on")


def _as_variables(arguments: Sequence[str]) -> dict[str, str]:
    """Loop arguments by name, `--name value`, `--name=value` and `some.name=value`: a secret among them is one wherever it
    is printed."""
    found = {}
    for word, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, separator, value = word.partition("=")
        if separator:
            found[name.lstrip("-+~").rpartition(".")[2]] = value
        elif name.startswith("--"):
            found[name.lstrip("-")] = following
    return found
