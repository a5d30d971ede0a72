"""The run directory of a trial, its lock, its record, and the digests of its files.

- One writer at a time: the process that runs or resumes the trial holds the lock, and the lock goes with it.
- Digests of a level's evidence (logs, metrics, facts, records) are recorded when the level ends. Weights, saved models, earlier
  attempts and files of the desktop are no evidence and may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from seatrial.core.errors import UserError
from seatrial.core.files import read_json, read_model, read_text, write_json
from seatrial.core.guarded import open_file, parse_json
from seatrial.core.records import Alteration, FileDigest, LevelResult, PlannedLevel, SideResult, Trial, replace
from seatrial.core.verdict import Verdict
from seatrial.runtime.filelock import HeldError, hold

IGNORE = b"*\n"


def now() -> str:
    """The time as it is stored: UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_path(root: Path, loop: str) -> Path:
    """`<root>/<time>-<loop>-<short id>`; nothing is made."""
    return (root / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{loop}-{secrets.token_hex(2)}").absolute()


def new_directory(root: Path, loop: str) -> Path:
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
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(path / ".lock", f"{os.getpid()}\n"))
        except HeldError as held:
            message = f"{path}: another seatrial (process {held.holder or 'unknown'}) works in this directory"
            raise UserError(message, "wait for it, or name another with --out") from held
        except OSError as error:
            raise UserError(f"{path}: cannot write there: {error.strerror or error}", "make the directory writable") from error
        yield


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
    return replace(trial, levels=tuple(levels))


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
    content = trial.model_dump(mode="json")
    write_json(path / "trial.json", content | {"seal": _seal(content)})


def is_sealed(path: Path) -> bool:
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
    return path / "levels" / f"{level.number}-{level.name}"


EVIDENCE = "evidence"
RESULT, IMPORTS = "result.json", "imports.json"
ATTEMPTS = "attempts"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".npz", ".npy", ".gguf", ".metadata")
"""How files of tensors end: large, and no judge reads them again."""
CHECKPOINT = re.compile(r"(?i)checkpoints?([-_.]?\d+)?|ckpts?|(global_)?step[-_]?\d+|iter[-_]?\d+|epoch[-_]?\d+|tmp-checkpoint.*")
"""Names of directories that hold a checkpoint."""
SAVED_MODEL = re.compile(r"(model|pytorch_model|adapter_model|consolidated|optimizer)[^/]*\.(safetensors|bin|pt|pth)")
"""A directory that holds such a file is a saved model."""
MEASURED = (".jsonl", ".log")
"""What readers find by themselves, wherever it lies; event files, too."""
JUNK = re.compile(r"\..*|.*~|#.*#|.*\.(swp|swo|tmp|bak|orig|pids|pyc|lock)|Thumbs\.db|desktop\.ini|Icon\r")
"""Files that desktops, editors, locks and half-made writes leave."""


def digest(file: Path) -> FileDigest:
    with open_file(file) as stream:
        made = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileDigest(size=stream.tell(), sha256=made)


def sha256(file: Path) -> str:
    return digest(file).sha256


def level_digests(run_dir: Path, directory: str) -> dict[str, FileDigest]:
    """Digests of the evidence of one level, or of the tests before the levels; `directory` is relative to `run_dir`."""
    return {str(file.relative_to(run_dir)): digest(file) for file in evidence_files(run_dir / directory)}


def evidence_digests(run_dir: Path) -> dict[str, FileDigest]:
    place = run_dir / EVIDENCE
    files = [file for file in sorted(place.glob("*")) if _regular(file) and file.name != IMPORTS and not JUNK.fullmatch(file.name)]
    return {str(file.relative_to(run_dir)): digest(file) for file in files}


def evidence_files(directory: Path) -> Iterator[Path]:
    """The files of a level by which it was judged."""
    for parent, folders, names in os.walk(directory):
        place = Path(parent)
        depth = len(place.relative_to(directory).parts)
        folders[:] = sorted(name for name in folders if not _skipped(name, depth))
        saved = depth > 1 and any(SAVED_MODEL.fullmatch(name) for name in names)
        for name in sorted(names):
            if _counts(name, depth, saved) and _regular(place / name):
                yield place / name


def _counts(name: str, depth: int, saved: bool) -> bool:
    """Whether a file `depth` folders below a level is evidence; `saved` is one of a saved model."""
    if JUNK.fullmatch(name) or name.endswith(WEIGHTS) or (depth == 0 and name == RESULT):
        return False
    return not saved or name.endswith(MEASURED) or "tfevents" in name


def _skipped(folder: str, depth: int) -> bool:
    return (depth == 0 and folder == ATTEMPTS) or folder == "__pycache__" or CHECKPOINT.fullmatch(folder) is not None


def is_measured(name: str) -> bool:
    """Whether a reader of metrics, logs or facts would take a file of this name up."""
    return name.endswith(MEASURED) or "tfevents" in name or name in ("metrics.json", "trainer_state.json")


def _regular(file: Path) -> bool:
    """Whether it is a file, and no link to one."""
    try:
        return stat.S_ISREG(file.lstat().st_mode)
    except OSError:
        return False


def kept_only(files: Mapping[str, FileDigest], results: list[LevelResult | SideResult]) -> dict[str, FileDigest]:
    """The digests of the evidence and of these results: what runs again has none meanwhile."""
    places = tuple(f"{result.directory}/" for result in results if result.directory)
    return {path: found for path, found in files.items() if path.startswith((f"{EVIDENCE}/", *places))}


def compare_digests(run_dir: Path, trial: Trial, directory: str) -> list[Alteration]:
    """What of one level is not as it was recorded; `directory` may be that of the evidence of the whole trial."""
    owner = "" if directory == EVIDENCE else directory
    recorded = {path: found for path, found in trial.files.items() if path.startswith(f"{directory}/")}
    if not recorded:
        return [Alteration(path=directory, code="unrecorded", owner=owner)]
    folders = {str(folder) for path in recorded for folder in Path(path).parents if folder != Path()}
    made = [Alteration(path=folder, code="linked", owner=owner) for folder in sorted(folders) if (run_dir / folder).is_symlink()]
    for path, found in recorded.items():
        code = _altered(run_dir / path, found)
        if code is not None:
            made.append(Alteration(path=path, code=code, owner=owner))
    there = {str(file.relative_to(run_dir)) for file in evidence_files(run_dir / directory) if is_measured(file.name)}
    made += [Alteration(path=path, code="added", owner=owner) for path in sorted(there - set(recorded))]
    return made


def _altered(file: Path, recorded: FileDigest) -> Literal["changed", "removed", "linked"] | None:
    try:
        status = file.lstat()
        if stat.S_ISLNK(status.st_mode):
            return "linked"
        if not stat.S_ISREG(status.st_mode):
            return "removed"
        if digest(file) != recorded:  # by what is read: a size may be an old one where directories are shared
            return "changed"
    except FileNotFoundError:
        return "removed"
    except OSError:
        return "changed"  # it cannot be read any more
    return None
