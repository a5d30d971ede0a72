"""The tasks that files of rollouts (or of materialized inputs) hold, and which repetitions of each: little more than a number each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from seatrial.rollouts.importing.heads import agent_of, fingerprint
from seatrial.rollouts.importing.lines import Line


@dataclass(slots=True)
class Task:
    """Where a task was seen first, and what with."""

    file: int
    offset: int
    length: int
    agent: str | None
    fingerprint: str | None
    labels: int = 0
    """A bit for each label, by its place in `Survey.bits`."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tasks of one agent with the same repetitions: a dataset."""

    name: str
    labels: tuple[int, ...]
    tasks: tuple[int, ...]
    """In order."""


class Survey:
    """Learns the tasks, line by line."""

    def __init__(self, found: Iterable[Line]) -> None:
        self.tasks: dict[int, Task] = {}
        self.bits: dict[int, int] = {}
        for line in found:
            self._add(line)

    def _add(self, line: Line) -> None:
        task = self.tasks.get(line.task)
        if task is None:
            task = Task(line.file, line.offset, line.length, agent_of(line.data), fingerprint(line.data))
            self.tasks[line.task] = task
        task.labels |= 1 << self.bits.setdefault(line.label, len(self.bits))

    def groups(self, unnamed: str, *, exact: bool) -> list[Group]:
        """Datasets, by agent; `unnamed` is the one without. `exact`: a task is owed what it was seen with, else what any of its agent
        was seen with."""
        union: dict[str | None, int] = {}
        for task in self.tasks.values():
            union[task.agent] = union.get(task.agent, 0) | task.labels
        members: dict[tuple[str | None, int], list[int]] = {}
        for number in sorted(self.tasks):
            task = self.tasks[number]
            members.setdefault((task.agent, task.labels if exact else union[task.agent]), []).append(number)
        names: dict[str, int] = {}
        groups: list[Group] = []
        for (agent, bits), tasks in members.items():
            name = agent or unnamed
            names[name] = names.get(name, 0) + 1
            shown = name if names[name] == 1 else f"{name}.{names[name]}"
            groups.append(Group(shown, tuple(sorted(label for label, bit in self.bits.items() if bits >> bit & 1)), tuple(tasks)))
        return groups
