"""What a path is, and the runs in it.

- A file that is named must be one of the known kinds; a directory is searched, from the top down: the run directory of a trial and the
  directory of a campaign are one run each, and are not searched further; metric files are one run with all metric files below them.
- Dated results come in the order in which they were made, and unit_results.json, a copy of the latest, after them: runs of one second
  are told apart by their number alone.
- Below a directory, files of other kinds are passed over; a file that has the name or a key of results, and cannot be
  read, is told.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from seatrial.model.errors import UserError
from seatrial.model.guarded import BadValue, parse_json
from seatrial.regress.history.importers import bench, unit
from seatrial.regress.history.importers.draft import Draft, read_bytes, require_sound

LOOKED_FOR = (
    "unit_results.json (and dated copies of it), the run directory of a trial (trial.json), the directory of a campaign (manifest.json), "
    "JSON lines of benchmarks, JSON of pytest-benchmark, and metrics (metrics.json, metrics.jsonl, event files, trainer_state.json)"
)
_LATEST = "unit_results.json"
_DATED = re.compile(r"(\d{8}_\d{6})(?:-(\d+))?\.json")
"""The first of a second has no number, the next one is `-2`."""
_METRICS = re.compile(r"metrics\.jsonl?|trainer_state\.json|events.*tfevents.*")
_TORN = re.compile(rb'"(exit_status|start_time|machine_info|benchmarks)"')
"""Keys of results: JSON that cannot be read and has one of them was results."""
_PASSED_OVER = {".git", "node_modules", "__pycache__", ".venv"}

Item = tuple[Path, Callable[[], list[Draft]]]
"""Where it is, and how it is read."""


def detect(path: Path) -> list[Item]:
    """The runs at a path; a UserError when there are none."""
    if not path.exists():
        raise UserError(f"{path}: no such file or directory", f"looked for: {LOOKED_FOR}")
    if path.is_dir():
        found = list(_search(path))
    else:
        item = _file(path, asked=True)
        found = [item] if item else []
    if not found:
        raise UserError(f"{path}: nothing that history can hold", f"looked for: {LOOKED_FOR}")
    return [(place, functools.partial(_guarded, place, read)) for place, read in found]


def _guarded(place: Path, read: Callable[[], list[Draft]]) -> list[Draft]:
    """What an importer read; a file of another shape is a UserError that names it."""
    try:
        drafts = read()
        for draft in drafts:
            require_sound(draft)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise UserError(f"{place}: not as results are written: {repr(error)[:200]}", "restore the file, or leave it out") from error
    return drafts


def in_order(paths: Sequence[Path]) -> list[Path]:
    """Paths as they were given (a shell puts `-2` before the plain name), but dated results of a folder in the order of their making."""
    dated = iter(sorted((path for path in paths if _DATED.fullmatch(path.name)), key=lambda path: (str(path.parent), _made(path))))
    return [next(dated) if _DATED.fullmatch(path.name) else path for path in paths]


def _made(path: Path) -> tuple[str, int, str]:
    """What sorts the files of a folder: dated results by stamp and then number, others by name."""
    found = _DATED.fullmatch(path.name)
    return (found[1], int(found[2] or 1), path.name) if found else (path.name, 0, path.name)


def _named(path: Path) -> bool:
    """Whether a file has a name of results."""
    return path.name == _LATEST or _DATED.fullmatch(path.name) is not None


def _search(folder: Path, *, metrics: bool = True) -> Iterator[Item]:
    """Runs below a directory; `metrics` is off below metric files, which were read with all that belongs to them."""
    one = _directory(folder)
    if one is not None:
        yield one
        return
    entries = sorted(folder.iterdir(), key=_made)
    if metrics and any(_METRICS.fullmatch(entry.name) for entry in entries):
        yield folder, lambda: _series(folder)
        metrics = False
    yield from _files(entry for entry in entries if entry.name != _LATEST)
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink() and entry.name not in _PASSED_OVER:
            yield from _search(entry, metrics=metrics)
    yield from _files(entry for entry in entries if entry.name == _LATEST)


def _files(entries: Iterable[Path]) -> Iterator[Item]:
    """Those of a folder that are runs."""
    for entry in entries:
        if entry.suffix in (".json", ".jsonl") and entry.is_file():
            try:
                item = _file(entry, asked=False)
            except UserError as error:
                item = entry, functools.partial(_refused, error)
            if item is not None:
                yield item


def _refused(error: UserError) -> list[Draft]:
    """What cannot be read is told when its turn comes, and stops none of the others."""
    raise error


def _directory(folder: Path) -> Item | None:
    """A directory that is one run."""
    if (folder / "trial.json").is_file():

        def trial() -> list[Draft]:
            from seatrial.regress.history.importers import trial as reading

            return [reading.read(folder)]

        return folder, trial
    if (folder / "manifest.json").is_file() and (folder / "inputs.jsonl").is_file():

        def campaign() -> list[Draft]:
            from seatrial.regress.history.importers import campaign as reading

            return [reading.read(folder)]

        return folder, campaign
    return None


def _series(path: Path) -> list[Draft]:
    from seatrial.regress.history.importers import series as reading

    return [reading.read(path)]


def _asked(path: Path) -> list[Draft]:
    """A file that was named, and that is metrics or nothing."""
    try:
        return _series(path)
    except UserError as error:
        raise UserError(error.message, f"looked for: {LOOKED_FOR}") from error


def _loaded(content: bytes) -> Any:
    """JSON, only to see what it is: keys that stand twice are found when it is read."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return parse_json(content)  # NaN, which the fast reader does not know


def _file(path: Path, *, asked: bool) -> Item | None:
    """A file by its content. Without a name of results, one that is no JSON is none of ours."""
    if path.suffix == ".jsonl":
        first = next((line for line in read_bytes(path).split(b"\n") if line.strip()), b"")
        try:
            ours = bench.looks_line(parse_json(first))
        except BadValue:
            ours = False
        if ours:
            return path, lambda: bench.read_lines(path)
        return (path, lambda: _asked(path)) if asked else None
    content = read_bytes(path) if path.suffix == ".json" else b""
    try:
        data = _loaded(content) if content else None
    except BadValue:
        results = asked or _named(path) or bool(_TORN.search(content))
        return (path, lambda: [unit.read(path, content)]) if results else None
    if unit.looks(data):
        return path, lambda: [unit.read(path, content)]
    if bench.looks_pytest(data):
        return path, lambda: [bench.read_pytest(path)]
    if _named(path):
        return path, lambda: [unit.read(path, content)]
    return (path, lambda: _asked(path)) if asked else None
