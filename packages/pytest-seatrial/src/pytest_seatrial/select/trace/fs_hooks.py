"""Hooks that see opened files, listed directories, started processes (audit events), and questions that have no audit event."""

from __future__ import annotations

import functools
import genericpath
import json
import os
import posixpath
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

from pytest_seatrial.select.trace.trace_events import BY, EXISTS, LIST, LOAD, MUTE, READ, SPAWN, STARTED, THROUGH, WHOLE, WRITE
from pytest_seatrial.select.trace.trace_recorder import TraceRecorder

# Paths are text here: pathlib may not be loaded yet, and what it does is watched.
# ruff: noqa: PTH100, PTH112, PTH115, PTH208, PTH117, PTH118, PTH119, PTH120


LIBRARY = os.path.dirname(os.__file__) + "/"
OWN = os.path.dirname(os.path.abspath(__file__)) + "/"
START = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "start")
WANTED = ("SEATRIAL_SELECT", "PYTHONPATH", b"SEATRIAL_SELECT", b"PYTHONPATH")
ASKERS = tuple(LIBRARY + name for name in ("os.py", "glob.py", "posixpath.py", "genericpath.py", "pathlib"))
PASSED_ON = ("<frozen os>", "<frozen posixpath>", "<frozen genericpath>", OWN, *ASKERS)
"""How the files begin whose frames ask on somebody's behalf."""
METADATA = f"{LIBRARY}importlib/metadata/"
"""Looks for distributions on the whole path; another set of them is noticed for all tests at once."""
NOT_TESTS = ("/_pytest/", "/pluggy/", "/xdist/", "/site-packages/testmon/", "/site-packages/coverage/")
READERS = ("/site-packages/testmon/", "/site-packages/coverage/", "/site-packages/_pytest/")
"""Tools that read sources for themselves: to measure, to rewrite, to show."""
OPENERS = (*PASSED_ON, "<frozen codecs>", "<frozen io>", f"{LIBRARY}tokenize.py", f"{LIBRARY}codecs.py", f"{LIBRARY}io.py")


