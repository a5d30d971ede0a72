"""The recorder: turns hits, imports and opened files into events, each once per epoch.

- The epoch is one number in a file that every process maps: the pytest process writes it, the others read it. So a worker knows which
  test its work belongs to without being told.
- `Hit` is what instrumented code touches: a mapping whose missing items are what has not been hit in this epoch. In the pytest process
  a switch empties it, and what was in it is what was hit; elsewhere (`ChildHit`) the kept epoch is compared each time.
- A block that keeps something empties the mapping each time it is entered: all that runs then is told again, with who called it, so that
  it is known what a kept value was made of.
- While a module is being imported, hits and files belong to it (per thread), and nothing is kept in the mapping: another thread may be
  running a test at that moment, and each must be told for itself.
- A function that is pickled by value finds the recorder of the process where it is loaded, or a stand-in that does nothing.
- The pytest process keeps events (`drain`), and keeps them flat, one field after the other: objects would make garbage collections more
  frequent, and these look through everything that pytest holds. Every other process writes them at once, also after a fork.
"""

from __future__ import annotations

import _thread
import builtins
import os
import sys
from types import FrameType
from typing import Any

from seatrial.regress.select.trace.blocks import KEEPS
from seatrial.regress.select.trace.events import AGAIN, CALL, HIT, LOAD, RAY_TASK, TASK, TROUBLE, WHOLE, Event, Kept
from seatrial.regress.select.trace.logs import FORK, Log
from seatrial.regress.select.trace.name import NAME
from seatrial.regress.select.trace.paths import Tree

STAND_IN = range(1 << 63)
"""Where nothing is recorded: every number is an item of it."""
OFTEN = 1000
"""Calls of one keeper in one epoch after which it is too dear to look at each."""


class Hit(dict[int, int]):
    """What instrumented functions touch."""

    recorder: Recorder

    def __missing__(self, number: int) -> None:
        self.recorder.entered(number)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (builtins, NAME, STAND_IN)

    def __deepcopy__(self, memo: object) -> Hit:
        return self

    def __copy__(self) -> Hit:
        return self

    def __repr__(self) -> str:
        return f"<{NAME}>"


class ChildHit(Hit):
    """The same where the epoch is switched by another process."""

    def __getitem__(self, number: int) -> None:  # type: ignore[override]  # nobody uses the value
        recorder = self.recorder
        if self.get(number) != recorder.cell[0]:
            recorder.entered(number)


class Recorder:
    """Of one process."""

    def __init__(self, session: str, tree: Tree, cell: memoryview, log: Log | None) -> None:
        self.session = session
        self.tree = tree
        self.cell = cell
        self.log = log
        self.running = True
        self.outer: Recorder | None = None
        """Of a session inside a session: what we instrument, it must take whole."""
        self.inner: Recorder | None = None
        """The same from the other side: what it claims is not ours to instrument."""
        self.hit = Hit() if log is None else ChildHit()
        self.hit.recorder = self
        self.undo: list[Any] = []
        self._kept = Kept([], [], [])
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

    def drain(self) -> Kept:
        """What the pytest process did since the last time."""
        if self.running:
            with self._lock:
                self._collect(self.cell[0])
        # Another thread may be adding at the end of a list, four at once.
        found = Kept(*(fields[: len(fields)] for fields in self._kept))
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
            self._tell(HIT, epoch, str(number & (KEEPS - 1)), importing)

    def _noted(self, number: int, epoch: int) -> bool:
        """Look at the call of a keeper; False when there were so many in this epoch that no more are looked at."""
        at, times = self._times.get(number, (epoch, 0))
        times = times + 1 if at == epoch else 1
        self._times[number] = epoch, times
        # What is kept may come from any of what runs from here on, and who called it is to be known.
        self._empty()
        if times >= OFTEN:
            self.tell(AGAIN, str(number & (KEEPS - 1)), "")
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
                        self.tell(CALL, str(call[0]), "\0".join(map(str, call[1:])))
                return
            if ends[file] if file in ends else self._is_end(file):
                return
            frame = frame.f_back

    def _is_end(self, file: str) -> bool:
        """Whether nobody of the project is further up: pytest calls tests and fixtures for nobody."""
        found = self._ends[file] = "/_pytest/" in file or "/pluggy/" in file
        return found

    def tell(self, kind: str, a: str, b: str | None = None) -> None:
        """An event of now; `b` is the module being imported unless it is given."""
        self._tell(kind, self.cell[0], a, self.context() if b is None else b)

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
            if self.log.kind == "ray":
                self._tell_ray(epoch)
            self.log.write(Event(*event))
        finally:
            local["quiet"] = quiet

    def _tell_ray(self, epoch: int) -> None:
        assert self.log is not None
        state = _ray_state()
        if state not in ("", self._ray):
            self._ray = state
            self.log.write(Event(TASK, epoch, RAY_TASK if state == RAY_TASK else ""))

    # imports

    def context(self) -> str:
        """Path of the module that this thread is importing, or ""."""
        stack = self._local.__dict__.get("stack")
        return stack[-1] if stack else ""

    def begin(self, path: str) -> None:
        """A module starts to execute in this thread."""
        self.loaded(path, sys._getframe(1))
        self._local.__dict__.setdefault("stack", []).append(path)
        self._importing.append(path)
        self._empty()

    def end(self) -> None:
        """It has ended, well or not."""
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
                self.tell(LOAD, importer, path)

    def claims(self, file: str) -> str | None:
        """The path of a source that this recorder instruments."""
        if not self.running or (self.inner is not None and self.inner.claims(file) is not None):
            return None
        return self.tree.source(file)

    def whole(self, path: str, context: str | None = None) -> None:
        """Any block of the file may be executed from now on."""
        self.tell(WHOLE, path, context)

    def outside(self, file: str) -> None:
        """A source was loaded that is not the project's; one that is nobody's distribution counts for everybody."""
        path = self.tree.beside(file)
        if path is not None:
            self.tell(WHOLE, path, "")

    def trouble(self, what: str) -> None:
        """Something could not be understood: the epoch is to be taken with care."""
        self.tell(TROUBLE, what, "")

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

    # processes

    def forked(self) -> None:
        """In a new process that has all of our memory."""
        if not self.running:
            return
        self.log = Log(self.session, FORK + (self.log.name if self.log else ""))
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


def active() -> Recorder | None:
    """The recorder of this process, also one that another copy of this module made."""
    found = getattr(getattr(builtins, NAME, None), "recorder", None)
    return found if found is not None and found.running else None


def register(recorder: Recorder) -> None:
    """Make it the one that instrumented code finds, and follow forks."""
    setattr(builtins, NAME, recorder.hit)
    os.register_at_fork(after_in_child=recorder.forked)
