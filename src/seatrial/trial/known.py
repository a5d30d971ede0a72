"""Upstream issues that a user attached to failures: which failures can be meant.

An id is that of a signature, of the loop or of those that any loop may meet, or the expression of a check. Any other
would never apply, and nobody would notice: it is an error that names the nearest.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from seatrial.metrics.grammar import CheckSyntaxError, parse
from seatrial.model.errors import UserError
from seatrial.model.loop import Loop
from seatrial.triage.signatures import GENERAL, load_signatures


def require_known(loop: Loop, ids: Iterable[str], origins: Mapping[str, str]) -> None:
    """Refuse an id that no failure has; `origins` says where each was given."""
    known = [signature.id for signature in (*loop.signatures(), *load_signatures(GENERAL)) if not signature.harmless]
    for name in ids:
        if name in known or _is_check(name):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        fix = f"did you mean {close[0]}?" if close else f"known ids: {', '.join(known)}; or the expression of a check"
        raise UserError(f"{origins.get(name, 'configuration')}: known_issues: {name!r} is no known failure of {loop.title}", fix)


def _is_check(text: str) -> bool:
    try:
        parse(text)
    except CheckSyntaxError:
        return False
    return True
