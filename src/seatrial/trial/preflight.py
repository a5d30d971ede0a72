"""What is checked before anything starts. Each finding names its boundary and the command that fixes it."""

from __future__ import annotations

import contextlib
import locale
import os
import resource
import shlex
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from seatrial.core.errors import BlockedError, FindingCode, UserError
from seatrial.core.files import Room, room_at
from seatrial.core.loop import Context, Loop, finding, gather
from seatrial.core.records import Finding, Plan, RepoState, replace
from seatrial.core.verdict import Boundary
from seatrial.evidence.imports import loads_itself
from seatrial.runtime.environments import Environments
from seatrial.runtime.servers import free_port
from seatrial.trial.plan import totals

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
    free = psutil.virtual_memory().available / 1e6
    message = f"{free:.0f} MB available, {needed_mb:.0f} MB needed"
    return finding("memory", free >= needed_mb, message, "end other programs, or run fewer levels with --level")


def ports() -> Finding:
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


SPARE_MB = 200
INODES = 2_000
"""Files of a run directory: instruments, evidence, checkpoints of every level."""
ENVIRONMENT_INODES = 40_000
INSTRUMENTS_MB = 20
INSTRUMENTS_INODES = 500
SHARED = Path("/dev/shm")
NEARLY_FULL = 0.95
"""Ray refuses to spill objects to a disk that is fuller."""


@dataclass(frozen=True, slots=True)
class DiskNeed:
    what: str
    path: Path
    mb: float
    inodes: int
    elsewhere: str
    """How to choose another place."""


def needs(loop: Loop, plan: Plan, run_dir: Path, own: Path | None, environ: Mapping[str, str]) -> tuple[DiskNeed, ...]:
    """Everything that a trial of this plan writes. `own` is the user's interpreter: no environment is built then."""
    took = totals(plan)["disk_mb"] + SPARE_MB
    made = [DiskNeed("run directory", run_dir, took, INODES, "choose another place with --out or run.trials")]
    temporary = temporary_directory(environ)
    elsewhere = "set TMPDIR to a directory on another disk"
    made.append(DiskNeed("temporary files", temporary, loop.footprint.tmp_mb, loop.footprint.tmp_inodes, elsewhere))
    missing = 0 if own else _unbuilt_mb(loop)
    if missing:
        elsewhere = "set SEATRIAL_CACHE to a directory on another disk"
        made.append(DiskNeed(f"environment {loop.environment}", Environments().root, missing, ENVIRONMENT_INODES, elsewhere))
    return tuple(made)


def temporary_directory(environ: Mapping[str, str]) -> Path:
    """Where programs put temporary files: they take /tmp where TMPDIR is no directory."""
    named = Path(environ.get("TMPDIR") or "/tmp")
    return named if named.is_dir() or not os.path.lexists(named) else Path("/tmp")


def _unbuilt_mb(loop: Loop) -> int:
    """What the build of the loop's environment takes; 0 when it is there."""
    if loop.environment is None:
        return 0
    try:
        return Environments().unbuilt_mb(loop.environment, loop.environments()[loop.environment])
    except UserError:
        return 0  # a lock that cannot be read is a finding of its own


def room_findings(wanted: Sequence[DiskNeed]) -> Iterator[Finding]:
    """One finding for each filesystem that has room, and each that lacks room, inodes or the right to write."""
    rooms = {need.path: room_at(need.path) for need in wanted}
    for device in dict.fromkeys(room.device for room in rooms.values()):
        here = [need for need in wanted if rooms[need.path].device == device]
        yield from _filesystem(here, rooms[here[0].path])
    for need in wanted:
        room = rooms[need.path]
        if room.in_the_way is not None:
            message = f"{room.in_the_way}: is no directory ({need.what})"
            yield _finding(FindingCode.NOT_WRITABLE, room, message, f"move it away, or {need.elsewhere}")
        elif not room.writable:
            why = "its filesystem is read-only" if room.read_only else "you may not write there"
            message = f"{room.place}: {why} ({need.what})"
            yield _finding(FindingCode.NOT_WRITABLE, room, message, f"make it writable, or {need.elsewhere}")


def _filesystem(here: Sequence[DiskNeed], room: Room) -> Iterator[Finding]:
    mb, inodes = sum(need.mb for need in here), sum(need.inodes for need in here)
    parts = f" ({', '.join(f'{need.what} {need.mb:.0f}' for need in here)})" if len(here) > 1 else ""
    full, crowded = room.free_mb < mb, room.free_inodes is not None and room.free_inodes < inodes
    message = f"{room.free_mb:.0f} MB free at {room.place}, {mb:.0f} MB needed{parts}"
    yield _finding(FindingCode.DISK, room, message, f"free space below {room.place}, or {here[0].elsewhere}", ok=not full)
    if crowded:
        message = f"{room.free_inodes} files can still be made at {room.place}, {inodes} needed: it is out of inodes"
        yield _finding(FindingCode.INODES, room, message, f"remove files that you do not need there, or {here[0].elsewhere}")


