"""Errors that a user can fix, and errors that block a trial.

Both carry the fix. The command line prints them without a traceback; anything else is an internal error (exit 3).
"""

from __future__ import annotations

from seatrial.model.verdict import Boundary


class UserError(Exception):
    """Bad input: names the file, the key and the fix. Exit code 2."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class BlockedError(Exception):
    """Something before or beside the change stops the run; becomes the verdict Blocked at `boundary`."""

    def __init__(self, boundary: Boundary, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.boundary = boundary
        self.message = message
        self.fix = fix
