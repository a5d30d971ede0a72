"""The run directory: where everything of a trial lives, and who may write to it.

- One writer at a time: the lock is held by the process that runs or resumes the trial, and goes with it.
- Everything that resume, report and judge need is read from here, nothing from memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from seatrial.files import read_json, read_model, read_text, write_json
from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_json
from seatrial.model.record import LevelResult, PlannedLevel, Trial
from seatrial.model.verdict import Verdict

IGNORE = b"*\n"


def now() -> str:
    """The time as it is stored: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_path(root: Path, loop: str) -> Path:
    """`<root>/<time>-<loop>-<short id>`; nothing is made."""
    return (root / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{loop}-{secrets.token_hex(2)}").absolute()


def new_directory(root: Path, loop: str) -> Path:
    """Make a run directory below `root`."""
    return make(new_path(root, loop))


def named_directory(path: Path) -> Path:
    """Make a run directory at a place that the user named; one that holds a trial already is refused."""
    require_new(path)
    if path.is_dir() and any(path.iterdir()) and not _unborn(path):
        raise UserError(f"{path}: is not empty", "name a new or an empty directory with --out")
    return make(path.absolute())


def _unborn(path: Path) -> bool:
    """Whether it holds only what a Seatrial left that was killed before its trial was stored."""
    mark = path / ".gitignore"
    ours = mark.is_file() and mark.read_bytes() in (b"", IGNORE)
    return ours and all(item.name.startswith(".") or item.name == "evidence" for item in path.iterdir())


def require_new(path: Path) -> None:
    """To be called with the lock held: another process may have put a trial there in the meantime."""
    if (path / "trial.json").exists():
        raise UserError(f"{path}: holds a trial already", f"seatrial resume {path}, or name another directory with --out")


def make(path: Path) -> Path:
    """Make the directory; git ignores it, since it may lie in a checkout under test, which must not look changed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".gitignore").write_bytes(IGNORE)
    except OSError as error:
        raise UserError(
            f"{path}: cannot make the run directory: {error.strerror or error}", "choose a writable place with --out"
        ) from error
    return path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the directory for this process; a second trial in it is refused with the process that has it."""
    try:
        handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{path}: cannot write there: {error.strerror or error}", "make the directory writable") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(handle, 64).decode(errors="replace").strip()
            raise UserError(
                f"{path}: another seatrial (process {holder or 'unknown'}) works in this directory",
                "wait for it, or name another with --out",
            ) from error
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(handle)


def load(path: Path) -> Trial:
    """The trial of a run directory. A level whose own result says something else was edited, and is not believed."""
    trial = read(path)
    levels = []
    for level in trial.levels:
        file = path / level.directory / "result.json"
        stored = read_model(file, LevelResult) if level.directory and file.is_file() else level
        if not agree(trial, stored, level):
            message = f"{path}: trial.json says {level.verdict} for level {level.number}, {file.name} of that level says otherwise"
            raise UserError(message, "the run directory was edited; run the trial again")
        levels.append(stored if _revoked(trial, stored, level) else level)
    return trial.model_copy(update={"levels": tuple(levels)})


def read(path: Path) -> Trial:
    """trial.json as it stands."""
    if not (path / "trial.json").is_file():
        begun = path.is_dir() and (path / "evidence").is_dir() and _unborn(path)
        why = "Seatrial was killed before its trial was stored, so nothing ran" if begun else "so it is not a run directory"
        fix = f"start it again: seatrial run … --out {path}" if begun else "name a directory that `seatrial run` made"
        raise UserError(f"{path}: no trial.json there, {why}", fix)
    return read_model(path / "trial.json", Trial)


def agree(trial: Trial, stored: LevelResult, level: LevelResult) -> bool:
    """Whether the two records of a level say the same. A Seatrial that was killed while it settled a trial beside its base has
    written one of them: then the verdict of the level by itself must be that of the other, and never a Pass made of something else.
    One that was killed before the end of a trial may have revoked a Pass in the level's own record alone."""
    if _revoked(trial, stored, level):
        return True
    if (stored.own is None) == (level.own is None):
        return stored.verdict is level.verdict
    settled, alone = (stored, level) if stored.own else (level, stored)
    return settled.own is not None and settled.own.verdict is alone.verdict and settled.verdict is not Verdict.PASS


def _revoked(trial: Trial, stored: LevelResult, level: LevelResult) -> bool:
    """Whether a Pass was taken back when everything had run, by a Seatrial that was killed before it said so in trial.json."""
    return trial.status == "running" and level.verdict is Verdict.PASS and stored.verdict is Verdict.BLOCKED and stored.own is None


def save(path: Path, trial: Trial) -> None:
    """Store the trial, sealed."""
    content = trial.model_dump(mode="json")
    write_json(path / "trial.json", content | {"seal": _seal(content)})


def is_sealed(path: Path) -> bool:
    """Whether trial.json says what Seatrial wrote."""
    content = read_json(path / "trial.json")
    return isinstance(content, dict) and content.get("seal") == _seal(content) and not _has_twice(path / "trial.json")


def _has_twice(file: Path) -> bool:
    """Whether a key stands twice in one object of a JSON file: readers differ in which one they take."""
    found: list[str] = []
    parse_json(read_text(file), twice=found.append)
    return bool(found)


def _seal(content: dict[str, Any]) -> str:
    """The digest of everything but the seal; of what stands in the file, so that a later version reads it alike."""
    text = json.dumps({key: value for key, value in content.items() if key != "seal"}, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def level_directory(path: Path, level: PlannedLevel) -> Path:
    """Where one level lives."""
    return path / "levels" / f"{level.number}-{level.name}"
