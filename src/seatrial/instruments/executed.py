"""Which functions of the changed files really run in this process. Runs inside a loop's interpreter.

`changed.json` of the level directory names the changed files (repository, path, SHA-256 of the contents). What runs of them is appended
to `executed.jsonl` beside it: one row per process that watches, then rows of functions by name, first line and column.

- No function is wrapped, no bytecode rewritten. The code object of a changed file is kept as Python's loader returns it, and with it every
  function in it, whoever binds, copies or decorates them.
- Python 3.12 and newer report each function once by `sys.monitoring`. Older ones count the first runs of every code object; that counter is
  read now and then, from where a function of ours shows that it lies. Where neither works, the first row says so. (Before 3.11 a generator
  that is made and dropped before it began counts as run.)
- torch.compile runs other code in place of a function: Dynamo tells us of it. A function that cloudpickle sends is taken up on arrival.
- What runs while the interpreter starts (`sitecustomize`, `.pth` files) was not run by the loop, and does not count.
- Standard library only, Python 3.9 or newer. Nothing here raises into the loop: what fails is said in a row.
"""

from __future__ import annotations

import atexit
import functools
import gc
import hashlib
import importlib.machinery
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from seatrial.instruments import facts, provenance

CHANGED, EXECUTED = "changed.json", "executed.jsonl"
VARIABLE = "SEATRIAL_EXECUTED"  # the level directory, for processes that this one starts
START = str(Path(__file__).parent / "start")  # the directory whose sitecustomize starts the recorder in such processes
MODULE, LAMBDA = "<module>", "<lambda>"
PARTS = 3  # how much of a path must agree, beside the contents: a checkout may be mounted or copied elsewhere
EVERY_S = 0.25  # how often the counters are read: a process that is killed loses what first ran since
SHARE = 100  # of the time: what reading them may take at most, where there are very many
HIDDEN = "<frozen importlib._bootstrap_external>"  # frames with this file name are left out of tracebacks of failed imports
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
CLOUDPICKLES = ("ray.cloudpickle.cloudpickle", "cloudpickle.cloudpickle")
DYNAMO = "torch._dynamo.convert_frame"
MONITORING: Any = getattr(sys, "monitoring", None)  # of Python 3.12 and newer

Function = tuple[str, int, int]
Count = Callable[[CodeType], int]


@dataclass(frozen=True)
class Changed:
    repo: str
    path: str
    sha256: str

    def is_at(self, file: str) -> bool:
        """Whether `file` is this one, wherever its tree lies."""
        mine, other = Path(self.path).parts[-PARTS:], Path(file).parts
        if other[-len(mine) :] != mine:
            return False
        try:
            return hashlib.sha256(Path(file).read_bytes()).hexdigest() == self.sha256
        except OSError:
            return False


@dataclass
class PendingCode:
    """The code objects of one loaded file that have not run yet, each with the counter that it had when the loop began."""

    changed: Changed
    waiting: dict[int, tuple[CodeType, int]] = field(default_factory=dict)
    startup: bool = False  # the interpreter itself loaded it, and what it runs until its start is over does not count