def shared_memory(loop: Loop) -> Iterator[Finding]:
    """Room for what processes of the loop share; they go on with less, more slowly or not at all."""
    wanted = loop.footprint.shm_mb
    if not wanted or not SHARED.is_dir():
        return
    room = room_at(SHARED)
    if room.free_mb < wanted:
        message = f"{room.free_mb:.0f} MB free at {SHARED}, {wanted} MB wanted by Ray and its workers"
        fix = "start the container with a larger --shm-size, or remove what another run left there"
        yield Finding(name="shared memory", ok=True, message=message, fix=fix, warns=True, path=str(SHARED))


def nearly_full(loop: Loop, environ: Mapping[str, str]) -> Iterator[Finding]:
    place = Path(environ.get("RAY_TMPDIR") or "/tmp")
    room = room_at(place)
    if loop.footprint.ray and room.used > NEARLY_FULL:
        message = f"{place} is {room.used:.0%} full: Ray spills no objects to a disk that is more than {NEARLY_FULL:.0%} full"
        fix = f"free space in {place}, or set RAY_TMPDIR to a directory on another disk"
        yield Finding(name="disk", ok=True, message=message, fix=fix, warns=True, path=str(place))


def require_room(loop: Loop, plan: Plan, run_dir: Path, own: Path | None, environ: Mapping[str, str]) -> None:
    """BlockedError when a disk is too full for this trial: to be called before anything is written."""
    for found in room_findings(needs(loop, plan, run_dir, own, environ)):
        if not found.ok and found.code in (FindingCode.DISK, FindingCode.INODES):
            raise BlockedError(found.boundary, found.message, found.fix)


def require_room_for_instruments(run_dir: Path) -> None:
    """BlockedError when not even the instruments and the records of a probe find room: to be called before they are copied."""
    need = DiskNeed("run directory", run_dir, INSTRUMENTS_MB, INSTRUMENTS_INODES, "choose another place with --out or run.trials")
    for found in room_findings((need,)):
        if not found.ok:
            raise BlockedError(found.boundary, found.message, found.fix)


def _finding(code: FindingCode, room: Room, message: str, fix: str, *, ok: bool = False) -> Finding:
    return Finding(name="disk", ok=ok, message=message, fix="" if ok else fix, code=code, path=str(room.place))


def preflight(loop: Loop, plan: Plan, context: Context, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    return (*of_machine(environ), *of_loop(loop, plan, context, environ))


def of_machine(environ: Mapping[str, str]) -> tuple[Finding, ...]:
    return gather(git_here, encoding, ports, lambda: variables(environ))


def of_loop(loop: Loop, plan: Plan, context: Context, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    python = context.python if context.python.is_file() else None
    return gather(
        lambda: room_findings(needs(loop, plan, context.run_dir, python, environ)),
        lambda: shared_memory(loop),
        lambda: nearly_full(loop, environ),
        lambda: memory(totals(plan)["memory_mb"]),
        lambda: open_files(loop),
        lambda: running_ray(environ) if loop.footprint.ray else (),
        lambda: submodules(context.changes),
        lambda: changes(context.changes),
        lambda: loop.findings(context),
    )


def submodules(repos: Sequence[RepoState]) -> Iterator[Finding]:
    """Submodules that were never checked out: what they hold is then missing, or comes from elsewhere."""
    for repo in repos:
        empty = [item.path for item in repo.submodules if item.state == "uninitialised" and _is_empty(Path(repo.path, item.path))]
        if empty:
            shown = f"{', '.join(empty[:3])}{', …' if len(empty) > 3 else ''}"
            message = f"{repo.path}: {len(empty)} of {len(repo.submodules)} submodules are empty: {shown}"
            fix = f"git -C {shlex.quote(repo.path)} submodule update --init --recursive"
            found = finding("submodules", True, message, boundary=Boundary.CONFIG)
            yield replace(found, fix=fix, warns=True, path=str(Path(repo.path, empty[0])))


def _is_empty(directory: Path) -> bool:
    return not directory.is_dir() or not any(directory.iterdir())


def changes(repos: Sequence[RepoState]) -> tuple[Finding, ...]:
    """What of each checkout the loop can import: without a package nothing of it can be tested."""
    made = []
    for repo in repos:
        ok = bool(repo.packages)
        message = f"{repo.name} provides {', '.join(repo.packages)}" if ok else f"{repo.path} provides no Python package"
        made.append(finding("change", ok, message, "name the checkout that holds the package which the loop imports", Boundary.CONFIG))
        for place in loads_itself(repo):
            message = f"every Python of the loop runs {place} as it starts; what that loads or runs does not count as used by the loop"
            fix = "move it out of the import root, unless the loop is to run with it"
            made.append(Finding(name="loads itself", ok=True, boundary=Boundary.CONFIG, message=message, fix=fix, warns=True))
    return tuple(made)


def child_environment(environ: Mapping[str, str], import_path: Sequence[str], extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a loop's process: the caller's, without what would mislead it, with our import path."""
    kept = {key: value for key, value in environ.items() if key not in IGNORED and key not in LAUNCHER}
    # Without bytecode files a checkout under test stays as it was recorded; a safe path keeps the working directory out of imports.
    ours = {"PYTHONPATH": os.pathsep.join(import_path), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
    return {**kept, **extra, **ours}
