"""Several checks of the preflight, of which none hides another: an error of one is a finding like the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from subprocess import SubprocessError

from seatrial.model.errors import BlockedError, UserError
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

Check = Callable[[], Finding | Iterable[Finding]]


def gather(*checks: Check) -> tuple[Finding, ...]:
    """The findings of all checks, in their order, each once."""
    made: list[Finding] = []
    for check in checks:
        try:
            found = check()
            made += [found] if isinstance(found, Finding) else found
        except (BlockedError, UserError, OSError, SubprocessError) as error:
            made.append(as_finding(error))
    return tuple(dict.fromkeys(made))


def as_finding(error: BlockedError | UserError | OSError | SubprocessError, name: str = "check failed") -> Finding:
    """An error as the finding that blocks."""
    if isinstance(error, OSError | SubprocessError):
        return Finding(name=name, ok=False, message=f"a check could not be made: {error}", fix="see the message, then run it again")
    boundary = error.boundary if isinstance(error, BlockedError) else Boundary.CONFIG
    return Finding(name=name, ok=False, boundary=boundary, message=error.message, fix=error.fix)
