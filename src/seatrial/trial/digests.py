"""Digests of the files of a run directory: what is recorded when a level ends, and what is not as it was.

- Evidence of a level are its regular files: logs, metrics, facts, records of the judge. No evidence are weights and other files of
  checkpoints and saved models, which a user may delete, earlier attempts, and what desktops and editors leave.
- `result.json` and `evidence/imports.json` repeat what trial.json says. They are compared with it (see `verify`), not by a digest: a
  Seatrial that is killed between two writes must not look like somebody who edits.
- Paths are relative to the run directory: a copy of it is as good as the original.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from seatrial.model.guarded import open_file
from seatrial.model.record import Alteration, FileDigest, LevelResult, SideResult, Trial

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
    """Size and SHA-256 of a file."""
    with open_file(file) as stream:
        made = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileDigest(size=stream.tell(), sha256=made)


def sha256(file: Path) -> str:
    """SHA-256 of a file."""
    return digest(file).sha256


def of_level(run_dir: Path, directory: str) -> dict[str, FileDigest]:
    """Digests of the evidence of one level, or of the tests before the levels; `directory` is relative to `run_dir`."""
    return {str(file.relative_to(run_dir)): digest(file) for file in evidence_files(run_dir / directory)}


def of_evidence(run_dir: Path) -> dict[str, FileDigest]:
    """Digests of what was stored before the first process started."""
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


def compare(run_dir: Path, trial: Trial, directory: str) -> list[Alteration]:
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
