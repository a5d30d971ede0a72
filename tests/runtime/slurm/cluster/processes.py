"""The processes of one private cluster: started, recorded, found again and ended by PID.

- A record is a PID with its start time: a PID that was recycled is never touched, and a zombie counts as dead.
- The record is on disk before anybody waits for the process, so that a later Python ends what a killed one left behind.
- Unless the cluster is to be kept, the kernel kills the daemons when the thread that started them dies.
- Slurm starts more than we do: step daemons are known by the node's log that they hold open, tasks by their parents and by
  the `SLURM_CONF` in their environment. A person's shell with `SLURM_CONF` set is not a task: it has no job id.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from seatrial.core import files
from seatrial.runtime.process_tree import die_with_parent

Ticks = int
"""Start time of a process, in clock ticks since boot: exact, unlike seconds that are computed from it."""

_END_S = 10.0


def start_ticks(pid: int) -> Ticks | None:
    """When the process started; None when there is none, or only a zombie that nobody collects."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


class Processes:
    """The daemons that we started for the cluster at `root`, by name."""

    def __init__(self, root: Path, keep: bool) -> None:
        self._file = root / "processes.json"
        self._log = root / "log"
        self._keep = keep
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, argv: Sequence[str], environ: Mapping[str, str]) -> int:
        """Start a daemon in the foreground of its own session; its output goes to `log/<name>.out`."""
        assert not self.alive(name), f"{name} is already running"
        with (self._log / f"{name}.out").open("ab") as out:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environ,
                cwd=self._log,
                start_new_session=True,
                preexec_fn=None if self._keep else die_with_parent(),
            )
        self._children[name] = child
        started = start_ticks(child.pid)
        if started is not None:
            files.write_json(self._file, {**self._records(), name: (child.pid, started)})
        return child.pid

    def pid(self, name: str) -> int | None:
        """The live process of that name."""
        pid, started = self._records().get(name, (0, 0))
        if name in self._children:
            self._children[name].poll()  # collects it if it ended
        return pid if pid and start_ticks(pid) == started else None

    def alive(self, name: str) -> bool:
        return self.pid(name) is not None

    def names(self) -> tuple[str, ...]:
        """Everything that was started and not ended by `end`, dead or alive."""
        return tuple(self._records())

    def end(self, name: str, grace_s: float = 0.0) -> None:
        """SIGTERM, `grace_s`, SIGKILL; returns when the process is gone and forgets it."""
        pid = self.pid(name)
        if pid is not None and grace_s > 0:
            send(pid, signal.SIGTERM)
            _until(lambda: not self.alive(name), grace_s)
        if self.pid(name) is not None and pid is not None:
            send(pid, signal.SIGKILL)
            if not _until(lambda: not self.alive(name), _END_S):
                raise TimeoutError(f"{name} (process {pid}) did not end within {_END_S:g} s of SIGKILL")
        child = self._children.pop(name, None)
        if child is not None:
            child.wait(_END_S)
        files.write_json(self._file, {key: value for key, value in self._records().items() if key != name})

    def _records(self) -> dict[str, tuple[int, Ticks]]:
        if not self._file.exists():
            return {}
        return {name: (int(pid), int(started)) for name, (pid, started) in files.read_json(self._file).items()}


def end_all(find: Callable[[], set[int]]) -> None:
    """Kill what `find` finds, until it finds nothing any more: a process may fork while it is being killed."""
    if not _until(lambda: not _kill(find()), _END_S):
        raise TimeoutError(f"processes of a private Slurm do not end: {sorted(find())}")


def slurm_started(root: Path, node: str | None = None) -> set[int]:
    """PIDs of step daemons, of jobs' processes and of what else the daemons forked; all of the cluster or of one node."""
    stats = {pid: fields for pid in _pids() if (fields := _stat(pid)) is not None and fields[0] not in "ZX"}
    logs = f"{root}/log/{node}.log" if node else f"{root}/log/"
    found = {pid for pid in stats if _is_slurms(pid, logs) or _is_a_task(pid, root, node)}
    grown = -1
    while grown != len(found):
        grown = len(found)
        found |= {pid for pid, fields in stats.items() if int(fields[1]) in found}
    return found - {os.getpid()}


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal; that the process is gone already is fine."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _kill(pids: set[int]) -> set[int]:
    for pid in pids:
        send(pid, signal.SIGKILL)
    return pids


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the command's name: [0] state, [1] parent, [19] start time."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _is_slurms(pid: int, logs: str) -> bool:
    """A Slurm daemon (whose title has overwritten its environment) that logs into this cluster."""
    try:
        if not Path(f"/proc/{pid}/exe").readlink().name.startswith("slurm"):
            return False
        return any(str(link.readlink()).startswith(logs) for link in Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _is_a_task(pid: int, root: Path, node: str | None) -> bool:
    try:
        words = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    here = f"SLURM_CONF={root}/slurm.conf".encode() in words and any(word.startswith(b"SLURM_JOB_ID=") for word in words)
    return here and (node is None or f"SLURMD_NODENAME={node}".encode() in words)
