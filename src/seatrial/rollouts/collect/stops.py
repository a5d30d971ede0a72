"""stop.json: why a campaign stopped by itself. Whoever writes it first says why; `resume` puts it aside."""

from __future__ import annotations

import time

from seatrial.files import read_model
from seatrial.model.record import Record
from seatrial.rollouts.place import Place, write_once


class Stop(Record):
    """Why no more is collected."""

    reason: str
    by: str
    """The attempt that said so."""
    at: int
    """Seconds since 1970."""


def stopped(place: Place) -> Stop | None:
    """Why the campaign stopped, or None."""
    return read_model(place.stop, Stop) if place.stop.is_file() else None


def stop(place: Place, reason: str, by: str) -> None:
    """Stop the campaign; the first reason stays."""
    write_once(place.stop, Stop(reason=reason, by=by, at=int(time.time())))


def go_on(place: Place) -> None:
    """Put the reason aside, so that a resumed campaign may collect again."""
    if place.stop.is_file():
        place.stop.replace(place.root / f"stop-{int(time.time())}.json")
