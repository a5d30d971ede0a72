"""API keys: they stand in variables, never in files of a campaign."""

from __future__ import annotations

import os

from seatrial.model.errors import UserError


def key_of(variable: str | None) -> str | None:
    """An API key, from the variable that holds it; a UserError when it is not set."""
    if variable is None:
        return None
    # A key that was read from a file brings its newline along.
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"the variable {variable} is to hold an API key, and is not set here", f"export {variable}=… before you start")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the variable {variable} is to hold an API key, and holds characters that no header can", "see what was exported")
    return key
