"""Lines of rollouts that NeMo Gym or NeMo-Skills wrote, each with its key: a task, and the label of a repetition.

- Gym: the key is (`_ng_task_index`, `_ng_rollout_index`); lines come in any order, from one file or several.
- Skills: a file per seed (`output-rs3.jsonl`, `rollouts-rs3.jsonl`), the seed is the label. Files are aligned by line, so line n is task
  n - 1 in all of them, unless the rows carry Gym's `_ng_task_index`. A file without a seed in its name is label 0.
- A line that is torn, no object, or without a key is a fault: named with file and line, never dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from seatrial.model.errors import UserError
from seatrial.model.guarded import open_file
from seatrial.rollouts.importing.heads import agent_of
from seatrial.rollouts.inputs.reading import BadRowError, parse
from seatrial.rollouts.inputs.rows import ROLLOUT_INDEX, TASK_INDEX
from seatrial.rollouts.inputs.writing import Faults

Kind = Literal["gym", "skills"]
_NO_KEY = (
    f"Gym's collector writes {TASK_INDEX} and {ROLLOUT_INDEX}; a file without them whose lines are different tasks: import skills FILE"
)
_SEED = re.compile(r"-rs(\d+)\.jsonl$")


@dataclass(frozen=True, slots=True)
class Line:
    """One line with its key."""

    file: int
    """Which of the files."""
    number: int
    offset: int
    length: int
    task: int
    label: int
    data: dict[str, Any]


def seed_of(path: Path) -> int:
    """The seed in the name of a Skills file."""
    match = _SEED.search(path.name)
    return int(match[1]) if match else 0


def in_order(kind: Kind, paths: Sequence[Path]) -> tuple[Path, ...]:
    """Files as they are read: those of Skills by the number of their seed, not by its letters (rs2 before rs10)."""
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file", "name the files that hold the rollouts")
        if path.name.endswith("-async"):
            raise UserError(f"{path}: NeMo-Skills is still writing it", "wait for the job, or resume it, and import the .jsonl")
    if kind == "gym":
        return tuple(paths)
    ordered = tuple(sorted(paths, key=seed_of))
    for first, second in pairwise(ordered):
        if seed_of(first) == seed_of(second):
            raise UserError(f"{first} and {second}: two files of seed {seed_of(first)}", "import one file per seed")
    return ordered


def lines(kind: Kind, paths: Sequence[Path], faults: Faults) -> Iterator[Line]:
    """Every good line of the files; the others go to `faults`."""
    for file, path in enumerate(paths):
        label = seed_of(path) if kind == "skills" else None
        for number, offset, text in _texts(path):
            where = f"{path}:{number}"
            try:
                data = parse(text)
            except BadRowError as error:
                faults.add(where, str(error))  # what it advises is for rows that can be written anew
                continue
            try:
                task, repeat = _gym_key(data) if label is None else (_skills_task(data, number), label)
                agent_of(data)
            except BadRowError as error:
                faults.add(where, error)
                continue
            yield Line(file, number, offset, len(text), task, repeat, data)


def _texts(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and content of each line that is not blank."""
    offset = 0
    try:
        with open_file(path) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, offset, line
                offset += len(line)
    except OSError as error:
        raise UserError(f"{path}: cannot read: {error.strerror or error}", "check the path and its permissions") from error


def _gym_key(data: Mapping[str, Any]) -> tuple[int, int]:
    return _index(data, TASK_INDEX), _index(data, ROLLOUT_INDEX)


def _skills_task(data: Mapping[str, Any], number: int) -> int:
    return _index(data, TASK_INDEX) if TASK_INDEX in data else number - 1


def _index(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if key not in data:
        raise BadRowError(f"no {key}", _NO_KEY)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise BadRowError(f"{key} is {value!r}, not a number from 0")
    return value
