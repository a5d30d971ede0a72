"""Files and directories into `Metrics`, of one run only: two runs in one series would let a good one answer for a bad one.

- A directory is searched for event files, metrics.json, trainer_state.json, and *.jsonl files whose rows look like metrics.
- Files of one directory are of one run, unless they give different values to the same steps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations, pairwise
from pathlib import Path
from typing import NoReturn

from seatrial.core.errors import UserError
from seatrial.core.guarded import real_path
from seatrial.core.series import Metrics
from seatrial.core.text import first_few
from seatrial.metrics.json_files import read_json_metrics, read_jsonl
from seatrial.metrics.readings import FileReading, Merger, same
from seatrial.metrics.tensorboard import read_events

CHECKPOINT = re.compile(r"(?i)(tmp-)?checkpoint-\d+|global_step_\d+|step_\d+|iter_\d+")

_ALL = 40


class SourceKind(IntEnum):
    """Kinds of metric files, in the order in which they are merged."""

    TABLE = 1
    EVENTS = 2
    STATE = 3
    ROWS = 4


@dataclass(frozen=True, slots=True)
class MetricSource:
    """One file and what it holds."""

    file: Path
    kind: SourceKind
    reading: FileReading


def different_runs(sources: Sequence[MetricSource]) -> list[Path]:
    """The runs that these files are of, each by its directory or its file; empty where all are of one."""
    homes: dict[Path, list[MetricSource]] = {}
    for source in sources:
        homes.setdefault(_home(source.file), []).append(source)
    merged = {home: _Run(home, tuple(files), _merged(files)) for home, files in homes.items()}
    apart = {run.home for one, other in _pairs([*merged.values()]) if _apart(one, other, homes) for run in (one, other)}
    for home, files in homes.items():
        each = [_Run(home, (file,), _merged([file])) for file in files]
        inside = {run.files[0].file for one, other in _pairs(each) if _restarted(one, other) for run in (one, other)}
        if inside:
            apart = (apart - {home}) | inside
    return sorted(apart)


@dataclass(frozen=True, slots=True)
class _Run:
    """Files that may be of one run, and what they hold together."""

    home: Path
    files: tuple[MetricSource, ...]
    metrics: Metrics

    def kinds(self) -> set[SourceKind]:
        return {source.kind for source in self.files}

    def tags(self) -> set[str]:
        return {*self.metrics.series, *self.metrics.scalars}

    def first(self) -> int:
        """The first step of any metric."""
        return min((series.steps[0] for series in self.metrics.series.values() if series.steps), default=0)


def _pairs(runs: Sequence[_Run]) -> Iterable[tuple[_Run, _Run]]:
    """Every two of them; of very many only neighbours, which are enough to see that there are several."""
    return combinations(runs, 2) if len(runs) <= _ALL else pairwise(runs)


def _home(file: Path) -> Path:
    """The directory of the run that a file belongs to."""
    home = file.parent
    while CHECKPOINT.fullmatch(home.name):
        home = home.parent
    return home


def _apart(one: _Run, other: _Run, homes: Container[Path]) -> bool:
    """Whether two directories are of different runs."""
    shared, equal = _shared(one.metrics, other.metrics)
    if one.home.is_relative_to(other.home) or other.home.is_relative_to(one.home):
        return not equal
    if shared:
        return not equal or bool(one.kinds() & other.kinds())
    above = {*one.home.parents} & {*other.home.parents}
    return bool(one.tags() & other.tags()) or not any(home in homes for home in above)


def _restarted(one: _Run, other: _Run) -> bool:
    """Whether two files of a directory are of different runs."""
    if _shared(one.metrics, other.metrics)[1]:
        return False
    if one.kinds() == other.kinds() == {SourceKind.STATE}:
        return False  # checkpoints of one run: the later one tells it anew
    return one.kinds() != {SourceKind.EVENTS} or other.kinds() != {SourceKind.EVENTS} or other.first() <= one.first()


def _shared(left: Metrics, right: Metrics) -> tuple[bool, bool]:
    """Whether two runs have a step of a metric, or a single value, in common, and whether all of these are the same."""
    found = False
    for tag in left.series.keys() & right.series.keys():
        values = dict(zip(right.series[tag].steps, right.series[tag].values, strict=True))
        for step, value in zip(left.series[tag].steps, left.series[tag].values, strict=True):
            if step in values:
                found = True
                if not same(value, values[step]):
                    return True, False
    for tag in left.scalars.keys() & right.scalars.keys():
        found = True
        if left.scalars[tag] != right.scalars[tag]:
            return True, False
    return found, True


ALSO = "name further files of one run with --also"
_SHOWN = 6
_KINDS = "events*tfevents*, *.jsonl, metrics.json, trainer_state.json"


_READERS: dict[SourceKind, Callable[[Path], FileReading | None]] = {
    SourceKind.TABLE: read_json_metrics,
    SourceKind.EVENTS: read_events,
    SourceKind.STATE: read_json_metrics,
    SourceKind.ROWS: read_jsonl,
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
            message = f"{path}: holds the metrics of {len(names)} runs: {first_few(names, _SHOWN, ', and ')}"
            raise UserError(message, f"give the path of one of them, such as {several[0]}; {ALSO}")
    return _merged([source for _, found in sources for source in found])


def _merged(sources: Sequence[MetricSource], prefix: str = "") -> Metrics:
    merger = Merger(prefix)
    for source in sources:
        merger.add(source.reading, str(source.file), original=source.kind is SourceKind.EVENTS)
    return merger.metrics()


def _sources(paths: Sequence[Path]) -> list[tuple[Path, list[MetricSource]]]:
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
                found.append(MetricSource(file, kind, reading))
        if not found and not known and path.is_dir():
            raise UserError(f"{path}: the directory holds no metrics", f"give the directory that the loop logs to; known files: {_KINDS}")
        if not found and not known:
            raise UserError(f"{path}: the file holds no metrics", f'give one of {_KINDS}; a row of JSONL is {{"step": 1, "loss": 0.5}}')
        made.append((path, found))
    return made


def _files(path: Path) -> list[tuple[Path, SourceKind]]:
    """The candidates below `path`, in the order in which they are merged."""
    if path.is_dir():
        candidates = [(file, kind) for file in _walk(path) if (kind := _kind(file)) is not None]
        return sorted(candidates, key=lambda candidate: (candidate[1], _age(*candidate)))
    if not path.exists():
        raise UserError(f"{path}: no such file or directory", "check the path; a loop writes its metrics from its first step on")
    kind = _kind(path)
    if kind is None and path.suffix == ".json":
        kind = SourceKind.TABLE
    return [(path, kind)] if kind is not None else []


def _walk(directory: Path) -> list[Path]:
    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"{error.filename}: cannot read: {error.strerror}", "check the permissions of the directory") from error

    return [Path(parent) / name for parent, _, names in os.walk(directory, onerror=refuse) for name in names]


def _kind(file: Path) -> SourceKind | None:
    """What a file is by its name, as far as a search through a directory goes."""
    if file.name.startswith("events") and "tfevents" in file.name:
        return SourceKind.EVENTS
    if file.name == "metrics.json":
        return SourceKind.TABLE
    if file.name == "trainer_state.json":
        return SourceKind.STATE
    return SourceKind.ROWS if file.suffix == ".jsonl" else None


def _age(file: Path, kind: SourceKind) -> tuple[int, list[tuple[int, str]]]:
    """Sorts files of one kind from the oldest to the newest by their names; copying changes a file's own time."""
    rank = 0
    if kind is SourceKind.EVENTS and (match := re.search(r"tfevents\.(\d+)", file.name)):
        rank = int(match[1])
    elif kind is SourceKind.STATE:
        rank = -len(file.parts)  # the state inside a checkpoint is older than the one above it
    natural = [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", str(file))]
    return rank, natural
