"""One builder at a time in a cache, with a message while the others wait.

- The lock is held by an open file: it goes when its process ends, however that ends.
- The file says who holds it, so that a waiting person knows what they wait for.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from seatrial.core.errors import BlockedError
from seatrial.core.verdict import Boundary
from seatrial.runtime.interrupt import check_stop
from seatrial.runtime.process import stamp

_POLL_S = 0.2
_REMIND_S = 30.0
_FIX = "wait for it to end, or stop it"


@contextmanager
def exclusive(path: Path, what: str, progress: Callable[[str], None], deadline_s: float, fix: str = _FIX) -> Iterator[None]:
    """Hold the lock `path` for `what`; waits at most `deadline_s` and then raises a BlockedError with `fix`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise _blocked(path, f"cannot write: {error.strerror or error}") from error
    with handle:
        began, reminded = time.monotonic(), float("-inf")
        while not _try_lock(handle.fileno(), path):
            now, held_by = time.monotonic(), path.read_text(encoding="utf-8")
            if now - began >= deadline_s:
                message = f"waited {deadline_s:.0f} s for {held_by or 'another build'}"
                raise BlockedError(Boundary.ENVIRONMENT, message, fix)
            # A holder writes its name right after it got the lock; until then there is nothing worth saying.
            if held_by and now - reminded >= _REMIND_S:
                progress(f"waiting for {held_by}")
                reminded = now
            check_stop()
            time.sleep(_POLL_S)
        handle.truncate(0)
        handle.write(f"{what} (process {os.getpid()}, since {stamp().strip()})")
        handle.flush()
        yield


def holder(path: Path) -> str | None:
    """Who holds the lock now, in words; None when nobody does."""
    try:
        with path.open(encoding="utf-8", errors="replace") as handle:
            try:
                fcntl.flock(handle.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return handle.read().strip() or "another build"
    except OSError:
        pass  # there is none, or it cannot be told
    return None


def _try_lock(handle: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _blocked(path, f"cannot lock: {error.strerror or error}") from error
    return True


def _blocked(path: Path, message: str) -> BlockedError:
    return BlockedError(
        Boundary.ENVIRONMENT, f"{path}: {message}", "set SEATRIAL_CACHE to a directory on a local disk that you can write to"
    )