class ExecutedRecorder:
    def __init__(self, directory: str, process: str, changed: list[Changed]) -> None:
        self.path, self.process = str(Path(directory, EXECUTED)), process
        self.names: dict[str, list[Changed]] = {}
        for item in changed:
            self.names.setdefault(Path(item.path).name, []).append(item)
        self.kept: list[PendingCode] = []
        self.owners: dict[int, tuple[PendingCode, CodeType]] = {}
        """By identity, which holds only as long as the code object lives: so all of them are kept."""
        self.found: dict[str, Changed | None] = {}
        self.patched: set[str] = set()
        self.lock = threading.RLock()
        self.thread: threading.Thread | None = None
        self.count: Count | None = None
        self.fresh, self.tool, self.main = 0, 0, False

    def start(self, fresh: bool) -> None:
        """Watch from here on; `fresh`: nothing of the loop ran so far, so that what is loaded was loaded by the interpreter."""
        why = self._monitor() if MONITORING else ""
        if not MONITORING:
            try:
                self.count, self.fresh = calibrated()
            except (ImportError, ValueError, OSError, AttributeError) as error:
                why = f"the run counter of code objects was not found: {error}"
        method = None if why else "monitoring" if self.tool else "counter"
        row = {"process": self.process, "pid": os.getpid(), "method": method, "python": sys.version.split()[0]}
        facts.append(self.path, {**row, "why": why} if why else row)
        if why or not self.names:
            return
        self._hook_loader()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.flush)
        self._hook_exit()
        self._loaded_already(fresh)
        self.main = any(Path(word).name in self.names for word in getattr(sys, "orig_argv", sys.argv))
        if self.main:  # no loader loads the program itself
            if self.tool:
                MONITORING.set_events(self.tool, MONITORING.events.PY_START)
            self._poll()

    # The counters of Python before 3.12, and the events of later ones.

    def _monitor(self) -> str:
        for tool in (4, 3):
            if MONITORING.get_tool(tool) is None:
                MONITORING.use_tool_id(tool, "seatrial")
                MONITORING.register_callback(tool, MONITORING.events.PY_START, self._started)
                self.tool = tool
                return ""
        return "other tools hold sys.monitoring"

    def _started(self, code: CodeType, _offset: int) -> Any:
        """A function of a changed file begins to run: called by Python, once for each."""
        kept = self._owner(code)
        if kept is None and self.main and code.co_name == MODULE and Path(code.co_filename).name in self.names:
            MONITORING.set_events(self.tool, 0)
            self.keep(code, code.co_filename)
            kept = self._owner(code)
        if kept is None:
            return MONITORING.DISABLE
        self._settle()
        if kept.startup:
            return None
        self.ran(code)
        return MONITORING.DISABLE

    # What is kept.

    def keep(self, code: CodeType, file: str) -> None:
        changed = self._changed(file)
        if changed is not None:
            with self.lock:
                kept = PendingCode(changed, startup=starting())
                self.kept.append(kept)
                self._add(kept, code)
            self._poll()

    def _add(self, kept: PendingCode, code: CodeType) -> None:
        for inner in nested(code):
            if id(inner) in self.owners:
                continue
            # A code object that is fresh has not run; of one that the loop found running, the first runs are the loop's.
            kept.waiting[id(inner)] = inner, self.fresh
            self.owners[id(inner)] = kept, inner
            if self.tool:
                MONITORING.set_local_events(self.tool, inner, MONITORING.events.PY_START)

    def _owner(self, code: CodeType) -> PendingCode | None:
        found = self.owners.get(id(code))
        return found[0] if found else None

    def _changed(self, file: str) -> Changed | None:
        candidates = self.names.get(Path(file).name, ())
        if not candidates:
            return None
        if file not in self.found:
            self.found[file] = next((item for item in candidates if item.is_at(file)), None)
        return self.found[file]

    def _loaded_already(self, fresh: bool) -> None:
        """Files that were loaded before: their modules' code is gone, their functions are found."""
        files = {file for module in list(sys.modules.values()) if isinstance(file := getattr(module, "__file__", None), str)}
        late = {file: changed for file in files if (changed := self._changed(file))}
        if not late:
            return
        fresh = fresh or provenance.customized()
        made = {file: PendingCode(changed, startup=fresh) for file, changed in late.items()}
        codes = {id(item.__code__): item.__code__ for item in gc.get_objects() if isinstance(item, FunctionType)}
        with self.lock:
            self.kept += made.values()
            for code in codes.values():
                if code.co_filename in made:
                    self._add(made[code.co_filename], code)
            if not fresh:
                for changed in late.values():
                    self._tell(changed, [(MODULE, 1, 0)])
        self._settle()
        self._poll()

    # What ran.

    def ran(self, code: CodeType) -> None:
        """This code runs, or is compiled by somebody who runs it in his own way."""
        with self.lock:
            kept = self._owner(code)
            if kept is not None and id(code) in kept.waiting:
                del kept.waiting[id(code)]
                self._tell(kept.changed, [described(code)])

    def flush(self) -> None:
        """Tell what ran since the last time."""
        if not self.lock.acquire(timeout=1):
            return  # interrupted in the middle of it, or by a fork: the process ends
        try:
            if self.main:
                self._look_at_main()
            self._hook_others()
            self._settle()
            if self.count is None:
                return
            for kept in self.kept:
                if kept.startup:
                    continue
                done = [code for code, before in kept.waiting.values() if self.count(code) != before]
                for code in done:
                    del kept.waiting[id(code)]
                if done:
                    self._tell(kept.changed, [described(code) for code in done])
        finally:
            self.lock.release()

    def _settle(self) -> None:
        """Once the interpreter has started, what it loaded begins to count: from the runs that it has made by then."""
        if not any(kept.startup for kept in self.kept) or starting():
            return
        with self.lock:
            for kept in self.kept:
                if kept.startup:
                    kept.startup = False
                    if self.count is not None:
                        kept.waiting = {key: (code, self.count(code)) for key, (code, _) in kept.waiting.items()}

    def _tell(self, changed: Changed, functions: list[Function]) -> None:
        rows = [list(item) for item in functions if item[0] not in COMPREHENSIONS]
        if rows:
            row = {"process": self.process, "pid": os.getpid(), "repo": changed.repo, "path": changed.path, "ran": rows}
            try:
                facts.append(self.path, row)
            except OSError as error:  # a full disk is the loop's to complain about
                print(f"seatrial: executed functions were not recorded: {error}", file=sys.stderr, flush=True)

    def _poll(self) -> None:
        """Look at the counters from time to time, as long as something waits."""
        if self.count is not None and self.thread is None:
            self.thread = threading.Thread(target=self._look, name="seatrial-executed", daemon=True)
            self.thread.start()

    def _look(self) -> None:
        pause, spent = threading.Event(), 0.0
        while not pause.wait(max(EVERY_S, SHARE * spent)):
            began = time.perf_counter()
            self.flush()
            spent = time.perf_counter() - began

    def _forked(self) -> None:
        """In a child: locks may be held by threads that are not here, and nobody looks at the counters."""
        self.lock, polled, self.thread = threading.RLock(), self.thread is not None, None
        if polled:
            self._poll()

    # Where code comes from.

    def _hook_loader(self) -> None:
        before: Any = importlib.machinery.SourceFileLoader.get_code
        names, keep, others, settle = self.names, self.keep, self._hook_others, self._settle

        def get_code(self: Any, fullname: str) -> Any:
            code = before(self, fullname)
            try:
                path = self.path
                if path[path.rfind("/") + 1 :] in names and code is not None:
                    keep(code, path)
                others()
                settle()
            except Exception as error:  # noqa: BLE001 - whatever it is, the import goes on as without us
                print(f"seatrial: executed functions are not recorded of {fullname}: {error!r}", file=sys.stderr, flush=True)
            return code

        loader: Any = importlib.machinery.SourceFileLoader
        loader.get_code = hidden(get_code)

    def _hook_exit(self) -> None:
        """Workers that are forked leave by `os._exit`, which runs nothing that was registered."""
        leave, flush = os._exit, self.flush

        @functools.wraps(leave)
        def _exit(status: int) -> Any:
            flush()
            leave(status)

        os._exit = _exit

    def _hook_others(self) -> None:
        """Who runs or makes code in other ways, once it is loaded."""
        for name in (DYNAMO, *CLOUDPICKLES):
            module: Any = None if name in self.patched else sys.modules.get(name)
            ready = "register_bytecode_hook" if name == DYNAMO else "_make_function"
            if module is not None and hasattr(module, ready):
                self.patched.add(name)
                try:
                    (self._hook_dynamo if name == DYNAMO else self._hook_cloudpickle)(module)
                except (AttributeError, KeyError, TypeError) as error:  # another release: what it runs is then not seen
                    print(f"seatrial: what {name} runs is not recorded: {error!r}", file=sys.stderr, flush=True)

    def _hook_dynamo(self, module: Any) -> None:
        def compiled(code: CodeType, _made: CodeType) -> None:
            self.ran(code)

        module.register_bytecode_hook(compiled)
        translator = sys.modules["torch._dynamo.symbolic_convert"].InliningInstructionTranslator
        before = translator.__dict__["inline_call_"]
        inner = before.__func__ if isinstance(before, staticmethod) else before

        @functools.wraps(inner)
        def inline_call_(*arguments: Any, **named: Any) -> Any:
            # A method of the translator of one call; in older releases a function of the caller's translator and the function.
            code = getattr(arguments[0], "f_code", None) if inner is before else getattr(arguments[1], "get_code", lambda: None)()
            if code is not None:
                self.ran(code)
            return inner(*arguments, **named)

        translator.inline_call_ = inline_call_ if inner is before else staticmethod(inline_call_)

    def _hook_cloudpickle(self, module: Any) -> None:
        before = module._make_function

        @functools.wraps(before)
        def _make_function(*arguments: Any, **named: Any) -> Any:
            code = arguments[0] if arguments else None
            if isinstance(code, CodeType) and Path(code.co_filename).name in self.names:
                self.keep(code, code.co_filename)
            return before(*arguments, **named)

        module._make_function = _make_function

    def _look_at_main(self) -> None:
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        if not isinstance(file, str) or Path(file).name not in self.names:
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            if frame.f_code.co_filename == file and frame.f_code.co_name == MODULE and id(frame.f_code) not in self.owners:
                self.keep(frame.f_code, file)
            frame = frame.f_back


