"""One child process on this machine, from its start until nothing of it is left; its log, its progress, and how to stop it.

- The child has its own session, no standard input, and one log for standard output and error. Each complete line is stamped, filtered
  and on disk at once.
- It ends by itself, at its deadline, after silence (no output and no change in the watched files), on an interrupt, or when its
  `Control`, held by another thread, says so. All descendants end with it.
- A short command whose output is wanted is `runtime/command.py`'s.
- A silent run is dumped with py-spy, if that is installed, before it is ended. A dump that fails is reported in the log, never raised.
"""

from __future__ import annotations

import math
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psutil

from seatrial.core.errors import BlockedError
from seatrial.core.verdict import Boundary
from seatrial.runtime.command import NoAnswerError, run_command
from seatrial.runtime.interrupt import Interrupted, Interruptible, held, stop_requested
from seatrial.runtime.process_tree import (
    MARKER,
    ProcessTree,
    adopt_orphans,
    announced,
    collect_strays,
    die_with_parent,
    end_leftovers,
    write_pid_file,
)


class Control:
    """Given to one `process.run`; every method may be called from any thread."""

    def __init__(self) -> None:
        self.tree: ProcessTree | None = None
        """Set by the run when its child has started."""
        self.why = ""
        """Who asked first, for the log."""
        self._kill_at = math.inf

    def stop(self, why: str, grace_s: float) -> None:
        """Ask the run to end: SIGTERM now, SIGKILL to whatever is left after `grace_s`."""
        self.why = self.why or why
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    @property
    def asked(self) -> bool:
        """Whether the run was asked to end."""
        return self._kill_at < math.inf

    def left_s(self) -> float:
        """Seconds until SIGKILL; infinite while nobody asked."""
        return max(0.0, self._kill_at - time.monotonic())

    def peek(self) -> int | None:
        """Exit code of the child as of now, 128 + signal if one ended it; None while it runs or was never started."""
        return None if self.tree is None else self.tree.peek()


class FileWatch:
    """Remembers what the watched paths looked like."""

    def __init__(self, paths: tuple[Path, ...], every_s: float) -> None:
        self._paths = paths
        self._every_s = every_s
        self._looked = float("-inf")
        self._seen = self._look()

    def changed(self, now: float) -> bool:
        """Whether something changed since the last look; at most one look per `every_s` seconds of `now`."""
        if not self._paths or now - self._looked < self._every_s:
            return False
        self._looked = now
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> tuple[int, int, int]:
        """Number of files, sum of sizes, newest modification time."""
        count = size = newest = 0
        for path in self._paths:
            for found in (path, *files_below(path)):
                try:
                    state = found.stat()
                except OSError:
                    continue  # gone again, which the count shows
                count, size, newest = count + 1, size + state.st_size, max(newest, state.st_mtime_ns)
        return count, size, newest


def files_below(path: Path) -> Iterator[Path]:
    """Every file of a directory, at any depth."""
    for directory, _, names in os.walk(path):
        for name in names:
            yield Path(directory) / name


_TIMEOUT_S = 20
_MOST = 16
"""Processes that are dumped at most; the first ones are the outermost."""


def dump(processes: Iterable[psutil.Process]) -> str:
    """The stacks of the Python processes among `processes`, as text for the log."""
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool is None:
        return "no stacks: py-spy is neither on PATH nor beside Seatrial's interpreter (pip install py-spy)"
    pids = [process.pid for process in processes if _is_python(process)]
    if not pids:
        return "no stacks: the run has no Python process"
    found = []
    for pid in pids[:_MOST]:
        head = f"py-spy dump --pid {pid}"
        try:
            done = run_command([tool, "dump", "--pid", str(pid)], _TIMEOUT_S)
            found.append(f"{head}\n{done.out}{done.error}".rstrip())
        except NoAnswerError as error:
            found.append(f"{head}: {error}")
    return "\n".join(found)


