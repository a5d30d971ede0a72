"""Whether metric files are of one run. Two runs in one series would let a good one answer for a bad one.

- Files of one directory are of one run, unless they give different values to the same steps. Event files that follow each other (a
  resumed run) may: the later one begins at a later step.
- A directory and one below it are of one run, unless they disagree. Checkpoints belong to the run above them.
- Directories side by side are of different runs, unless they repeat each other (the same metrics as event files and as JSONL), or
  each holds metrics of its own below those of the run (TensorBoard's sub-writers).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations, pairwise
from pathlib import Path

from seatrial.metrics.merge import Merger, same
from seatrial.metrics.points import Reading
from seatrial.model.series import Metrics

CHECKPOINT = re.compile(r"(?i)(tmp-)?checkpoint-\d+|global_step_\d+|step_\d+|iter_\d+")

_ALL = 40


class Kind(IntEnum):
    """Kinds of metric files, in the order in which they are merged."""

    TABLE = 1
    EVENTS = 2
    STATE = 3
    ROWS = 4


@dataclass(frozen=True, slots=True)
class Source:
    """One file and what it holds."""

    file: Path
    kind: Kind
    reading: Reading


def different_runs(sources: Sequence[Source]) -> list[Path]:
    """The runs that these files are of, each by its directory or its file; empty where all are of one."""
    homes: dict[Path, list[Source]] = {}
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
    files: tuple[Source, ...]
    metrics: Metrics

    def kinds(self) -> set[Kind]:
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
    if one.kinds() == other.kinds() == {Kind.STATE}:
        return False  # checkpoints of one run: the later one tells it anew
    return one.kinds() != {Kind.EVENTS} or other.kinds() != {Kind.EVENTS} or other.first() <= one.first()


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


def _merged(sources: Sequence[Source]) -> Metrics:
    merger = Merger()
    for source in sources:
        merger.add(source.reading, str(source.file))
    return merger.metrics()