RECORDER: ExecutedRecorder | None = None


def start(directory: str, process: str, fresh: bool = True, inherit: bool = False) -> ExecutedRecorder | None:
    """Start the recorder of this process, once. With `inherit`, Pythons that it starts get one, too.

    Nothing is recorded where the level directory names no changed file.
    """
    global RECORDER
    file = Path(directory, CHANGED)
    if RECORDER is not None:
        RECORDER.process = process
        return RECORDER
    if not file.is_file():
        return None
    changed = [Changed(item["repo"], item["path"], item["sha256"]) for item in json.loads(file.read_text(encoding="utf-8"))["files"]]
    if inherit:
        os.environ[VARIABLE] = directory
        entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != START]
        os.environ["PYTHONPATH"] = os.pathsep.join([START, *entries])
    RECORDER = ExecutedRecorder(directory, process, changed)
    RECORDER.start(fresh)
    return RECORDER


def flush() -> None:
    """Write what ran so far, at the end of a process that has one."""
    if RECORDER is not None:
        RECORDER.flush()


def nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from nested(item)


def described(code: CodeType) -> Function:
    """Name, first line, and of a lambda the column where its body begins: several may share a line."""
    column = 0
    if code.co_name == LAMBDA and hasattr(code, "co_positions"):
        # An instruction at the beginning of the line stands for the lambda as a whole.
        column = min(((line, left) for line, _, left, _ in code.co_positions() if line and left), default=(0, 0))[1]
    return code.co_name, code.co_firstlineno, column


