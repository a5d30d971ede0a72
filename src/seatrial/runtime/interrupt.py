"""Ctrl-C and SIGTERM as a request to stop in order, so that a trial that was interrupted is still judged and stored.

- Inside `with Interruptible() as stop`, the first SIGINT or SIGTERM only sets `stop.signal`; a running child is then
  ended in order and its outcome is `interrupted`. Callers ask `stop.check()` between their own steps.
- The second signal raises `Interrupted` at once: children are killed without grace. Only while a child is being started it is `held`,
  since nobody could end that child.
- `Interrupted` is a KeyboardInterrupt: whoever handles that one (exit code 130) handles this one too.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A person or the cluster asked Seatrial to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signal = signum


class Interruptible:
    """Turns the first SIGINT or SIGTERM into a flag and the second into `Interrupted`. For the main thread only."""

    _current: ClassVar[Interruptible | None] = None

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal that asked to stop, or None."""
        self._previous: dict[signal.Signals, Any] = {}
        self._outer: Interruptible | None = None
        self._held = False
        self._late: int | None = None
        """A second signal that was held back."""

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        self._outer, Interruptible._current = Interruptible._current, self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        Interruptible._current = self._outer
        self._restore()

    def check(self) -> None:
        """Raise `Interrupted` if a stop was asked for."""
        if self.signal is not None:
            raise Interrupted(self.signal)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is None:
            self.signal = signum
        elif self._held:
            self._late = signum
        else:
            self._restore()
            raise Interrupted(signum)

    def _release(self) -> None:
        self._held = False
        if self._late is not None:
            late, self._late = self._late, None
            self._restore()
            raise Interrupted(late)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@contextmanager
def held() -> Iterator[Callable[[], None]]:
    """Inside, the second signal is held back until the end of the block, or until what this gives is called. Other threads than the
    main one get no signals: there it does nothing."""
    current = Interruptible._current
    if current is None or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    current._held = True
    try:
        yield current._release
    finally:
        current._release()


def stop_requested() -> bool:
    """Whether an active `Interruptible` was asked to stop."""
    current = Interruptible._current
    return current is not None and current.signal is not None


def check_stop() -> None:
    """Raise `Interrupted` if an active `Interruptible` was asked to stop."""
    if Interruptible._current is not None:
        Interruptible._current.check()


def rest(seconds: float) -> None:
    """Sleep; a stop that is asked for ends it at once, as `check_stop` does."""
    stops = time.monotonic() + seconds
    while time.monotonic() < stops:
        check_stop()
        time.sleep(min(0.2, seconds))
