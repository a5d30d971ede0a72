"""Questions that have no audit event: is there such a file, and what are the lines of a source.

- `os.path.exists` and its like, and those of `Path`, are wrapped while recording; only whether there is something counts.
- `linecache.getlines` gives what it read long ago, so each asking is told: tracebacks and `inspect.getsource` depend on the text.
- pathlib and linecache are wrapped when they are imported, so that a child that needs neither does not load them.
"""

# Paths are text here: pathlib may not be loaded yet, and what it does is watched.

from __future__ import annotations

import functools
import genericpath
import os
import posixpath
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from seatrial.regress.select.trace.events import EXISTS, READ
from seatrial.regress.select.trace.recorder import Recorder
from seatrial.regress.select.trace.watch import asked_by_a_test

PATH_FUNCTIONS = ("exists", "lexists", "isfile", "isdir")
METHODS = ("exists", "is_file", "is_dir", "stat")


class Asked:
    """The wrappers of one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def install(self) -> None:
        """Wrap what is there."""
        for name in PATH_FUNCTIONS:
            for module in (posixpath, genericpath):
                if hasattr(module, name):
                    self._wrap(module, name, self._told)
        for name in ("pathlib", "linecache"):
            if name in sys.modules:
                self.after(sys.modules[name])

    def after(self, module: ModuleType) -> None:
        """Wrap what was imported just now."""
        name = getattr(module, "__name__", "")
        if name == "pathlib":
            for method in METHODS:
                self._wrap(module.Path, method, self._told)
        elif name == "linecache":
            self._wrap(module, "getlines", self._lines)

    def _wrap(self, owner: Any, name: str, told: Callable[[Any], None]) -> None:
        before = getattr(owner, name)
        had = name in vars(owner)
        recorder = self.recorder

        @functools.wraps(before)
        def wrapper(path: Any, *args: Any, **kwargs: Any) -> Any:
            if recorder.running and not recorder.quiet:
                hushed = recorder.hush(True)
                try:
                    told(path)
                except (TypeError, ValueError, OSError):
                    pass  # what is no path is told by the function itself
                finally:
                    recorder.hush(hushed)
            return before(path, *args, **kwargs)

        def undo() -> None:
            if vars(owner).get(name) is wrapper:
                if had:
                    setattr(owner, name, before)
                else:
                    delattr(owner, name)

        setattr(owner, name, wrapper)
        recorder.undo.append(undo)

    def _told(self, path: Any) -> None:
        if not isinstance(path, int) and asked_by_a_test(self.recorder, sys._getframe(2)):
            for relative in self.recorder.tree.names(os.fsdecode(path)):
                self.recorder.tell(EXISTS, relative)

    def _lines(self, path: Any) -> None:
        relative = self.recorder.tree.source(path) if isinstance(path, str) else None
        if relative is not None:
            self.recorder.tell(READ, relative)
