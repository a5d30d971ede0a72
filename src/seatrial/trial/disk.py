"""Room on disks: what a trial needs where, known before anything is written.

Levels say what their run directories take (`cost` in levels.toml), loops what they take beside them (`Footprint`), locks what their
environments take. Places on one filesystem share what is free there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.files import Room, room_at
from seatrial.launch.environments import Environments
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.finding_codes import FindingCode
from seatrial.model.loop import Loop
from seatrial.model.record import Finding, Plan
from seatrial.trial.plan import totals

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
class Need:
    """What is going to be written to one place."""

    what: str
    path: Path
    mb: float
    inodes: int
    elsewhere: str
    """How to choose another place."""


def needs(loop: Loop, plan: Plan, run_dir: Path, own: Path | None, environ: Mapping[str, str]) -> tuple[Need, ...]:
    """Everything that a trial of this plan writes. `own` is the user's interpreter: no environment is built then."""
    took = totals(plan)["disk_mb"] + SPARE_MB
    made = [Need("run directory", run_dir, took, INODES, "choose another place with --out or run.trials")]
    temporary = temporary_directory(environ)
    elsewhere = "set TMPDIR to a directory on another disk"
    made.append(Need("temporary files", temporary, loop.footprint.tmp_mb, loop.footprint.tmp_inodes, elsewhere))
    missing = 0 if own else _unbuilt_mb(loop)
    if missing:
        elsewhere = "set SEATRIAL_CACHE to a directory on another disk"
        made.append(Need(f"environment {loop.environment}", Environments().root, missing, ENVIRONMENT_INODES, elsewhere))
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


def room_findings(wanted: Sequence[Need]) -> Iterator[Finding]:
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


def _filesystem(here: Sequence[Need], room: Room) -> Iterator[Finding]:
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
    """Ray's own directory lies on a disk with room to spill to."""
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
    need = Need("run directory", run_dir, INSTRUMENTS_MB, INSTRUMENTS_INODES, "choose another place with --out or run.trials")
    for found in room_findings((need,)):
        if not found.ok:
            raise BlockedError(found.boundary, found.message, found.fix)


def _finding(code: FindingCode, room: Room, message: str, fix: str, *, ok: bool = False) -> Finding:
    return Finding(name="disk", ok=ok, message=message, fix="" if ok else fix, code=code, path=str(room.place))