class AuditHook:
    def __init__(self, recorder: TraceRecorder) -> None:
        self.recorder = recorder
        self._spawned: tuple[int, dict[tuple[str, str], int]] = (-1, {})
        self.table: dict[str, Callable[..., None]] = {
            "open": self._open,
            "os.listdir": self._list,
            "os.scandir": self._list,
            "subprocess.Popen": self._popen,
            "os.posix_spawn": self._exec,
            "os.exec": self._exec,
            "os.system": lambda command: self._spawn(["/bin/sh", "-c", command], None, None),
            "os.remove": self._written,
            "os.rename": self._moved,
            "os.link": self._linked,
            "os.symlink": self._linked,
            "os.mkdir": self._made,
            "os.rmdir": self._written,
            "os.truncate": self._written,
            "import": lambda _, path, *__: self.recorder.tell_names(READ, path) if isinstance(path, str) else None,
            "ctypes.dlopen": self._read_any,
            "sqlite3.connect": self._database,
            "pickle.find_class": self._unpickled,
            "cpython.run_file": lambda path: self.recorder.tell_names(WHOLE, path if isinstance(path, str) else ""),
            "os.fork": lambda: self.recorder.called(STARTED, sys._getframe(2)),
        }

    def install(self) -> None:
        table, recorder = self.table, self.recorder

        def hook(event: str, args: tuple[Any, ...]) -> None:
            handle = table.get(event)
            if handle is not None and not recorder.quiet:
                hushed = recorder.hush(True)
                try:
                    handle(*args)
                except Exception:  # noqa: BLE001  # an error here would fail the user's operation
                    recorder.trouble(event)
                finally:
                    recorder.hush(hushed)

        sys.addaudithook(hook)
        recorder.undo.append(table.clear)

    def _open(self, path: object, mode: object, flags: object) -> None:
        name = _text(path)
        if name is None or not isinstance(flags, int) or flags & os.O_DIRECTORY:
            return
        self._opened(name, flags)
        if mode is None and not os.path.isabs(name):
            # os.open, which may be relative to a descriptor; the event does not say to which.
            for directory in {of_descriptor(number) for number in os.listdir("/proc/self/fd")}:
                if (
                    directory
                    and directory.startswith("/")
                    and os.path.isdir(directory)
                    and self.recorder.tree.directory(directory) is not None
                ):
                    self._opened(os.path.join(directory, name), flags)

    def _opened(self, name: str, flags: int) -> None:
        access = flags & os.O_ACCMODE
        if access != os.O_WRONLY and not flags & os.O_TRUNC:
            self._read(name)
        if access != os.O_RDONLY:
            self.recorder.tell_names(WRITE, name)

    def _read(self, name: str) -> None:
        if name.endswith(".pyc") and "__pycache__" in name:
            directory, file = os.path.split(os.path.dirname(os.path.abspath(name)))[0], os.path.basename(name)
            self.recorder.tell_names(WHOLE, os.path.join(directory, file.split(".")[0] + ".py"))
        elif not (name.endswith(".py") and self._for_a_tool(sys._getframe(1))):
            self.recorder.tell_names(READ, name)
            self._through(name, sys._getframe(1))

    def _through(self, name: str, frame: FrameType | None) -> None:
        """What other people's code reads it may keep, and give to the next who comes by the same function of the project."""
        paths = self.recorder.tree.names(name)
        while paths and frame is not None and frame.f_code.co_filename.startswith(OPENERS):
            frame = frame.f_back
        kind = BY
        while paths and frame is not None:
            nearest = self.recorder.tree.source(frame.f_code.co_filename)
            if nearest is not None:
                for path in paths:
                    self.recorder.tell(kind, path, f"{nearest}\0{frame.f_code.co_qualname}")
                return
            kind, frame = THROUGH, frame.f_back

    def _for_a_tool(self, frame: FrameType | None) -> bool:
        """Whether a tool opens a source by its own hand; through anything else (linecache, a test's function) it is the test's."""
        while frame is not None and frame.f_code.co_filename.startswith(OPENERS):
            frame = frame.f_back
        name = frame.f_code.co_filename if frame is not None else ""
        return any(part in name for part in READERS) and self.recorder.tree.source(name) is None

    def _read_any(self, path: object, *rest: object) -> None:  # noqa: ARG002
        name = _text(path)
        if name is not None and "/" in name:
            self.recorder.tell_names(READ, name)

    def _database(self, path: object, *rest: object) -> None:  # noqa: ARG002
        name = _text(path)
        if name is not None and name.startswith("file:"):
            name = name[5:].partition("?")[0].partition("#")[0].removeprefix("//")
        if name and name != ":memory:":
            # One that is not there is made by connecting.
            self.recorder.tell_names(READ if os.access(name, os.F_OK) else WRITE, name)

    def _written(self, path: object, *rest: object) -> None:
        name = _text(path)
        descriptor = next((part for part in reversed(rest) if isinstance(part, int) and part >= 0), None)
        if name is not None and descriptor is not None and not os.path.isabs(name) and len(rest) <= 2:
            name = os.path.join(of_descriptor(descriptor) or "", name)
        if name is not None:
            self.recorder.tell_names(WRITE, name)

    def _made(self, path: object, *rest: object) -> None:
        name = _text(path)
        if name is not None and not os.path.isdir(name):  # else it fails, as in makedirs(exist_ok=True)
            self._written(path, *rest)

    def _unpickled(self, module: object, name: object) -> None:  # noqa: ARG002
        """A module that is there already is taken from sys.modules, and nothing else tells of it."""
        found = sys.modules.get(module) if isinstance(module, str) else None
        file = getattr(found, "__file__", None)
        relative = self.recorder.tree.source(file) if isinstance(file, str) else None
        if relative is not None:
            self.recorder.tell(LOAD, "", relative)

    def _linked(self, source: object, target: object, *rest: object) -> None:  # noqa: ARG002
        """A link writes nothing but itself; what a hard link shows cannot be told apart from its source later."""
        name = _text(source)
        if name is not None:
            self.recorder.tell_names(READ, name)
        self._written(target)

    def _moved(self, source: object, target: object, *rest: object) -> None:  # noqa: ARG002
        self._written(source)
        self._written(target)

    def _list(self, path: object) -> None:
        if not asked_by_a_test(self.recorder, sys._getframe(1)):
            return
        name = "." if path is None else of_descriptor(path) if isinstance(path, int) else _text(path)
        relative = None if name is None else self.recorder.tree.directory(name)
        if relative is not None:
            self.recorder.tell(LIST, relative)

    def _popen(self, executable: object, args: object, cwd: object, env: object) -> None:  # noqa: ARG002
        given = [args] if isinstance(args, (str, bytes, os.PathLike)) or not isinstance(args, Sequence) else list(args)
        self._spawn(given, cwd, env)

    def _exec(self, path: object, args: object, env: object) -> None:
        # Trying one directory after the other, and subprocess by posix_spawn, tell the same thing again: it counts once.
        self._spawn(list(args) if isinstance(args, Sequence) else [path], None, env, count=False)

    def _spawn(self, args: list[Any], cwd: object, env: object, *, count: bool = True) -> None:
        self.recorder.called(STARTED, sys._getframe(3))  # over the handler and the hook
        argv = json.dumps([_text(part) or "" for part in args])
        place = os.path.abspath((_text(cwd) if cwd is not None else None) or ".")
        if not _reports(os.environ if env is None else env):
            self.recorder.tell(MUTE, argv, place)
            return
        epoch = int(self.recorder.cell[0])
        if self._spawned[0] != epoch:
            self._spawned = (epoch, {})
        times = self._spawned[1][argv, place] = self._spawned[1].get((argv, place), 0) + count
        self.recorder.tell(SPAWN, argv, place if times < 2 else f"{place}\0{times}")


