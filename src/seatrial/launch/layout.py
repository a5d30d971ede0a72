"""Which copy of which component stands on which nodes, and what the allocation must therefore hold.

- Copies with GPUs own theirs: each is put on the first nodes that still have enough of them.
- Copies without GPUs share: the client and single services stand on the first node of their group.
- The allocation of a group spans as many nodes as its widest component needs, each with what the fullest node holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from seatrial.model.errors import UserError
from seatrial.model.job import Component, Job


@dataclass(frozen=True, slots=True)
class Step:
    """One copy, where it runs."""

    component: Component
    copy: int
    group: int
    node: int
    """First of its nodes, counted within the group."""
    gpus: tuple[int, ...] = ()
    """Numbers of its GPUs on each of its nodes."""

    @property
    def name(self) -> str:
        """As logs and results call it."""
        return f"{self.component.name}.{self.copy}"


@dataclass(frozen=True, slots=True)
class Group:
    """What one group of the allocation asks for, on each node."""

    name: str
    nodes: int
    gpus: int
    cpus: int
    memory_mb: int | None
    """None when a component shares the job's memory."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole job."""

    groups: tuple[Group, ...]
    steps: tuple[Step, ...]
    """Services first, in the order of the components; the client last."""

    @property
    def spans_nodes(self) -> bool:
        """Whether loopback is not enough to reach every component."""
        return len(self.groups) > 1 or self.groups[0].nodes > 1


def layout(job: Job, gpus_per_node: int) -> Layout:
    """Place every copy. Raises a UserError when a copy needs more GPUs than a node has."""
    ordered = (*job.services(), job.client)
    names = job.groups()
    steps: list[Step] = []
    for number, name in enumerate(names):
        taken: list[int] = []
        """GPUs taken on each node of this group."""
        for component in ordered:
            if component.group == name:
                steps += _place(component, number, taken, gpus_per_node)
    position = {component.name: place for place, component in enumerate(ordered)}
    steps.sort(key=lambda step: (position[step.component.name], step.copy))
    return Layout(tuple(_group(name, number, steps) for number, name in enumerate(names)), tuple(steps))


def _place(component: Component, group: int, taken: list[int], gpus_per_node: int) -> list[Step]:
    if component.gpus > gpus_per_node:
        raise UserError(
            f"component {component.name}: a copy needs {component.gpus} GPUs on one node, which has {gpus_per_node}",
            "let a copy span more nodes, or correct gpus_per_node of the profile",
        )
    placed: list[Step] = []
    copies: list[int] = []
    """Copies of this component on each node."""
    for copy in range(component.replicas):
        node = 0
        while not _fits(component, node, taken, copies, gpus_per_node):
            node += 1
        first = _count(taken, node)
        for place in range(node, node + component.nodes):
            _add(taken, place, component.gpus)
            _add(copies, place, 1)
        placed.append(Step(component, copy, group, node, tuple(range(first, first + component.gpus))))
    return placed


def _fits(component: Component, node: int, taken: list[int], copies: list[int], gpus_per_node: int) -> bool:
    places = range(node, node + component.nodes)
    level = _count(taken, node)
    crowded = component.per_node is not None and any(_count(copies, place) >= component.per_node for place in places)
    # A copy has the same GPU numbers on all of its nodes.
    uneven = component.gpus > 0 and any(_count(taken, place) != level for place in places)
    return not crowded and not uneven and level + component.gpus <= gpus_per_node


def _count(counts: list[int], place: int) -> int:
    return counts[place] if place < len(counts) else 0


def _add(counts: list[int], place: int, number: int) -> None:
    counts.extend([0] * (place + 1 - len(counts)))
    counts[place] += number


def _group(name: str, number: int, steps: list[Step]) -> Group:
    mine = [step for step in steps if step.group == number]
    nodes = max(step.node + step.component.nodes for step in mine)
    gpus, cpus, memory = [0] * nodes, [0] * nodes, [0] * nodes
    for step in mine:
        component = step.component
        for place in range(step.node, step.node + component.nodes):
            gpus[place] += component.gpus
            cpus[place] += component.cpus * (component.tasks // component.nodes)
            memory[place] += component.memory_mb or 0
    shared = any(step.component.memory_mb is None for step in mine)
    return Group(name, nodes, max(gpus), max(cpus), None if shared else max(memory))
