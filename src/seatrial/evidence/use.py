"""Was the change used at all? A package that is imported from the right place proves nothing about a file nobody loads.

Each process of a loop writes, at its end, which files below the checkouts it loaded (`probes/provenance.py`). A change
of which no file was loaded was not tested, however well the run went.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from seatrial.files import read_text
from seatrial.model.errors import UserError
from seatrial.model.record import RepoState


def read_loaded(paths: Iterable[Path]) -> frozenset[str]:
    """Absolute paths of all files that the processes loaded, links resolved. A torn row is an error."""
    found: set[str] = set()
    for path in paths:
        for number, row in enumerate(read_text(path).split("\n"), 1):
            if not row:
                continue
            try:
                entry = json.loads(row)
                found.update(str(Path(entry["root"], file).resolve()) for file in entry["files"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path}:{number}: not a row of loaded files: {error}", "run the level again") from error
    return frozenset(found)


def unused(repo: RepoState, loaded: frozenset[str]) -> str | None:
    """Why this change was not tested, or None."""
    roots = {place.resolve() for place in _trees(repo)}
    if not any(roots.intersection(Path(file).parents) for file in loaded):
        return f"no process of the loop loaded any file of {repo.name}"
    code = _code(repo)
    if code and len(code) == len(repo.changed) and not any(_is_loaded(repo, file, loaded) for file in code):
        return f"no process of the loop loaded any of the changed files of {repo.name} ({_few(code)})"
    return None


def not_loaded(repo: RepoState, loaded: frozenset[str]) -> str | None:
    """Changed Python files that nothing loaded, as a limitation."""
    left = [file for file in _code(repo) if not _is_loaded(repo, file, loaded)]
    return f"changed but never loaded, so not tested: {_few(left)} of {repo.name}" if left else None


def _code(repo: RepoState) -> list[str]:
    return [file for file in repo.changed if file.endswith(".py")]


def _trees(repo: RepoState) -> list[Path]:
    """The checkout, and the tree that holds a verified copy of it while the trial runs."""
    return [Path(place) for place in (repo.path, repo.synced) if place]


def _is_loaded(repo: RepoState, file: str, loaded: frozenset[str]) -> bool:
    return any(str((tree / file).resolve()) in loaded for tree in _trees(repo))


def _few(files: Sequence[str], most: int = 3) -> str:
    more = f" and {len(files) - most} more" if len(files) > most else ""
    return ", ".join(files[:most]) + more