def _text(path: object) -> str | None:
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else None


def _reports(env: object) -> bool:
    """Whether a process with these variables finds our sitecustomize, and hears where to report."""
    if not isinstance(env, Mapping):
        return True
    given = {os.fsdecode(name): value for name, value in env.items() if name in WANTED}
    return "SEATRIAL_SELECT" in given and START in os.fsdecode(given.get("PYTHONPATH", "")).split(os.pathsep)


def of_descriptor(number: object) -> str | None:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return None


def asked_by_a_test(recorder: TraceRecorder, frame: FrameType | None) -> bool:
    """False when importlib, pytest or a tool that measures asked; a project's own file is none of these, wherever it lies."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(("<frozen importlib", METADATA)):
            return False
        if not name.startswith(PASSED_ON):
            return not is_tool(recorder, name)
        frame = frame.f_back
    return True


def is_tool(recorder: TraceRecorder, name: str) -> bool:
    """Whether a file is pytest's or that of a tool that measures."""
    return any(part in name for part in NOT_TESTS) and recorder.tree.source(name) is None


PATH_FUNCTIONS = ("exists", "lexists", "isfile", "isdir")
METHODS = ("exists", "is_file", "is_dir", "is_symlink", "is_mount", "is_fifo", "is_socket", "is_block_device", "is_char_device")
ABILITIES = (os.supports_dir_fd, os.supports_effective_ids, os.supports_fd, os.supports_follow_symlinks)
"""Whoever has a wrapper in hand looks it up there."""
LINECACHE, SHUTIL = f"{LIBRARY}linecache.py", f"{LIBRARY}shutil.py"


class QuestionHooks:
    def __init__(self, recorder: TraceRecorder) -> None:
        self.recorder = recorder
        self._tools: dict[str, bool] = {}

    def install(self) -> None:
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
            name = os.path.join(of_descriptor(descriptor) or "", name)
        self.recorder.tell_names(kind, name)

    def _looked_for(self, name: Any, given: Mapping[str, Any]) -> None:
        """Whether there is such a module; a relative name is left to those who import it."""
        if isinstance(name, str) and not name.startswith(".") and asked_by_a_test(self.recorder, sys._getframe(2)):
            tail = name.replace(".", "/")
            for base in sys.path:
                for candidate in (f"{base or '.'}/{tail}.py", f"{base or '.'}/{tail}", f"{base or '.'}/{tail}/__init__.py"):
                    self._tell(EXISTS, candidate, given)

    def _lines(self, path: Any, given: Mapping[str, Any]) -> None:  # noqa: ARG002
        if isinstance(path, str) and (relative := self.recorder.tree.source(path)) is not None:
            self.recorder.tell(READ, relative)
