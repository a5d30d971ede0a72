"""A process beside the collector that cleans up when the collector is killed, however that happens.

    python -m seatrial.rollouts.backends.gym_guard PID_FILE DIRECTORY

- It waits on its standard input, a pipe that only the collector holds. The end of it means that the collector died: then the
  processes of the run are ended, and the private directory is removed. When all ended in order, the collector kills its guard.
- It is in the collector's session, or it would be taken for a leftover itself, but not in its process group: Ctrl-C is not for it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from seatrial.core import files
from seatrial.core.errors import UserError
from seatrial.runtime.process_tree import PidFile, end_leftovers

_OWNER_S = 10.0


class Guard:
    """Holds the pipe; for the collector."""

    def __init__(self, pid_file: Path, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "seatrial.rollouts.backends.gym_guard", str(pid_file), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )

    def dismiss(self) -> None:
        """Everything ended in order: the guard goes, too."""
        self._process.kill()
        self._process.communicate()  # which closes the pipe, too


def main(pid_file: Path, directory: Path) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _clean_up(pid_file)
    shutil.rmtree(directory, ignore_errors=True)


def _clean_up(pid_file: Path) -> None:
    if not pid_file.exists():
        return
    record = files.read_model(pid_file, PidFile)
    stops = time.monotonic() + _OWNER_S
    while True:
        try:
            end_leftovers(pid_file, grace_s=1.0)
            break
        except UserError:
            # The pipe of a process closes a moment before the process is gone.
            if time.monotonic() > stops:
                raise
            time.sleep(0.05)
    # Some of Ray's processes hide the marker that leftovers are found by; the session is theirs alone.
    for pid in psutil.pids() if record.pid is not None else ():
        try:
            if os.getsid(pid) == record.pid:
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