def _is_python(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("python") or Path(process.exe()).name.startswith("python")
    except psutil.Error:
        return False


LineFilter = Callable[[str], str]

STAMP_LENGTH = len("2026-11-15T03:41:59.123Z ")
_MAX_LINE = 4 * 1024 * 1024


def stamp() -> str:
    """The present moment as it stands in front of a log line."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z") + " "


class LineLog:
    """Turns the bytes of a child into stamped and filtered lines of a log file."""

    def __init__(self, path: Path, line_filter: LineFilter) -> None:
        self._path = path
        self._filter = line_filter
        self._pending = bytearray()
        self.last_line = ""
        """The last complete line, filtered, without its stamp."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
            if (size := path.stat().st_size) and os.pread(self._file.fileno(), 1, size - 1) != b"\n":
                self._file.write(b"\n")  # a killed run left a line without its end
        except OSError as error:
            raise self._blocked(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def feed(self, data: bytes) -> None:
        """Take bytes from the child; complete lines are written at once."""
        head, newline, tail = data.rpartition(b"\n")
        if newline:
            self._pending += head
            complete, self._pending = self._pending, bytearray(tail)
            self._write(complete)
        else:
            self._pending += tail
        if len(self._pending) > _MAX_LINE:  # an endless line: cut at a blank, so that the filter sees every word whole
            cut = max(self._pending.rfind(b"\r"), self._pending.rfind(b" ")) + 1 or len(self._pending)
            complete, self._pending = self._pending[:cut], self._pending[cut:]
            self._write(complete)

    def note(self, text: str) -> None:
        """Write lines of Seatrial's own, marked as such, after what the child wrote so far."""
        self._flush()
        self._write("\n".join(f"[seatrial] {line}" for line in text.splitlines()).encode())

    def close(self) -> None:
        """Write what the child left without a newline, and close the file."""
        if not self._file.closed:
            try:
                self._flush()
            finally:
                self._file.close()

    def _flush(self) -> None:
        if self._pending:
            complete, self._pending = self._pending, bytearray()
            self._write(complete)

    def _write(self, complete: bytes | bytearray) -> None:
        lines = [self._filter(line) for line in complete.decode("utf-8", "backslashreplace").split("\n")]
        self.last_line = lines[-1]
        now = stamp()
        data = memoryview("".join(f"{now}{line}\n" for line in lines).encode("utf-8", "backslashreplace"))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise self._blocked(error) from error

    def _blocked(self, error: OSError) -> BlockedError:
        return BlockedError(
            Boundary.ENVIRONMENT,
            f"{self._path}: cannot write the log: {error.strerror or error}",
            "free space, or make the directory writable",
        )


__all__ = ["CannotStart", "Control", "Interrupted", "Interruptible", "Outcome", "ProcessSpec", "Tick", "end_leftovers", "pid_file", "run"]

Ended = Literal["exited", "deadline", "stalled", "interrupted"]

_TICK_S = 0.5
_WATCH_S = 5.0
_CHUNK = 1 << 20
_DRAIN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """Command, environment and time limits of a child process."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The whole environment; `SEATRIAL_RUN` is added."""
    cwd: Path
    log: Path
    run_id: str
    """Unique: leftovers of this run are found by it."""
    deadline_s: float
    stall_s: float
    watch: tuple[Path, ...] = ()
    """Files and directories; a change of size or time, or a new file, is progress as much as output is."""
    grace_s: float = 10.0
    """Between SIGTERM and SIGKILL."""
    line_filter: LineFilter = str
    """Applied to every line before it is written (the redactor); must return one line."""
    control: Control | None = None
    """Who ends the run, instead of an interrupt of Seatrial."""
    part: str = ""
    """Tells runs that share a log apart in the name of the pid file."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A sign of life, about every half second."""

    seconds: float
    last_line: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended and what it cost."""

    exit_code: int | None
    """128 + signal when a signal ended the child; None when Seatrial ended it."""
    signal: int | None
    """The signal that ended the child, whoever sent it."""
    ended: Ended
    seconds: float
    cpu_seconds: float = 0.0
    """Of the child and every descendant that could be accounted for."""
    peak_rss_mb: float = 0.0
    """Of the largest single process."""


class CannotStart(BlockedError):
    """The program is not there, or cannot be run."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(Boundary.ENVIRONMENT, message, "check that the program and the directory exist")
        self.code = code
        """The exit code that a shell would give."""


def pid_file(log: Path, part: str = "") -> Path:
    """Where the run that writes `log` notes its processes."""
    return log.with_name(f"{log.name}.{part}.pids" if part else f"{log.name}.pids")


TOGETHER_S = 1.0
"""How far apart the signals of a cluster to a child and to us may arrive, when they killed the child."""


def run_stoppable(spec: ProcessSpec, on_tick: Callable[[Tick], None] | None = None) -> Outcome:
    """`run`, but interrupted where Seatrial was asked to stop when the child failed. A cluster signals every process of a job at once, and
    the child may be gone a moment before our own signal is seen: it must not look as if the command had failed."""
    outcome = run(spec, on_tick)
    if outcome.ended != "exited" or outcome.exit_code == 0:
        return outcome
    stops = time.monotonic() + (TOGETHER_S if outcome.signal is not None else TOGETHER_S / 10)
    while not stop_requested() and time.monotonic() < stops:
        time.sleep(0.02)
    return replace(outcome, exit_code=None, ended="interrupted") if stop_requested() else outcome


def run(spec: ProcessSpec, on_tick: Callable[[Tick], None] | None = None) -> Outcome:
    """Run one child to its end. Raises a BlockedError when it cannot be started or the log cannot be written."""
    began = time.monotonic()
    if _asked(spec):
        return Outcome(None, None, "interrupted", 0.0)
    adopt_orphans()
    pids = pid_file(spec.log, spec.part)
    with announced(spec.run_id), LineLog(spec.log, spec.line_filter) as log, held() as release:
        write_pid_file(pids, spec.run_id)
        try:
            process = _start(spec)
        except Exception as error:  # then there is no child
            pids.unlink(missing_ok=True)
            if isinstance(error, CannotStart):
                log.note(error.message)
            raise
        tree, pipe = ProcessTree(process.pid, spec.run_id), _Pipe(process, log)
        if spec.control is not None:
            spec.control.tree = tree
        try:
            release()
            write_pid_file(pids, spec.run_id, process.pid)
            ended = _follow(spec, tree, pipe, log, on_tick)
            _close_down(spec, ended, tree, pipe, log)
        except BaseException:
            if not tree.end(0, time.sleep):
                pids.unlink(missing_ok=True)
            raise
        finally:
            process.returncode = 0 if tree.status is None else tree.status  # collected by `tree`, not by Popen
            pipe.close()
    collect_strays()
    seconds = time.monotonic() - began
    killed = -tree.status if tree.status is not None and tree.status < 0 else None
    code = None if ended != "exited" else tree.status if killed is None else 128 + killed
    return Outcome(code, killed, ended, seconds, tree.cpu_seconds, tree.peak_rss_mb)


def _asked(spec: ProcessSpec) -> bool:
    return stop_requested() if spec.control is None else spec.control.asked


def _start(spec: ProcessSpec) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            spec.argv,
            env={**spec.env, MARKER: spec.run_id},
            cwd=spec.cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    except OSError as error:
        message = f"cannot start {spec.argv[0]} in {spec.cwd}: {error.strerror or error}"
        raise CannotStart(message, 127 if isinstance(error, FileNotFoundError) else 126) from error


class _Pipe:
    """The child's output: waits for it without burning CPU and feeds it to the log."""

    def __init__(self, process: subprocess.Popen[bytes], log: LineLog) -> None:
        assert process.stdout is not None
        self._stream = process.stdout
        self._log = log
        self._open = True
        self._nap = 0.001
        os.set_blocking(self._stream.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stream, selectors.EVENT_READ)

    def pump(self, timeout: float) -> bool:
        """Wait for output at most `timeout` seconds and take one chunk; False when there was none."""
        if not self._open:
            # The end of the output comes shortly before the end of the child: ask soon, then less and less often.
            time.sleep(max(0.0, min(timeout, self._nap)))
            self._nap *= 2
            return False
        return bool(self._selector.select(max(0.0, timeout))) and self._take()

    def drain(self) -> None:
        """Take what is left; somebody who cannot be ended may hold the pipe, so not for ever."""
        stops = time.monotonic() + _DRAIN_S
        while self._open and time.monotonic() < stops and self._take():
            pass

    def close(self) -> None:
        self._selector.close()
        self._stream.close()

    def _take(self) -> bool:
        try:
            data = os.read(self._stream.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._log.feed(data)
        else:
            self._open = False
            self._selector.unregister(self._stream)
        return bool(data)


def _follow(spec: ProcessSpec, tree: ProcessTree, pipe: _Pipe, log: LineLog, on_tick: Callable[[Tick], None] | None) -> Ended:
    """Pump until the child exits or must be ended; says which."""
    began = alive = ticked = time.monotonic()
    watch = FileWatch(spec.watch, min(_WATCH_S, spec.stall_s / 4))
    while True:
        output = pipe.pump(ticked + _TICK_S - time.monotonic())
        now = time.monotonic()
        if output or watch.changed(now):
            alive = now
        due = now - ticked >= _TICK_S
        if output and not due:
            continue
        if tree.exited():
            return "exited"
        if _asked(spec):
            return "interrupted"
        if now - began >= spec.deadline_s:
            return "deadline"
        if now - alive >= spec.stall_s:
            return "stalled"
        if due:
            ticked = now
            if on_tick is not None:
                on_tick(Tick(now - began, log.last_line))


def _close_down(spec: ProcessSpec, ended: Ended, tree: ProcessTree, pipe: _Pipe, log: LineLog) -> None:
    """End what is left of the run and say so in the log; the pid file goes only when nothing survived."""
    left = tree.live()
    control = spec.control or Control()
    if ended == "exited":
        pipe.drain()
        if left:
            names = ", ".join(f"{process.pid} {_name(process)}" for process in left)
            log.note(f"the child exited and left processes behind, which are ended now: {names}")
    else:
        why = {
            "deadline": f"the deadline of {spec.deadline_s:g} s passed",
            "stalled": f"no output and no change of a watched path for {spec.stall_s:g} s",
            "interrupted": control.why or "Seatrial was interrupted",
        }
        log.note(f"{why[ended]}: ending the run")
        if ended == "stalled":
            log.note(dump(left))
    grace_s = control.left_s() if control.asked and ended == "interrupted" else spec.grace_s
    survivors = tree.end(grace_s, pipe.pump, lambda: control.left_s() == 0)
    pipe.drain()
    if survivors:
        log.note(f"could not end: {' '.join(map(str, survivors))}")
    else:
        pid_file(spec.log, spec.part).unlink(missing_ok=True)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "(ended)"
