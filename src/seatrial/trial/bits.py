"""Two runs of one level, bit by bit: identical, or the first place where they differ. Only reads files.

- `record.jsonl` of a phase holds one row per event, in the order in which the loop did things. `metrics.jsonl` holds what
  the loop logged. Two bit-reproducible runs have equal rows; where a record is absent the metrics alone decide.
- Rows of a record are compared in order, those of each process by themselves; metrics step by step. Clocks, process numbers
  and paths are not compared.
- Files that cannot be read, a phase that Seatrial cut, or nothing to compare: not comparable, never identical.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from seatrial.files import read_text
from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_json
from seatrial.model.record import BitComparison, BitDifference
from seatrial.model.verdict import Boundary

Source = Literal["record", "metrics"]
RECORD, METRICS, PHASES, ATTEMPTS = "record.jsonl", "metrics.jsonl", "phases.json", "attempts"
ABSENT, END = "absent", "the end"
UNCOMPARED = ("seconds", "pid", "tensors")
"""Keys of a row that differ between equal runs, or name files whose digests are compared; so do those that start with `path`."""
SAID = "trainer/"
"""Begins the names of what the trainer says of itself, where its methods have the names that we know: one that a side lacks, because it
renamed them, is no difference."""
GROUPS = ("digests", "values")
WRITERS = ("process", "rank")
"""Keys of a row that tell which process wrote it."""
PLACES = tuple(("", key) for key in ("event", "step", "stage"))
"""Where a row belongs: no evidence by itself."""
STAGES = {
    "data": Boundary.DATA,
    "sampling": Boundary.ROLLOUT,
    "length": Boundary.ROLLOUT,
    "reward": Boundary.REWARD,
    "advantage": Boundary.REWARD,
    "reference": Boundary.PROVIDER,
    "logprob": Boundary.PROVIDER,
    "ratio": Boundary.OPTIMIZER,
    "kl": Boundary.OPTIMIZER,
    "mask": Boundary.DATA,
    "loss": Boundary.OPTIMIZER,
    "gradient": Boundary.OPTIMIZER,
    "clip": Boundary.OPTIMIZER,
    "schedule": Boundary.OPTIMIZER,
    "update": Boundary.OPTIMIZER,
    "logging": Boundary.METRICS,
}
"""Where a difference in a stage of the training step sits."""


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a file: where in the run it belongs, and what it holds."""

    step: int | None
    stage: str
    fields: Mapping[tuple[str, str], str]
    """By group (`digests`, `values`, or none) and name."""


class _NotComparableError(Exception):
    """Why two level directories cannot be compared."""


def compare_levels(level: int, base: Path, now: Path, is_clock: Callable[[str], bool]) -> BitComparison:
    """The level directory `now` beside the same level of the base. `is_clock` tells metrics that measure the machine."""
    try:
        phases = _phases(base, now)
        sources: set[Source] = set()
        compared = 0
        for phase in phases:
            found, equal = _phase(phase, base, now, is_clock, sources)
            compared += equal
            if found is not None:
                return BitComparison(level=level, outcome="differs", sources=_sorted(sources), compared=compared, difference=found)
    except (_NotComparableError, UserError) as error:
        return BitComparison(level=level, outcome="not comparable", reason=str(error))
    if not compared:
        return BitComparison(level=level, outcome="not comparable", reason="neither run recorded anything that could differ")
    return BitComparison(level=level, outcome="identical", sources=_sorted(sources), compared=compared)


def boundary_of(difference: BitDifference) -> Boundary:
    """Where a difference sits: by its stage; one that only metrics show is at metrics."""
    stage = difference.stage.lower()
    named = next((boundary for boundary in Boundary if boundary == stage), None)
    return named or STAGES.get(stage, Boundary.METRICS)


def _sorted(sources: set[Source]) -> tuple[Source, ...]:
    every: tuple[Source, ...] = ("record", "metrics")
    return tuple(source for source in every if source in sources)


