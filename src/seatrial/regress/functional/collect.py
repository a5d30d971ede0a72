"""Copies of what a script left: the next run of the script deletes its own.

- Metrics are copied only if this run wrote them, and are judged from the copy: what is on disk is what was judged.
- Logs, tables and event files in the script's own directory are kept too; checkpoints and large files are not, and that is said.
- Texts are redacted in the copy.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.files import write_bytes
from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_json

KEPT = ("*.log", "*.log.*", "*.json", "*.jsonl", "*.yaml", "*.txt", "*tfevents*", "*.csv")
TEXTS = (".log", ".json", ".jsonl", ".yaml", ".txt", ".csv")
LARGEST = 64 << 20
STRINGS = re.compile(r'("(?:[^"\\\n]|\\.)*")(?:(\s*:\s*)("(?:[^"\\\n]|\\.)*"))?')
"""The strings of JSON: alone, or as a name with its value."""
MOST = 2000
"""Files of one script."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What was copied, and what was not."""

    files: tuple[str, ...]
    notes: tuple[str, ...] = ()


def fresh(path: Path, started: float) -> bool:
    """Whether this run wrote the file."""
    try:
        return path.is_file() and path.stat().st_mtime >= started
    except OSError:
        return False


def copy_metrics(source: Path, target: Path, started: float) -> Path:
    """Copy a metrics file, or what is fresh in a directory of them; a UserError says why there is nothing to judge."""
    if not source.exists():
        raise UserError(f"the script left no metrics: {source} does not exist", "")
    found = [source] if source.is_file() else _below(source)
    new = [file for file in found if fresh(file, started)]
    if not new:
        raise UserError(f"{source}: older than this run" if found else f"the script left no metrics: {source} is empty", "")
    place = target if source.is_dir() else target.with_suffix(source.suffix or ".json")
    if "tfevents" in source.name:
        place = target / source.name  # the reader knows event files by their names
    try:
        for file in new:
            into = place / file.relative_to(source) if source.is_dir() else place
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, into)
    except OSError as error:
        raise UserError(f"{source}: cannot be copied: {error.strerror or error}", "") from error
    return place


def content(path: Path | None) -> str:
    """A digest of a file; empty where there is none."""
    try:
        if path is None or not path.is_file():
            return ""
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return ""


def clear_metrics(directory: Path, redactor: Redactor) -> None:
    """Redact the copies of metrics, once they were judged: strings only, since a number that looks like a secret is a number."""
    for file in _below(directory):
        if not file.relative_to(directory).parts[0].startswith("metrics") or file.suffix not in TEXTS:
            continue
        if file.suffix not in (".json", ".jsonl"):
            redactor.file(file)
            continue
        text = file.read_bytes().decode("utf-8", "surrogateescape")
        cleared = STRINGS.sub(lambda found: _cleared(found, redactor), text)
        if cleared != text:
            write_bytes(file, cleared.encode("utf-8", "surrogateescape"))


def _cleared(found: re.Match[str], redactor: Redactor) -> str:
    try:
        name, value = str(parse_json(found[1])), None if found[3] is None else parse_json(found[3])
    except ValueError:
        return redactor.text(found[0])  # no JSON
    if value is None:
        return found[0] if (new := redactor.text(name)) == name else json.dumps(new)
    shown, kept = redactor.text(name), redactor.value({name: value})[name]
    return found[0] if (shown, kept) == (name, value) else f"{json.dumps(shown)}{found[2]}{json.dumps(kept)}"


def take(source: Path, target: Path, redactor: Redactor, began: float | None = None) -> Taken:
    """Copy logs and tables below `source`; with `began` only files that were written since."""
    if not source.is_dir():
        return Taken(())
    files, left = list[str](), list[str]()
    for file in _below(source):
        if file.is_relative_to(target):
            continue
        name = file.relative_to(source).as_posix()
        if not any(fnmatch.fnmatch(file.name, pattern) for pattern in KEPT) or (began is not None and not fresh(file, began)):
            continue
        try:
            if file.stat().st_size > LARGEST or len(files) >= MOST:
                left.append(name)
                continue
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target / name)
            if file.suffix in TEXTS:
                redactor.file(target / name)
        except OSError as error:
            left.append(f"{name} ({error.strerror or error})")
            continue
        files.append(name)
    notes = (
        (f"not copied from {source}, for their size or number: {', '.join(left[:5])}" + (" …" if len(left) > 5 else ""),) if left else ()
    )
    return Taken(tuple(files), notes)


def _below(directory: Path) -> list[Path]:
    """Files, sorted; links are not followed out of the directory."""
    found = [Path(parent) / name for parent, _, names in os.walk(directory) for name in names]
    return sorted(file for file in found if file.is_file() and not file.is_symlink())
