"""The recorder: turns hits, imports and opened files of the project into events, each once per epoch.

- `ProjectTree` says which files are the project's: below the root, outside of environments and caches.
"""

from __future__ import annotations

import _thread
import builtins
import fnmatch
import os
import stat
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from pytest_seatrial.select.trace import trace_events as kinds
from pytest_seatrial.select.trace.instrument import KEEPS
from pytest_seatrial.select.trace.trace_events import HIT_NAME, RAY_TASK, Event, EventLog, KeptWork

# Paths are text here: pathlib may not be loaded yet, and what it does is watched.
# ruff: noqa: PTH100, PTH118, PTH120


SKIPPED = frozenset({".git", "site-packages", "node_modules", "__pycache__", ".tox", ".nox", ".pytest_cache", ".seatrial-select"})
STATE = ".seatrial-select"
ENVIRONMENT = "pyvenv.cfg"
INSTALLED = ("/site-packages/", "/dist-packages/")
LIBRARY = os.path.realpath(os.path.dirname(os.__file__)) + "/"
OURS = os.path.realpath(__file__).removesuffix("select/trace/trace_recorder.py")


class ProjectTree:
    def __init__(self, root: str, skip: Sequence[str] = (), apart: Sequence[str] = ()) -> None:
        """`skip`: globs of files that are not instrumented; `apart`: directories of our own that are no part of it."""
        self.root = os.path.realpath(root)
        self.skip = tuple(skip)
        self._apart = tuple(os.path.realpath(path) for path in apart)
        self._prefix = self.root.rstrip("/") + "/"
        self._directories: dict[str, str | None] = {}
        self.sources: dict[str, str | None] = {}  # what `source` has found already

    def relative(self, path: str) -> str | None:
        """Below the root, or None for what is not the project's."""
        return next(iter(self.names(path)), None)

    def names(self, path: str) -> list[str]:
        """All names below the root that this path stands for: its own, and that of the file which it links to."""
        if not _possible(path):
            return []
        directory, name = os.path.split(os.path.abspath(path))
        found = []
        above = self._directory(directory)
        if above is not None and not name.startswith(STATE) and name not in SKIPPED:
            found.append(f"{above}/{name}" if above else name)
        if name and stat.S_ISLNK(_mode(path, os.lstat)):
            target = os.path.realpath(path)
            directory, name = os.path.split(target)
            above = self._directory(directory)
            if above is not None and not name.startswith(STATE):
                found.append(f"{above}/{name}" if above else name)
        own = os.path.abspath(path)
        below = own.removeprefix(self._prefix)
        if found and below != own and below not in found:
            found.append(below)  # a directory on the way is a link, and may be another one tomorrow
        if not found and own == self.root:
            found.append("")
        return found

    def beside(self, filename: str) -> str | None:
        """Of a source that is not the project's: where it is, if its changes must be noticed."""
        if filename.startswith(("<", LIBRARY, OURS)) or any(part in filename for part in INSTALLED) or not _possible(filename):
            return None
        real = os.path.realpath(filename)
        if real.startswith((self._prefix, LIBRARY, OURS)) or any(part in real for part in INSTALLED) or self.left_alone(real):
            return None
        return real

    def directory(self, path: str) -> str | None:
        """The same of a directory; the root itself is ""."""
        return self._directory(os.path.abspath(path))

    def source(self, filename: str) -> str | None:
        """The project's file that a code object names; remembered."""
        if filename not in self.sources:
            self.sources[filename] = None if filename.startswith("<") else self.relative(filename)
        return self.sources[filename]

    def left_alone(self, relative: str) -> bool:
        """Whether a glob says that this file is not to be instrumented."""
        return any(fnmatch.fnmatch(relative, glob) for glob in self.skip)

    def _directory(self, path: str) -> str | None:
        if path in self._directories:
            return self._directories[path]
        found = self._resolve(path)
        if _mode(path, os.stat):  # one that is made later may be a link
            self._directories[path] = found
        return found

    def _resolve(self, path: str) -> str | None:
        real = os.path.realpath(path)
        if real == self.root:
            return ""
        if not real.startswith(self._prefix) or any(real == own or real.startswith(own + "/") for own in self._apart):
            return None
        below = real[len(self._prefix) :]
        parts = below.split("/")
        if not SKIPPED.isdisjoint(parts) or any(part.startswith(STATE) for part in parts):
            return None
        for count in range(1, len(parts) + 1):
            if stat.S_ISREG(_mode(os.path.join(self.root, *parts[:count], ENVIRONMENT), os.stat)):
                return None
        return below


