"""File locks: one holder at a time, refused at once (`hold`) or awaited with a message (`exclusive`).

- The lock is held by an open file: it goes when its process ends, however that ends.
- The pytest plugins, a distribution of its own, lock their own files.
- The file says who holds it. A lock that cannot be made is an OSError of `hold`, and a BlockedError of `exclusive`.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from seatrial.core.errors import BlockedError
from seatrial.core.verdict import Boundary
from seatrial.runtime.interrupt import check_stop
from seatrial.runtime.process import stamp

_POLL_S = 0.2
_REMIND_S = 30.0
_FIX = "wait for it to end, or stop it"


class HeldError(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder
        """What it wrote into the file; empty for a moment after it got the lock."""


@contextmanager
def hold(path: Path, text: str) -> Iterator[None]:
    """Hold the lock `path`, with `text` in it; a HeldError when another process has it."""
    with path.open("a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HeldError(path.read_text(encoding="utf-8", errors="replace").strip()) from error
        handle.truncate(0)
        handle.write(text)
        handle.flush()
        yield


@contextmanager
def exclusive(path: Path, what: str, progress: Callable[[str], None], deadline_s: float, fix: str = _FIX) -> Iterator[None]:
    """Hold the lock `path` for `what`; waits at most `deadline_s` and then raises a BlockedError with `fix`."""
    began, reminded = time.monotonic(), float("-inf")
    with ExitStack() as stack:
        while True:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(hold(path, f"{what} (process {os.getpid()}, since {stamp().strip()})"))
                break
            except HeldError as held:
                now, holder = time.monotonic(), held.holder
            except OSError as error:
                where = "set SEATRIAL_CACHE to a directory on a local disk that you can write to"
                raise BlockedError(Boundary.ENVIRONMENT, f"{path}: cannot lock: {error.strerror or error}", where) from error
            if now - began >= deadline_s:
                raise BlockedError(Boundary.ENVIRONMENT, f"waited {deadline_s:.0f} s for {holder or 'another build'}", fix)
            if holder and now - reminded >= _REMIND_S:
                progress(f"waiting for {holder}")
                reminded = now
            check_stop()
            time.sleep(_POLL_S)
        yield


def holder(path: Path) -> str | None:
    """Who holds the lock now, in words; None when nobody does, or when it cannot be told."""
    try:
        with path.open(encoding="utf-8", errors="replace") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return handle.read().strip() or "another build"
    except OSError:
        pass
    return None