def _phases(base: Path, now: Path) -> list[str]:
    """The directories that hold a record or metrics on either side, in the order in which the phases ran."""
    order = list(dict.fromkeys((*_ended(base), *_ended(now))))
    found = {file.parent.relative_to(side).as_posix() for side in (base, now) for file in _files(side)}
    if not found:
        raise _NotComparableError("neither run left a record or metrics")
    inner = found - {"."}  # the metrics that Seatrial itself gathered count only where no phase has any
    return sorted(inner or found, key=lambda name: (_place(order, name), name))


def _place(order: list[str], name: str) -> int:
    phase = name.partition("/")[0]
    return order.index(phase) if phase in order else len(order)


def _files(side: Path) -> Iterator[Path]:
    for name in (RECORD, METRICS):
        yield from (file for file in side.rglob(name) if file.relative_to(side).parts[0] != ATTEMPTS)


def _ended(side: Path) -> list[str]:
    """The phases that ran; one that Seatrial cut ended at a moment that no two runs share."""
    try:
        rows = parse_json(read_text(side / PHASES))
        cut = next((row for row in rows if row["ended"] != "exited"), None)
        names = [str(row["name"]) for row in rows]
    except (UserError, ValueError, KeyError, TypeError) as error:
        raise _NotComparableError(f"{side / PHASES} cannot be read: {error}") from error
    if cut is not None:
        raise _NotComparableError(f"{side / str(cut['name'])} did not run to its own end ({cut['ended']})")
    return names


def _phase(phase: str, base: Path, now: Path, is_clock: Callable[[str], bool], sources: set[Source]) -> tuple[BitDifference | None, int]:
    """The first difference of one phase: the earlier step of record and metrics, the record where both show one. And what is equal."""
    found: list[BitDifference] = []
    equal = 0
    for source, name in (("record", RECORD), ("metrics", METRICS)):
        kind: Source = "record" if source == "record" else "metrics"
        before, after = base / phase / name, now / phase / name
        if not before.is_file() and not after.is_file():
            continue
        sources.add(kind)
        if not before.is_file() or not after.is_file():
            sides = [_count(file) for file in (before, after)]
            found.append(BitDifference(phase=phase, source=kind, step=None, name=name, expected=sides[0], found=sides[1]))
            continue
        for old, new in _pairs(before, after) if kind == "record" else [_steps(before, after, is_clock)]:
            difference, same = _first(phase, kind, old, new)
            equal += same
            found += [difference] if difference else []
    return min(found, key=lambda one: -1 if one.step is None else one.step, default=None), equal


def _count(file: Path) -> str:
    return f"{len(read_text(file).splitlines())} rows" if file.is_file() else ABSENT


def _first(phase: str, source: Source, before: Iterable[_Row], after: Iterable[_Row]) -> tuple[BitDifference | None, int]:
    """The first row that differs, and how many fields before it are equal."""
    equal = 0
    for old, new in zip_longest(before, after):
        if old is None or new is None:
            there, ends = (old or new), (END if old is None else "a row", END if new is None else "a row")
            assert there is not None  # the longer one has a row
            return BitDifference(
                phase=phase, source=source, step=there.step, stage=there.stage, name="row", expected=ends[0], found=ends[1]
            ), equal
        for key in (*old.fields, *(key for key in new.fields if key not in old.fields)):
            one, two = old.fields.get(key, ABSENT), new.fields.get(key, ABSENT)
            if one != two and not (key[1].startswith(SAID) and {one, two} & {ABSENT, "null"}):
                return BitDifference(
                    phase=phase, source=source, step=old.step, stage=old.stage, name=key[1], expected=one, found=two
                ), equal
        equal += sum(1 for key in old.fields if key not in PLACES)
    return None, equal


