"""One command in a container or a fresh environment, to its end; its output is passed on line by line, redacted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.launch.process import Outcome, ProcessSpec, run
from seatrial.regress.hermetic.place import Place

GRACE_S = 10.0


def run_in(place: Place, argv: tuple[str, ...], cwd: Path, log: Path, minutes: float, line: Callable[[str], None]) -> Outcome:
    """Run the command in a place that was entered; nothing of it is left when this returns. A BlockedError when it cannot be started."""
    clear = Redactor(os.environ).lines().line

    def passed_on(text: str) -> str:
        shown = clear(text)
        line(shown)
        return shown

    words, env = place.command(argv, cwd)
    place.refuse(words, env)
    spec = ProcessSpec(
        argv=words,
        env=env,
        cwd=cwd,
        log=log,
        run_id=f"hermetic-{time.time_ns()}",
        deadline_s=60 * minutes,
        stall_s=60 * minutes,
        grace_s=GRACE_S,
        line_filter=passed_on,
    )
    try:
        return run(spec)
    finally:
        place.end()
