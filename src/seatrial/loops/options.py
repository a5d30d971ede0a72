"""Options of a loop: names and values that a user gave, checked before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_step


def require_known(loop: str, known: Mapping[str, str], options: Mapping[str, str]) -> None:
    """Refuse an option that the loop does not take."""
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            listed = f"known: {', '.join(known)}" if known else "it takes none"
            raise UserError(f"options.{name}: {loop} has no such option; {listed}", f"use {close[0]}" if close else "leave it out")


def choice(options: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    """One of the known values; the first is the default."""
    value = options.get(name, known[0])
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1) or known
        raise UserError(f"options.{name} = {value!r}: not one of {', '.join(known)}", f"use {' or '.join(near)}")
    return value


def number(options: Mapping[str, str], name: str, default: int, least: int = 1, most: int | None = None) -> int:
    """A whole number within its limits."""
    text = options.get(name)
    if text is None:
        return default
    limits = f"from {least} to {most}" if most is not None else f"of at least {least}"
    value = parse_step(text)
    if value is None or value < least or (most is not None and value > most):
        raise UserError(f"options.{name} = {text!r}: not a whole number {limits}", f"use {default}")
    return value