def _pairs(before: Path, after: Path) -> list[tuple[Iterable[_Row], Iterable[_Row]]]:
    """The rows of two records, by the process that wrote them: several may write to one file, in no fixed order."""
    sides = []
    for file in (before, after):
        rows: dict[str, list[_Row]] = {}
        for row in _objects(file):
            step = row.get("step")
            made = _Row(step if isinstance(step, int) else None, str(row.get("stage", "")), _recorded(row))
            rows.setdefault(json.dumps([row.get(key) for key in WRITERS]), []).append(made)
        sides.append(rows)
    pairs = [(sides[0].get(writer, []), sides[1].get(writer, [])) for writer in sorted({**sides[0], **sides[1]})]
    return [(_heard(old, new), _heard(new, old)) for old, new in pairs]


def _heard(rows: list[_Row], others: list[_Row]) -> list[_Row]:
    """The rows without those of which only the trainer tells, if the other side has none of their kind."""
    kinds = {row.fields.get(("", "event")) for row in others}
    return [row for row in rows if row.fields.get(("", "event")) in kinds or not all(key[1].startswith(SAID) for key in _held(row))]


def _held(row: _Row) -> list[tuple[str, str]]:
    return [key for key in row.fields if key not in PLACES]


def _steps(before: Path, after: Path, is_clock: Callable[[str], bool]) -> tuple[Iterable[_Row], Iterable[_Row]]:
    """The metrics of two files, one row for each step: within a step the order of rows means nothing."""
    sides = [_by_step(file, is_clock) for file in (before, after)]
    steps = sorted({**sides[0], **sides[1]}, key=lambda step: -1 if step is None else step)
    first, second = (
        [_Row(step, "", {key: ", ".join(sorted(one)) for key, one in side.get(step, {}).items()}) for step in steps] for side in sides
    )
    return first, second


def _by_step(file: Path, is_clock: Callable[[str], bool]) -> dict[int | None, dict[tuple[str, str], list[str]]]:
    found: dict[int | None, dict[tuple[str, str], list[str]]] = {}
    for row in _objects(file):
        step = row.get("step")
        place = found.setdefault(step if isinstance(step, int) else None, {})
        for key, value in _logged(row, is_clock):
            place.setdefault(key, []).append(value)
    return found


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; a torn or foreign line makes it not comparable."""
    *lines, rest = read_text(file).split("\n")
    for number, line in enumerate([*lines, rest] if rest else lines, 1):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise _NotComparableError(f"{file}:{number} is damaged: {error}") from error
        if not isinstance(row, dict):
            raise _NotComparableError(f"{file}:{number} is no object")
        yield row


def _logged(row: dict[str, Any], is_clock: Callable[[str], bool], group: str = "") -> Iterator[tuple[tuple[str, str], str]]:
    """What of a row of metrics is compared; some loops put the metrics of a step into a group of their own."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _logged(value, is_clock, f"{group}{key}/")
        elif not is_clock(key) and (group, key) not in PLACES:
            yield (group, key), _exact(value)


def _recorded(row: dict[str, Any]) -> dict[tuple[str, str], str]:
    """What of a row of a record is compared: where it belongs first, then digests, values, and what else it holds."""
    fields = {(group, key): _exact(row[key]) for group, key in PLACES if key in row}
    for group in GROUPS:
        inside = row.get(group)
        held = inside if isinstance(inside, dict) else {} if inside is None else {"": inside}
        fields |= {(group, key): _exact(value) for key, value in held.items() if group == "digests" or not _own(key)}
    known = {key for _, key in PLACES} | set(GROUPS)
    return fields | {("", key): _exact(value) for key, value in row.items() if key not in known and not _own(key)}


def _own(key: str) -> bool:
    """Whether a key holds what differs between equal runs."""
    return key in UNCOMPARED or key.startswith("path")


def _exact(value: Any) -> str:
    """A value as text that is equal only for equal bits; 1 and 1.0 are the same number."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 and str(value) != "-0.0" else repr(value)
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return value if isinstance(value, str) else json.dumps(value)
