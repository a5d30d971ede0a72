"""Stacks of a silent run: what its Python processes were doing, taken with py-spy before they are ended.

- py-spy is no dependency: it is used when it is on PATH or beside Seatrial's interpreter; the text says so when it is not.
- A dump that fails or hangs is reported in the text, never raised: the run is ended in any case.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

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
    return "\n".join(_dump_one(tool, pid) for pid in pids[:_MOST])


def _dump_one(tool: str, pid: int) -> str:
    head = f"py-spy dump --pid {pid}"
    try:
        done = subprocess.run([tool, "dump", "--pid", str(pid)], capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{head}: {error}"
    return f"{head}\n{done.stdout}{done.stderr}".rstrip()


def _is_python(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("python") or Path(process.exe()).name.startswith("python")
    except psutil.Error:
        return False
