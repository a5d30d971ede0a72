"""Why a refit was refused: one reason of a fixed list, the names it is about, what was seen, and the fix.

A refusal is an outcome, not an accident: whoever raises it has left every bit as it was, or has put it back.
"""

from __future__ import annotations

from collections.abc import Sequence

REASONS = {
    "truncated": "the payload is shorter than it says",
    "corrupt": "the payload is not what was sent",
    "replay": "this version or a newer one is held already",
    "gap": "the payload builds on another version than the one that is held",
    "wrong-base": "the weights that are held are not those the payload builds on",
    "unknown-name": "names that the generator does not have",
    "absent-name": "weights that were not sent",
    "layout": "dtype, shape or memory layout do not fit",
    "mismatch": "the weights that are held afterwards are not those that were sent",
    "dead": "the generator is gone",
}
UNMAPPED = "map"
"""Where a driver met the error (`where` of its `probe_error`) when the coordinate map could not be learned."""
SHOWN = 5


class RefitRefused(RuntimeError):
    """A refit that did not happen. `reason` is a key of REASONS."""

    def __init__(self, reason: str, names: Sequence[str] = (), fix: str = "", detail: str = "") -> None:
        if reason not in REASONS:
            raise ValueError(f"refit: {reason!r} is no reason; known: {', '.join(REASONS)}")
        super().__init__(reason, tuple(names), fix, detail)
        self.reason, self.names, self.fix, self.detail = reason, tuple(names), fix, detail

    def __str__(self) -> str:
        text = f"refit: refused ({self.reason}): {self.detail or REASONS[self.reason]}"
        if self.names:
            more = f" and {len(self.names) - SHOWN} more" if len(self.names) > SHOWN else ""
            text += f": {', '.join(self.names[:SHOWN])}{more}"
        return f"{text}; fix: {self.fix}" if self.fix else text
