"""One pytest run of a project: with a deadline, in a process table of its own, with variables of its own.

- Nothing that a mutated test starts outlives the run: `unshare --pid --kill-child` ends it all (where that is not allowed, the process
  group and the descendants are ended).
- Variables are an allowlist: keys of the user's services and settings of Seatrial do not reach a mutated test.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh")
KEPT = ("PATH", "LANG", "LC_ALL", "SSL_CERT_FILE")


@dataclass
class Ran:
    """What bench_report.py wrote of one session."""

    status: int | None = None
    items: list[str] | None = None
    broken: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    running: str = ""
    wall: float = 0.0
    overran: bool = False
    tail: str = ""

    @property
    def aborted(self) -> bool:
        """No collection came to an end: a broken conftest, a usage error, a crash."""
        return self.items is None


@functools.cache
def apart() -> tuple[str, ...]:
    done = subprocess.run([*APART, "true"], capture_output=True, check=False, timeout=30)
    return () if done.returncode else APART


def pytest_run(python: Path, tree: Path, words: Sequence[str], *, limit: float, test_s: float = 0, skip: Iterable[str] = ()) -> Ran:
    """Run pytest in `tree`."""
    # A short name: sockets of Ray lie under it, and their paths may have 107 characters.
    own = Path(tempfile.mkdtemp(prefix="sm-", dir="/tmp"))
    try:
        (own / "home").mkdir()
        (own / "skip.json").write_text(json.dumps(sorted(skip)))
        variables = _variables(own, tree, test_s)
        command = [*apart(), str(python), "-m", "pytest", "-p", "bench_report", "-q", *words]
        began = time.monotonic()
        with (own / "log").open("wb") as log:
            status, overran = _end_by(command, tree, variables, log.fileno(), limit)
        ran = _read(own / "report")
        ran.status, ran.overran, ran.wall = status, overran, round(time.monotonic() - began, 2)
        ran.tail = (own / "log").read_text(errors="replace")[-3000:]
        return ran
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _variables(own: Path, tree: Path, test_s: float) -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return {
        **kept,
        "HOME": str(own / "home"),
        "TMPDIR": str(own),
        "PYTHONPATH": str(tree),
        # Two mutations within one second and of one size would look alike to a .pyc file.
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "BENCH_REPORT": str(own / "report"),
        "BENCH_TEST_S": str(float(test_s)),  # never "0": that would look like a switch that tests may wait for
        "BENCH_SKIP": str(own / "skip.json"),
    }


def _end_by(command: Sequence[str], tree: Path, variables: Mapping[str, str], log: int, limit: float) -> tuple[int | None, bool]:
    process = subprocess.Popen(command, cwd=tree, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        return process.wait(limit), False
    except subprocess.TimeoutExpired:
        return None, True
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    for child in children:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass  # it ended by itself
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # the whole group has ended
    process.wait(30)


def _read(file: Path) -> Ran:
    ran = Ran()
    lines = file.read_text().splitlines() if file.exists() else []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            break  # the run was killed in the middle of its last line
        if "items" in row:
            ran.items = row["items"]
        elif "broken" in row:
            ran.broken.append(row["broken"])
        elif "began" in row:
            ran.running = row["began"]
        elif "test" in row:
            ran.outcomes[row["test"]], ran.seconds[row["test"]] = row["outcome"], row["seconds"]
            ran.running = ""
    return ran
