"""Every process of a run: found wherever it hides, ended, and collected.

- A run's processes are the child, its descendants, their orphans, and every process that carries the run's marker in its environment.
- Seatrial is a subreaper: a process whose parent ends becomes its child.
- All processes of the machine are read several times per run, so one look is cheap.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from pydantic import Field

from seatrial.core import files
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.records import Record
from seatrial.core.verdict import Boundary

MARKER = "SEATRIAL_RUN"
"""The variable that every process of a run inherits, with the id of the run."""
CLOCK_SLACK_S = 2.0
"""Start times are computed from the boot time, which moves a little when the clock is set."""

_PREFIX = f"{MARKER}=".encode()
_PROC = Path("/proc/self/environ").is_file()
_EXEC_S = 1.0
"""How long one that is becoming another program is waited for: microseconds, more where the machine is crowded."""
_BARE_LOOKS = 10
"""So often one that shows arguments and no environment is looked at before it is believed: it may be in the next exec already."""
_EXITING, _KERNEL_THREAD = 0x4, 0x200000
"""Of the flags in /proc/PID/stat (PF_EXITING, PF_KTHREAD)."""


def processes(pids: Iterable[int]) -> Iterator[psutil.Process]:
    """These processes, as far as they are still there."""
    for pid in pids:
        try:
            yield psutil.Process(pid)
        except psutil.Error:
            continue  # it ended meanwhile


def by_parent() -> dict[int, list[int]]:
    """Children of every process, but for this one."""
    below: dict[int, list[int]] = {}
    for pid in psutil.pids():
        parent = _parent(pid) if pid != os.getpid() else None
        if parent is not None:
            below.setdefault(parent, []).append(pid)
    return below


def with_descendants(top: int, below: dict[int, list[int]]) -> Iterator[int]:
    """A process and all that it started, parents first."""
    waiting, seen = [top], set[int]()
    while waiting:
        pid = waiting.pop()
        if pid not in seen:
            seen.add(pid)
            yield pid
            waiting.extend(below.get(pid, ()))


def marked(run_id: str) -> Iterator[int]:
    """Every process with this marker, but for this one."""
    for pid in psutil.pids():
        if pid != os.getpid() and marker(pid) == run_id:
            yield pid


def marker(pid: int) -> str | None:
    """The marker of a process; None when it has none, has ended, or is somebody else's."""
    if _PROC:
        found = [entry for entry in _environ(pid).split(b"\0") if entry.startswith(_PREFIX)]
        return os.fsdecode(found[0][len(_PREFIX) :]) if found else None
    try:
        return psutil.Process(pid).environ().get(MARKER)
    except (psutil.Error, OSError):
        return None


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended and was not collected yet does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def send(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal, if the process is there and takes ours."""
    try:
        process.send_signal(number)
    except psutil.Error:
        pass  # ended meanwhile, or not ours to end: who asks whether it is alive is told


def started_at(pid: int, started: float) -> bool:
    """Whether the process with this pid is alive and is the one that started then."""
    try:
        process = psutil.Process(pid)
        return is_alive(process) and abs(process.create_time() - started) <= CLOCK_SLACK_S
    except psutil.Error:
        return False


def _parent(pid: int) -> int | None:
    if _PROC:
        line = _read(pid, "stat")
        return int(line.rpartition(b")")[2].split()[1]) if line else None
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return None


def _environ(pid: int) -> bytes:
    """The environment of a process; empty when it has none, has ended, or is somebody else's.

    In the middle of an exec a process shows none, and no arguments: it is looked at again, until it has been seen a few times with
    arguments and without an environment.
    """
    stops, bare = time.monotonic() + _EXEC_S, 0
    while (found := _read(pid, "environ")) == b"" and bare < _BARE_LOOKS and _may_exec(pid) and time.monotonic() < stops:
        if _read(pid, "cmdline"):
            bare += 1
        else:
            time.sleep(0.0002)
    return found or b""


def _may_exec(pid: int) -> bool:
    """Whether a process has not ended, is not about to, and is not a thread of the kernel."""
    line = _read(pid, "stat")
    if not line:
        return False
    state, _, _, _, _, _, flags = line.rpartition(b")")[2].split()[:7]
    return state not in b"ZX" and not int(flags) & (_EXITING | _KERNEL_THREAD)


def _read(pid: int, name: str) -> bytes | None:
    try:
        handle = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    except OSError:
        return None
    try:
        parts = []
        while part := os.read(handle, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return None  # it ended meanwhile, or is somebody else's
    finally:
        os.close(handle)


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_WAIT_S = 5.0
_KILLED_S = 0.5
"""Before what was killed and is still there is killed again."""
_COLLECT_S = 5.0

# Loaded before any fork: between fork and exec nothing may be imported or looked up.
_prctl: Callable[..., int] | None = getattr(ctypes.CDLL(None), "prctl", None)

_active: dict[int, str] = {}
"""Direct children of the runs that this process has under way, with their run ids."""
_open: set[str] = set()
"""Ids of the runs that were announced and are not being ended yet."""
_others: set[int] = set()
"""Children of Seatrial that were there before the first of the runs under way."""
_lock = threading.Lock()
"""Guards the change of the three above."""


class PidFile(Record):
    """What `end_leftovers` must know of a run whose Seatrial was killed."""

    run_id: str = Field(min_length=1)
    pid: int | None
    """Its child; None while that is being started."""
    started: float = Field(ge=0)
    """Nothing of the run is older: the start of its child, or, while that is being started, of the owner."""
    owner: int = Field(gt=0)
    """The Seatrial process that runs it."""
    owner_started: float


def adopt_orphans() -> None:
    """Make this process the new parent of orphaned descendants."""
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> Callable[[], None]:
    """What the direct child does before exec: have the kernel kill it when Seatrial dies, however Seatrial dies."""
    parent = os.getpid()

    def before_exec() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    return before_exec


def write_pid_file(path: Path, run_id: str, child: int | None = None) -> None:
    """Leave on disk what a later Seatrial needs to end this run's processes. First without a child, before that is started: it may
    have started others by the time that it can be named."""
    owner = psutil.Process()
    first = owner if child is None else psutil.Process(child)
    record = PidFile(run_id=run_id, pid=child, started=first.create_time(), owner=owner.pid, owner_started=owner.create_time())
    files.write_json(path, record)


@contextmanager
def announced(run_id: str) -> Iterator[None]:
    """Around a whole run: it must be known before its child is forked, or another run that ends just then takes the child for its own."""
    with _lock:
        if not _open and not _active:
            _others.clear()
            _others.update(by_parent().get(os.getpid(), ()))
        _open.add(run_id)
    try:
        yield
    finally:
        with _lock:
            _open.discard(run_id)


def collect_strays() -> None:
    """Take ended orphans that belong to no run from the table of processes: nobody else would, as long as this process lives.

    Only what cannot have been started by this process itself, whose end somebody here may wait for: it is in another session, and does
    not lead that."""
    with _lock:
        if _open or _active:
            return
        for pid in by_parent().get(os.getpid(), ()):
            try:
                if os.getsid(pid) not in (pid, os.getsid(0)):
                    os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                continue


class ProcessTree:
    """The processes of one run, and what they cost. Its run was `announced`."""

    def __init__(self, child: int, run_id: str) -> None:
        self.child = child
        self.run_id = run_id
        self.status: int | None = None
        """Exit code of the child, negative for a signal; None while it runs."""
        self.cpu_seconds = 0.0
        """Of the child and of all descendants collected so far."""
        self.peak_rss_mb = 0.0
        self._orphans: set[int] = set()
        """Orphans known to be this run's: an ended process shows no marker any more, and keeps its pid until collected."""
        with _lock:
            _active[child] = run_id

    def exited(self) -> bool:
        """Whether the child itself has ended; collects it if so."""
        if self.status is None:
            self.status = self._collect(self.child)
        return self.status is not None

    def peek(self) -> int | None:
        """Exit code of the child, 128 + signal if one ended it, None while it runs. Collects nothing: for other threads."""
        stops = time.monotonic() + _COLLECT_S
        while self.status is None:
            try:
                seen = os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # collected this very moment: the status follows
                if time.monotonic() > stops:
                    raise
                time.sleep(0.001)
                continue
            if seen is None:
                return None
            return seen.si_status if seen.si_code == os.CLD_EXITED else 128 + seen.si_status
        return self.status if self.status >= 0 else 128 - self.status

    def live(self) -> tuple[psutil.Process, ...]:
        """Every process of this run that is alive, the child first and parents before their children; ended ones that are ours to
        collect are collected."""
        return self._look()[0]

    def _look(self) -> tuple[tuple[psutil.Process, ...], bool]:
        """`live`, and whether something ended in view: it may have started another that was not yet there to be seen."""
        below = by_parent()
        own = sorted(below.get(os.getpid(), ()), key=lambda pid: pid != self.child)
        pids = [pid for top in own if self._claims(top) for pid in with_descendants(top, below)]
        pids += marked(self.run_id)
        mine = {process.pid: process for process in processes(pids)}
        for pid in [pid for pid, process in mine.items() if not is_alive(process)]:
            # A process whose first thread has ended looks ended while other threads still run: ours count until collected.
            if pid not in own or (self.exited() if pid == self.child else self._collect(pid) is not None):
                del mine[pid]
        return tuple(mine.values()), not mine.keys() >= set(pids)

    def end(self, grace_s: float, wait: Callable[[float], object], hurry: Callable[[], bool] = lambda: False) -> tuple[int, ...]:
        """End everything: SIGTERM, `grace_s` or until `hurry()`, SIGKILL. `wait(seconds)` is called meanwhile. Returns what survived.

        A process is asked before those that it started: it knows that it must stop when it sees them end, and takes that for no result.
        """
        grace_ends = time.monotonic() + grace_s
        with _lock:
            _open.discard(self.run_id)
        if grace_s > 0:
            for process in self.live():
                send(process, signal.SIGTERM)
            while time.monotonic() < grace_ends and not hurry() and any(self._look()):
                wait(0.1)
        gives_up = time.monotonic() + _KILL_WAIT_S
        while any(seen := self._look()) and time.monotonic() < gives_up:
            for process in seen[0]:
                send(process, signal.SIGKILL)
            wait(0.02)
        with _lock:
            _active.pop(self.child, None)
        return tuple(process.pid for process in seen[0])

    def _claims(self, pid: int) -> bool:
        """Whether a direct child of Seatrial belongs to this run: the child itself, or an orphan it left."""
        if pid == self.child or pid in self._orphans:
            return True
        if pid in _active:
            return False
        try:
            session = os.getsid(pid)
        except ProcessLookupError:
            return False
        if session == os.getsid(0):
            return False
        run_id = marker(pid)
        with _lock:
            # Programs that set their title overwrite their marker; only then, and outside a run's session, nobody knows whose it is.
            hidden = run_id not in _active.values() and session not in _active and pid not in _others and not _open - {self.run_id}
        if run_id == self.run_id or session == self.child or hidden:
            self._orphans.add(pid)
        return pid in self._orphans

    def _collect(self, pid: int) -> int | None:
        """Reap one ended child of Seatrial and add up its cost; None when it runs or is not ours."""
        try:
            reaped, status, usage = os.wait4(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if not reaped:
            return None
        self._orphans.discard(pid)
        self.cpu_seconds += usage.ru_utime + usage.ru_stime
        self.peak_rss_mb = max(self.peak_rss_mb, usage.ru_maxrss / 1024)
        return os.waitstatus_to_exitcode(status)


def end_leftovers(pid_file: Path, grace_s: float = 5.0) -> int:
    """End what the run of `pid_file` left behind after its Seatrial was killed; returns how many processes that were.

    Only processes that carry the run's marker and are no older than the file says are touched, with their descendants, and what
    they start meanwhile.
    Raises a UserError when that Seatrial is still at work, and a BlockedError when something cannot be ended.
    """
    if not pid_file.exists():
        return 0
    record = files.read_model(pid_file, PidFile)
    if record.owner != os.getpid() and started_at(record.owner, record.owner_started):
        raise UserError(f"{pid_file}: process {record.owner} is still running this", f"wait for it, or stop it: kill {record.owner}")
    found = {process for process in processes(_left_by(record)) if is_alive(process)}
    for process in found:
        send(process, signal.SIGTERM)
    psutil.wait_procs(found, grace_s)
    gives_up = time.monotonic() + _KILL_WAIT_S
    while True:
        seen = _left_by(record)
        # Those found before stay in view: what hides its marker is found only while its parent lives.
        left = [process for process in found.union(processes(seen)) if is_alive(process)]
        if not (seen or left) or time.monotonic() > gives_up:
            break
        for process in left:
            send(process, signal.SIGKILL)
        found.update(left)
        psutil.wait_procs(left, _KILLED_S)
    if left:
        pids = " ".join(str(process.pid) for process in left)
        raise BlockedError(Boundary.ENVIRONMENT, f"{pid_file}: processes of an earlier run cannot be ended: {pids}", f"sudo kill -9 {pids}")
    pid_file.unlink(missing_ok=True)
    collect_strays()
    return len(found)


def _left_by(record: PidFile) -> set[int]:
    """What there was of a run whose Seatrial was killed, a moment ago. As long as there is something, it may have started another that
    was not yet there to be seen."""
    below, since = by_parent(), record.started - CLOCK_SLACK_S
    carrying = set(marked(record.run_id))
    older = {process.pid for process in processes(carrying) if process.create_time() < since}
    return {pid for top in carrying - older for pid in with_descendants(top, below)}