def calibrated() -> tuple[Count, int]:
    """A reader of the counter that the interpreter keeps in each code object, and what a fresh one holds; ValueError if there is none."""
    import ctypes

    fresh = [_control() for _ in range(3)]
    size = CodeType.__basicsize__
    before = [ctypes.string_at(id(function.__code__), size) for function in fresh]
    after = []
    for times, function in enumerate(fresh, 1):
        for _ in range(times):
            function()
        after.append(ctypes.string_at(id(function.__code__), size))
    places = []
    for place in range(object.__basicsize__, size - 1, 2):
        values = [int.from_bytes(data[place : place + 2], sys.byteorder, signed=True) for data in (*before, *after)]
        first = values[0]
        if values == [first, first, first, first + 1, first + 2, first + 3]:
            places.append((place, first))
    if len(places) != 1:
        raise ValueError(f"{len(places)} candidates in Python {sys.version.split()[0]}")
    place, first = places[0]

    def count(code: CodeType) -> int:
        return int(ctypes.c_int16.from_address(id(code) + place).value)

    return count, first


def _control() -> Callable[[], object]:
    def control() -> object:
        return None

    return FunctionType(control.__code__.replace(), {})


def hidden(function: Any) -> Any:
    """The function, with frames that Python leaves out of tracebacks of failed imports."""
    function.__code__ = function.__code__.replace(co_filename=HIDDEN)
    return function


def starting() -> bool:
    """Whether the interpreter is still starting: what runs now is run by it, not by the loop."""
    return provenance.in_startup(sys._current_frames().get(threading.main_thread().ident or 0))
