"""API keys: they stand in variables, never in files of a campaign."""

from __future__ import annotations

import os
import re

from seatrial.model.errors import UserError


def key_of(variable: str | None) -> str | None:
    """An API key, from the variable that holds it; a UserError when it is not set."""
    if variable is None:
        return None
    # A key that was read from a file brings its newline along.
    key = os.environ.get(variable, "").strip()
    if not key:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", variable):  # it may be the key itself, typed where the name belongs
            raise UserError(
                "key_env names a variable that is not set here", "write the name of a variable there, such as POLICY_API_KEY, and export it"
            )
        raise UserError(f"the variable {variable} is to hold an API key, and is not set here", f"export {variable}=… before you start")
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"the variable {variable} is to hold an API key, and holds characters that no header can", "see what was exported")
    return key