def _possible(path: str) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _mode(path: str, ask: Callable[[str], os.stat_result]) -> int:
    """Of a file; 0 where there is none. Functions of os.path are watched, and this is called by the watcher."""
    try:
        return ask(path).st_mode
    except (OSError, ValueError):
        return 0


STAND_IN = range(1 << 63)  # where nothing is recorded: every number is an item of it
OFTEN = 1000  # calls of one keeper in one epoch after which it is too dear to look at each


class Hit(dict[int, int]):
    """What instrumented functions touch."""

    recorder: TraceRecorder

    def __missing__(self, number: int) -> None:
        self.recorder.entered(number)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (builtins, HIT_NAME, STAND_IN)

    def __deepcopy__(self, memo: object) -> Hit:
        return self

    def __copy__(self) -> Hit:
        return self

    def __repr__(self) -> str:
        return f"<{HIT_NAME}>"


class ChildHit(Hit):
    """The same where the epoch is switched by another process."""

    def __getitem__(self, number: int) -> None:  # type: ignore[override]  # nobody uses the value
        recorder = self.recorder
        if self.get(number) != recorder.cell[0]:
            recorder.entered(number)


class TraceRecorder:
    def __init__(self, session: str, tree: ProjectTree, cell: memoryview, log: EventLog | None) -> None:
        self.session = session
        self.tree = tree
        self.cell = cell
        self.log = log
        self.running = True
        self.outer: TraceRecorder | None = None  # of a session inside a session: what we instrument, it must take whole
        self.inner: TraceRecorder | None = None  # the same from the other side: what it claims is not ours to instrument
        self.hit = Hit() if log is None else ChildHit()
        self.hit.recorder = self
        self.undo: list[Any] = []
        self._kept = KeptWork([], [], [])
        self._again: tuple[int, set[int]] = (-1, set())  # an epoch in which the mapping was emptied: what was put aside for it then
        self._seen: set[tuple[str, int, str, str]] = set()
        self._seen_at = -1
        self._importing: list[str] = []
        self._local = _thread._local()
        self._lock = _thread.RLock()  # of a switch, and of emptying the mapping; hits do without
        self._ray = ""
        self._ends: dict[str, bool] = {}  # a file that is not the project's: whether a stack ends in it
        self._calls: set[int] = set()
        self._times: dict[int, tuple[int, int]] = {}  # a keeper: the epoch of its last call, and how many there were in it

    def switch(self, epoch: int) -> None:
        """What happens from now on belongs to another test or fixture. Only the pytest process says so."""
        if self.log is None and self.running:
            with self._lock:
                before = self.cell[0]
                self._collect(before)
                self.cell[0] = epoch
                if self.hit:
                    # By another thread at this moment: nobody can say whose it was, and both get it.
                    self._kept.hits.extend([-1 - before, *self.hit])

    def _collect(self, epoch: int) -> None:
        """Put aside what was hit in this epoch, to hear of it again. Another thread may be adding to the mapping at any moment: only what
        was seen is taken out of it, and goes into the list at once with its epoch."""
        numbers = list(self.hit)
        if numbers:
            at, told = self._again
            self._kept.hits.extend([-1 - epoch, *(numbers if at != epoch else [number for number in numbers if number not in told])])
            for number in numbers:
                self.hit.pop(number, None)

    def _empty(self) -> None:
        """All that is hit from here on is to be heard of again, in this epoch too."""
        if self.log is not None:
            self.hit.clear()
            return
        with self._lock:
            epoch = self.cell[0]
            at, told = self._again
            if at != epoch:
                at, told = self._again = epoch, set()
            numbers = list(self.hit)
            self._collect(epoch)
            told.update(numbers)

    def drain(self) -> KeptWork:
        """What the pytest process did since the last time."""
        if self.running:
            with self._lock:
                self._collect(self.cell[0])
        # Another thread may be adding at the end of a list, four at once.
        found = KeptWork(*(fields[: len(fields)] for fields in self._kept))
        for fields, taken in zip(self._kept, found, strict=True):
            del fields[: len(taken)]
        return found

    def stop(self) -> None:
        """Put everything back; what is instrumented already goes on and tells nobody."""
        if self.running:
            with self._lock:
                self._collect(self.cell[0])
                self.running = False
            for undo in reversed(self.undo):
                undo()
            self.hit.clear()

    def entered(self, number: int) -> None:
        """A block was entered for the first time in this epoch, or one that keeps something (`KEEPS`) at all."""
        before = self.cell[0]
        if self.log is None and number < KEEPS and not self._importing:
            self.hit[number] = before
            if self.cell[0] != before:
                # A switch in another thread at this moment: both epochs get it, since nobody can say whose it was.
                self._hit(number, (before, self.cell[0]), "")
        else:
            if number >= KEEPS and self._noted(number, before):
                pass  # it is to be heard of again
            elif not self._importing or not self.running:
                self.hit[number] = before
                if self._importing:
                    self.hit.pop(number, None)
            self._hit(number, (before, self.cell[0]), self.context() if self._importing else "")
        self.called(number, sys._getframe(2).f_back)  # over `Hit` and the block itself

    def _hit(self, number: int, epochs: tuple[int, int], importing: str) -> None:
        for epoch in {*epochs}:
            self._tell(kinds.HIT, epoch, str(number & (KEEPS - 1)), importing)

    def _noted(self, number: int, epoch: int) -> bool:
        """Look at the call of a keeper; False when there were so many in this epoch that no more are looked at."""
        at, times = self._times.get(number, (epoch, 0))
        times = times + 1 if at == epoch else 1
        self._times[number] = epoch, times
        # What is kept may come from any of what runs from here on, and who called it is to be known.
        self._empty()
        if times >= OFTEN:
            self.tell(kinds.AGAIN, str(number & (KEEPS - 1)), "")
        return times < OFTEN

    def called(self, number: int, frame: FrameType | None) -> None:
        """Who brought the block to run, and where: what it did may be kept by him."""
        sources, ends = self.tree.sources, self._ends
        while frame is not None:
            code = frame.f_code
            file = code.co_filename
            path = sources[file] if file in sources else self.tree.source(file)
            if path is not None:
                call = number & (KEEPS - 1), path, code.co_qualname, frame.f_lineno
                key = hash(call)  # the tuples themselves would be objects again
                if key not in self._calls:
                    self._calls.add(key)
                    if self.log is None:
                        self._kept.calls.extend(call)
                    else:
                        self.tell(kinds.CALL, str(call[0]), "\0".join(map(str, call[1:])))
                return
            if file not in ends:  # pytest calls tests and fixtures for nobody
                ends[file] = "/_pytest/" in file or "/pluggy/" in file
            if ends[file]:
                return
            frame = frame.f_back

    def tell(self, kind: str, a: str, b: str | None = None) -> None:
        """An event of now; `b` is the module being imported unless it is given."""
        self._tell(kind, self.cell[0], a, self.context() if b is None else b)

    def tell_names(self, kind: str, path: str) -> None:
        """An event of now for all names of a file."""
        for relative in self.tree.names(path):
            self.tell(kind, relative)

    def _tell(self, kind: str, epoch: int, a: str, b: str) -> None:
        if not self.running:
            return
        if self._seen_at != epoch:
            self._seen.clear()
            self._seen_at = epoch
        event = kind, epoch, a, b  # with its epoch: another thread may be a test behind
        if event in self._seen:
            return
        self._seen.add(event)
        if self.log is None:
            self._kept.events.extend(event)
            return
        local = self._local.__dict__
        quiet, local["quiet"] = local.get("quiet", 0), 1
        try:
            if self.log.kind == "ray" and (state := _ray_state()) not in ("", self._ray):
                self._ray = state
                self.log.write(Event(kinds.TASK, epoch, RAY_TASK if state == RAY_TASK else ""))
            self.log.write(Event(*event))
        finally:
            local["quiet"] = quiet

    def context(self) -> str:
        """Path of the module that this thread is importing, or ""."""
        stack = self._local.__dict__.get("stack")
        return stack[-1] if stack else ""

    def begin(self, path: str) -> None:
        self.loaded(path, sys._getframe(1))
        self._local.__dict__.setdefault("stack", []).append(path)
        self._importing.append(path)
        self._empty()

    def end(self) -> None:
        self._local.__dict__["stack"].pop()
        self._importing.pop()
        self._empty()

    def loaded(self, path: str, frame: FrameType | None) -> None:
        """Who asked for a module: the nearest project file on the stack, and the module that is being imported."""
        source = self.tree.source
        nearest = ""
        while frame is not None and not nearest:
            nearest = source(frame.f_code.co_filename) or ""
            frame = frame.f_back
        for importer in {nearest, self.context() or nearest}:
            if importer != path:
                self.tell(kinds.LOAD, importer, path)

    def claims(self, file: str) -> str | None:
        if not self.running or (self.inner is not None and self.inner.claims(file) is not None):
            return None
        return self.tree.source(file)

    def whole(self, path: str, context: str | None = None) -> None:
        """Any block of the file may be executed from now on."""
        self.tell(kinds.WHOLE, path, context)

    def outside(self, file: str) -> None:
        """A source was loaded that is not the project's; one that is nobody's distribution counts for everybody."""
        path = self.tree.beside(file)
        if path is not None:
            self.tell(kinds.WHOLE, path, "")

    def trouble(self, what: str) -> None:
        """Something could not be understood: the epoch is to be taken with care."""
        self.tell(kinds.TROUBLE, what, "")

    @property
    def quiet(self) -> bool:
        """Whether this thread is doing work of ours."""
        return bool(self._local.__dict__.get("quiet"))

    def hush(self, on: bool) -> bool:
        """Say whether what this thread opens is ours; returns what it was."""
        local = self._local.__dict__
        was = bool(local.get("quiet"))
        local["quiet"] = on
        return was

    def forked(self) -> None:
        """In a new process that has all of our memory."""
        if not self.running:
            return
        self.log = EventLog(self.session, kinds.FORK + (self.log.name if self.log else ""))
        self.hit.__class__ = ChildHit
        self.hit.clear()
        for fields in self._kept:
            fields.clear()
        self._seen.clear()
        self._importing = list(self._local.__dict__.get("stack") or ())
        self._local.__dict__["quiet"] = False


def _ray_state() -> str:
    """ray-task or ray-actor; "" while Ray is not far enough to know."""
    ray = sys.modules.get("ray")
    try:
        if ray is None or not ray.is_initialized():
            return ""
        return "ray-actor" if ray.get_runtime_context().get_actor_id() else RAY_TASK
    except Exception:  # noqa: BLE001  # Ray's own errors are many, and a worker must never die of being watched
        return ""


def active() -> TraceRecorder | None:
    """The recorder of this process, also one that another copy of this module made."""
    found = getattr(getattr(builtins, HIT_NAME, None), "recorder", None)
    return found if found is not None and found.running else None


def register(recorder: TraceRecorder) -> None:
    """Make it the one that instrumented code finds, and follow forks."""
    setattr(builtins, HIT_NAME, recorder.hit)
    os.register_at_fork(after_in_child=recorder.forked)
