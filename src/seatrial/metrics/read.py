"""Files and directories into `Metrics`.

- A directory is searched through: event files, metrics.json, trainer_state.json, and those *.jsonl files whose rows
  look like metrics (rollouts in the same directory are left alone). `Metrics.sources` lists what was read.
- A file that is named must hold metrics: anything else is a UserError. So is a path that does not exist, and a
  directory without metrics.
- Order says who wins where a step was written twice: paths as given; within a directory metrics.json (a copy of
  something else) first, then event files by the time in their name, trainer states from the oldest checkpoint on,
  and JSONL, which has full precision, last.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from seatrial.metrics.events import read_events
from seatrial.metrics.jsonfiles import read_json_metrics, read_jsonl
from seatrial.metrics.merge import Merger
from seatrial.metrics.points import Reading
from seatrial.metrics.runs import Kind, Source, different_runs
from seatrial.model.errors import UserError
from seatrial.model.guarded import real_path
from seatrial.model.series import Metrics

ALSO = "name further files of one run with --also"
_SHOWN = 6
_KINDS = "events*tfevents*, *.jsonl, metrics.json, trainer_state.json"


_READERS: dict[Kind, Callable[[Path], Reading | None]] = {
    Kind.TABLE: read_json_metrics,
    Kind.EVENTS: read_events,
    Kind.STATE: read_json_metrics,
    Kind.ROWS: read_jsonl,
}


def read_metrics(paths: Sequence[Path], prefix: str = "") -> Metrics:
    """Everything that the given files and directories hold; `prefix` is put before every tag."""
    return _merged([source for path, found in _sources(paths) for source in found], prefix)


def read_run(paths: Sequence[Path]) -> Metrics:
    """The same of one run: a directory that holds several is a UserError that names them. What is named together belongs together."""
    sources = _sources(paths)
    for path, found in sources:
        several = different_runs(found) if path.is_dir() else []
        if several:
            names = [str(one.relative_to(path)) if one != path else "the directory itself" for one in several]
            more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            message = f"{path}: holds the metrics of {len(names)} runs: {', '.join(names[:_SHOWN])}{more}"
            raise UserError(message, f"give the path of one of them, such as {several[0]}; {ALSO}")
    return _merged([source for _, found in sources for source in found])


def _merged(sources: Sequence[Source], prefix: str = "") -> Metrics:
    merger = Merger(prefix)
    for source in sources:
        merger.add(source.reading, str(source.file), original=source.kind is Kind.EVENTS)
    return merger.metrics()


def _sources(paths: Sequence[Path]) -> list[tuple[Path, list[Source]]]:
    """The metric files of each path, each file once."""
    seen: set[Path] = set()
    made = []
    for path in paths:
        found, known = [], False
        for file, kind in _files(path):
            if real_path(file) in seen:
                known = True
                continue
            reading = _READERS[kind](file)
            if reading is not None:
                seen.add(real_path(file))
                found.append(Source(file, kind, reading))
        if not found and not known:
            _refuse(path)
        made.append((path, found))
    return made


def _refuse(path: Path) -> NoReturn:
    if path.is_dir():
        raise UserError(f"{path}: the directory holds no metrics", f"give the directory that the loop logs to; known files: {_KINDS}")
    raise UserError(f"{path}: the file holds no metrics", f'give one of {_KINDS}; a row of JSONL is {{"step": 1, "loss": 0.5}}')


def _files(path: Path) -> list[tuple[Path, Kind]]:
    """The candidates below `path`, in the order in which they are merged."""
    if path.is_dir():
        candidates = [(file, kind) for file in _walk(path) if (kind := _kind(file)) is not None]
        return sorted(candidates, key=lambda candidate: (candidate[1], _age(*candidate)))
    if not path.exists():
        raise UserError(f"{path}: no such file or directory", "check the path; a loop writes its metrics from its first step on")
    kind = _kind(path)
    if kind is None and path.suffix == ".json":
        kind = Kind.TABLE
    return [(path, kind)] if kind is not None else []


def _walk(directory: Path) -> list[Path]:
    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"{error.filename}: cannot read: {error.strerror}", "check the permissions of the directory") from error

    return [Path(parent) / name for parent, _, names in os.walk(directory, onerror=refuse) for name in names]


def _kind(file: Path) -> Kind | None:
    """What a file is by its name, as far as a search through a directory goes."""
    if file.name.startswith("events") and "tfevents" in file.name:
        return Kind.EVENTS
    if file.name == "metrics.json":
        return Kind.TABLE
    if file.name == "trainer_state.json":
        return Kind.STATE
    return Kind.ROWS if file.suffix == ".jsonl" else None


def _age(file: Path, kind: Kind) -> tuple[int, list[tuple[int, str]]]:
    """Sorts files of one kind from the oldest to the newest by their names; copying changes a file's own time."""
    rank = 0
    if kind is Kind.EVENTS and (match := re.search(r"tfevents\.(\d+)", file.name)):
        rank = int(match[1])
    elif kind is Kind.STATE:
        rank = -len(file.parts)  # the state inside a checkpoint is older than the one above it
    natural = [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", str(file))]
    return rank, natural
