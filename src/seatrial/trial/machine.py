"""What of this machine is in the way of a trial, whatever it runs: git, locale, ports, open files, a Ray that runs already.

Nothing here is started or changed. What only slows a trial down, or may mislead it, warns and blocks nothing.
"""

from __future__ import annotations

import contextlib
import locale
import os
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from seatrial.launch.ports import free_port
from seatrial.model.loop import Loop
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

RAY_NODES = "SEATRIAL_RAY_NODES"
"""Set by the job of a trial that runs inside Ray."""
CONNECT_S = 2
PROGRAMS = ("raylet", "gcs_server")
OPEN_FILES = 8192
"""Ray opens sockets and files for each of its workers; it raises the soft limit itself, up to the hard one."""
IGNORED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
"""Variables that are not passed on: they would decide what the loop imports."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")
"""Left behind by another launcher, they make one process wait for ranks that never come."""
CONFLICTS = (("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))


def git_here() -> Finding:
    """Without git no change can be read."""
    found = shutil.which("git")
    if found:
        return Finding(name="git", ok=True, message=found)
    return Finding(name="git", ok=True, message="no git on PATH: no --change can be read", fix="apt-get install git", warns=True)


def encoding() -> Iterator[Finding]:
    """Text of other programs is read as UTF-8."""
    used = locale.getpreferredencoding(False)
    if used.lower().replace("-", "") != "utf8":
        message = f"the locale's encoding is {used}: names and logs that are not ASCII may be lost"
        yield Finding(name="locale", ok=True, message=message, fix="export LC_ALL=C.UTF-8", warns=True)


def memory(needed_mb: float) -> Finding:
    """Room in memory for the largest level."""
    free = psutil.virtual_memory().available / 1e6
    ok = free >= needed_mb
    fix = "" if ok else "end other programs, or run fewer levels with --level"
    return Finding(name="memory", ok=ok, message=f"{free:.0f} MB available, {needed_mb:.0f} MB needed", fix=fix)


def ports() -> Finding:
    """A local port can be bound, as distributed training needs."""
    try:
        port = free_port()
    except OSError as error:
        message = f"no local port can be bound: {error}"
        return Finding(name="ports", ok=False, boundary=Boundary.CLUSTER, message=message, fix="allow binds on 127.0.0.1")
    return Finding(name="ports", ok=True, boundary=Boundary.CLUSTER, message=f"port {port} on 127.0.0.1 can be bound")


def variables(environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """Variables that contradict each other, and those that are not passed on."""
    made = []
    for one, two in CONFLICTS:
        if environ.get(one) and environ.get(two):
            message = f"{one} and {two} are both set; workers refuse to start with both"
            made.append(Finding(name="variables", ok=False, message=message, fix=f"unset {one}"))
    temporary = environ.get("TMPDIR")
    if temporary and not Path(temporary).is_dir():
        message = f"TMPDIR is {temporary}, which is no directory"
        made.append(Finding(name="variables", ok=True, message=message, fix=f"mkdir -p {temporary}", warns=True, path=temporary))
    dropped = [name for name in (*IGNORED, *LAUNCHER) if environ.get(name)]
    note = f"not passed on to the loop: {', '.join(dropped)}" if dropped else "no conflicting variables"
    return (*made, Finding(name="variables", ok=True, message=note))


def open_files(loop: Loop) -> Iterator[Finding]:
    """The limit of open files, for a loop with a Ray of its own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if loop.footprint.ray and hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        message = f"at most {hard} open files are allowed, and Ray may need {OPEN_FILES}"
        yield Finding(name="open files", ok=True, message=message, fix=f"ulimit -n {OPEN_FILES} (as root, or in limits.conf)", warns=True)


def running_ray(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A Ray that a loop would attach to, or share this machine with; one that the trial's own job started is expected."""
    if environ.get(RAY_NODES):
        return
    named = environ.get("RAY_ADDRESS", "")
    if named and named != "local":
        told = "" if named == "auto" or _answers(named) else ", where nothing answers"
        message = f"RAY_ADDRESS is {named}{told}: the loop would use that Ray instead of starting its own"
        yield _ray(message, "unset RAY_ADDRESS")
    place = Path(environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    with contextlib.suppress(OSError):
        address = place.read_text(encoding="utf-8", errors="replace").strip() if place.is_file() else ""
        if address and address != named and _answers(address):
            message = f"a Ray runs at {address}: the loop would attach to it, with the GPUs and import paths that it has"
            yield _ray(message, "ray stop", str(place))
            return
    found = next(_own_processes(), None)
    if found is not None:
        message = f"a Ray of yours runs already, perhaps of another trial: process {found.pid} ({found.info['name']})"
        yield _ray(message, "wait until it ends, or end every Ray of yours: ray stop")


def _answers(address: str) -> bool:
    """Whether something listens at `host:port`, with or without a scheme."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_S):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def _own_processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["name", "uids", "status"]):
        uids = process.info["uids"]
        if process.info["name"] in PROGRAMS and uids and uids.real == os.getuid() and process.info["status"] != psutil.STATUS_ZOMBIE:
            yield process


def _ray(message: str, fix: str, path: str = "") -> Finding:
    return Finding(name="Ray", ok=True, boundary=Boundary.CLUSTER, message=message, fix=fix, warns=True, path=path)
