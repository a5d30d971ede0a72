"""A hold on a run that another thread follows: whether its child lives, and how to end it.

- Whoever supervises several runs gives each a `Control`; such a run ends when its control says so, and not by itself when
  Seatrial is interrupted: the supervisor decides in which order things end.
- Asking again may only shorten the time that is left.
"""

from __future__ import annotations

import math
import time

from seatrial.launch.descendants import Tree


class Control:
    """Given to one `process.run`; every method may be called from any thread."""

    def __init__(self) -> None:
        self.tree: Tree | None = None
        """Set by the run when its child has started."""
        self.why = ""
        """Who asked first, for the log."""
        self._kill_at = math.inf

    def stop(self, why: str, grace_s: float) -> None:
        """Ask the run to end: SIGTERM now, SIGKILL to whatever is left after `grace_s`."""
        self.why = self.why or why
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    @property
    def asked(self) -> bool:
        """Whether the run was asked to end."""
        return self._kill_at < math.inf

    def left_s(self) -> float:
        """Seconds until SIGKILL; infinite while nobody asked."""
        return max(0.0, self._kill_at - time.monotonic())

    def peek(self) -> int | None:
        """Exit code of the child as of now, 128 + signal if one ended it; None while it runs or was never started."""
        return None if self.tree is None else self.tree.peek()
