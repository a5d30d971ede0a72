"""Where instrumented code is kept between sessions: outside of every checkout, shared by all.

- `$XDG_CACHE_HOME/seatrial/select`, or `~/.cache/seatrial/select`; without a home there is none. A place that cannot be written costs time,
  nothing else.
- What nobody used for a month is removed, by one session a day.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MARK = "swept"
DAY_S = 86_400.0
KEPT_S = 30 * DAY_S


def place() -> Path | None:
    above = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111  # never raises, unlike Path.home
    return above / "seatrial" / "select" if above.is_absolute() else None


def sweep() -> None:
    """Remove old code, at most once a day."""
    above, now = place(), time.time()
    if above is None:
        return
    try:
        mark = above / MARK
        if not above.is_dir() or (mark.exists() and now - mark.stat().st_mtime < DAY_S):
            return
        mark.touch()
        for path in above.glob("??/*"):
            told = path.stat()
            if now - max(told.st_atime, told.st_mtime) > KEPT_S:
                path.unlink(missing_ok=True)
    except OSError:
        pass  # another session sweeps, or it is not ours to sweep
