"""One child process on this machine, from its start until nothing of it is left.

- The child has its own session, no standard input, and one log for standard output and error (see `linelog`).
- It ends in one of four ways: it exited; the deadline passed; it stalled (no output and no change of a watched path for
  `stall_s`; its stacks are put into the log first); or Seatrial was interrupted (see `interrupt`), or, where the run has a
  `control`, whoever holds that asked for its end.
- Runs may be simultaneous, each in a thread that lives until `run` returns: the kernel ends the child with its thread.
- Whatever the end, and whatever exception passes through, every descendant is ended before `run` returns (see `descendants`).
- From before the start until nothing is left `<log>.pids` exists; after a Seatrial that was killed, `end_leftovers` takes it.
- Waiting costs next to nothing: one wake-up per tick, or per chunk of output.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from seatrial.launch import stackdump
from seatrial.launch.control import Control
from seatrial.launch.descendants import Tree, adopt_orphans, announced, collect_strays, die_with_parent, end_leftovers, write_pid_file
from seatrial.launch.interrupt import Interrupted, Interruptible, held, stop_requested
from seatrial.launch.linelog import LineFilter, LineLog
from seatrial.launch.processes import MARKER
from seatrial.launch.watch import Watch
from seatrial.model.errors import BlockedError
from seatrial.model.verdict import Boundary

__all__ = ["CannotStart", "Control", "Interrupted", "Interruptible", "Outcome", "ProcessSpec", "Tick", "end_leftovers", "pid_file", "run"]

Ended = Literal["exited", "deadline", "stalled", "interrupted"]

_TICK_S = 0.5
_WATCH_S = 5.0
_CHUNK = 1 << 20
_DRAIN_S = 5.0


def _unchanged(line: str) -> str:
    return line


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to run and how long to bear it."""

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
    line_filter: LineFilter = _unchanged
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
        tree, pipe = Tree(process.pid, spec.run_id), _Pipe(process, log)
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


def _follow(spec: ProcessSpec, tree: Tree, pipe: _Pipe, log: LineLog, on_tick: Callable[[Tick], None] | None) -> Ended:
    """Pump until the child exits or must be ended; says which."""
    began = alive = ticked = time.monotonic()
    watch = Watch(spec.watch, min(_WATCH_S, spec.stall_s / 4))
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


def _close_down(spec: ProcessSpec, ended: Ended, tree: Tree, pipe: _Pipe, log: LineLog) -> None:
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
            log.note(stackdump.dump(left))
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
