"""Questions that have no audit event: is there such a file, how large is it, and what are the lines of a source.

- `os.path.exists` and its like, and those of `Path`, are wrapped while recording; only whether there is something counts.
- `os.stat` (by which `Path.stat` and `os.path.getsize` go) tells sizes: it counts as reading the file.
- `linecache.getlines` gives what it read long ago, so each asking is told: tracebacks and `inspect.getsource` depend on the text.
- `importlib.util.find_spec` asks whether there is a module.
- pathlib and the others are wrapped when they are imported, so that a child that needs neither does not load them.
"""

# Paths are text here: pathlib may not be loaded yet, and what it does is watched.

from __future__ import annotations

import functools
import genericpath
import os
import posixpath
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from seatrial.regress.select.trace.events import EXISTS, READ
from seatrial.regress.select.trace.recorder import Recorder
from seatrial.regress.select.trace.watch import LIBRARY, PASSED_ON, asked_by_a_test, is_tool, of_descriptor

PATH_FUNCTIONS = ("exists", "lexists", "isfile", "isdir")
METHODS = ("exists", "is_file", "is_dir", "is_symlink", "is_mount", "is_fifo", "is_socket", "is_block_device", "is_char_device")
ABILITIES = (os.supports_dir_fd, os.supports_effective_ids, os.supports_fd, os.supports_follow_symlinks)
"""Whoever has a wrapper in hand looks it up there."""
LINECACHE, SHUTIL = f"{LIBRARY}linecache.py", f"{LIBRARY}shutil.py"


class Asked:
    """The wrappers of one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._tools: dict[str, bool] = {}

    def install(self) -> None:
        """Wrap what is there."""
        for name in PATH_FUNCTIONS:
            for module in (posixpath, genericpath):
                if hasattr(module, name):
                    self._wrap(module, name, self._told, once=True)
        self._wrap(os, "access", self._told)
        self._wrap(os, "stat", self._measured)
        for name in ("pathlib", "linecache", "importlib.util"):
            if name in sys.modules:
                self.after(sys.modules[name])

    def after(self, module: ModuleType) -> None:
        """Wrap what was imported just now."""
        name = getattr(module, "__name__", "")
        if name == "pathlib":
            for method in METHODS:
                self._wrap(module.Path, method, self._told, once=True)
        elif name == "linecache":
            self._wrap(module, "getlines", self._lines)
        elif name == "importlib.util":
            self._wrap(module, "find_spec", self._looked_for)

    def _wrap(self, owner: Any, name: str, told: Callable[[Any, Mapping[str, Any]], None], *, once: bool = False) -> None:
        """`told` hears of each call; with `once`, what the function asks on its way is not told as well."""
        before = getattr(owner, name)
        had = name in vars(owner)
        recorder = self.recorder

        @functools.wraps(before)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not recorder.running or recorder.quiet:
                return before(*args, **kwargs)
            hushed = recorder.hush(True)
            if once and self._is_tool(sys._getframe(1).f_globals.get("__file__")):
                try:
                    return before(*args, **kwargs)
                finally:
                    recorder.hush(hushed)
            try:
                try:
                    told((args or tuple(kwargs.values()))[0], kwargs)
                except (TypeError, ValueError, OSError, IndexError):
                    pass  # what is no path is told by the function itself
                recorder.hush(hushed or once)
                return before(*args, **kwargs)
            finally:
                recorder.hush(hushed)

        if isinstance(owner, ModuleType):
            wrapper.__module__ = owner.__name__  # pickle finds it there
        able = [functions for functions in ABILITIES if before in functions]
        for functions in able:
            functions.add(wrapper)

        def undo() -> None:
            for functions in able:
                functions.discard(wrapper)
            if vars(owner).get(name) is wrapper:
                if had:
                    setattr(owner, name, before)
                else:
                    delattr(owner, name)

        setattr(owner, name, wrapper)
        recorder.undo.append(undo)

    def _is_tool(self, file: object) -> bool:
        """Whether pytest itself asks, as it does of every test's file. By the file of the module: looking at code is an audit event."""
        if not isinstance(file, str):
            return False
        if file not in self._tools:
            self._tools[file] = is_tool(self.recorder, file) and not file.startswith(PASSED_ON)
        return self._tools[file]

    def _told(self, path: Any, given: Mapping[str, Any]) -> None:
        if not isinstance(path, int) and asked_by_a_test(self.recorder, sys._getframe(2)):
            self._tell(EXISTS, path, given)

    def _measured(self, path: Any, given: Mapping[str, Any]) -> None:
        frame = sys._getframe(2)
        # linecache asks whether what it has is still true, of every file that it ever read.
        if isinstance(path, int) or frame.f_code.co_filename == LINECACHE or not asked_by_a_test(self.recorder, frame):
            return
        # Which file it is, and of what kind: a link, the target of a copy before it is made.
        which = frame.f_code.co_filename == SHUTIL or frame.f_code.co_name == "samefile" or not given.get("follow_symlinks", True)
        self._tell(EXISTS if which else READ, path, given)

    def _tell(self, kind: str, path: Any, given: Mapping[str, Any]) -> None:
        name, descriptor = os.fsdecode(path), given.get("dir_fd")
        if descriptor is not None:
            name = os.path.join(of_descriptor(descriptor) or "", name)  # noqa: PTH118
        for relative in self.recorder.tree.names(name):
            self.recorder.tell(kind, relative)

    def _looked_for(self, name: Any, given: Mapping[str, Any]) -> None:
        """Whether there is such a module; a relative name is left to those who import it."""
        if isinstance(name, str) and not name.startswith(".") and asked_by_a_test(self.recorder, sys._getframe(2)):
            tail = name.replace(".", "/")
            for base in sys.path:
                for candidate in (f"{base or '.'}/{tail}.py", f"{base or '.'}/{tail}", f"{base or '.'}/{tail}/__init__.py"):
                    self._tell(EXISTS, candidate, given)

    def _lines(self, path: Any, given: Mapping[str, Any]) -> None:  # noqa: ARG002
        relative = self.recorder.tree.source(path) if isinstance(path, str) else None
        if relative is not None:
            self.recorder.tell(READ, relative)
