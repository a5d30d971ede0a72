"""The directory of a batch, and the placement of each job's components on nodes.

```
<batch>/batch.json               the jobs as data, as they were submitted
<batch>/<job>/                   what one job writes; see JobDir
```

- All that is known of a batch is plain files on the shared file system.
- Copies of a component with GPUs own theirs: each goes to the first nodes that still have enough. The layout says what the allocation
  must hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from seatrial.core.errors import UserError
from seatrial.core.files import read_model, write_json
from seatrial.core.jobs import Batch, Component, Ending, Job, Result, Submission

BATCH = "batch.json"


@dataclass(frozen=True, slots=True)
class JobDir:
    """Paths of one job."""

    path: Path

    @property
    def script(self) -> Path:
        """job.sh."""
        return self.path / "job.sh"

    @property
    def submission_file(self) -> Path:
        """submission.json; absent when the job was never submitted."""
        return self.path / "submission.json"

    def log(self, component: str, copy: int, index: int | None) -> Path:
        """Log of one copy; `index` is None for a job without array."""
        return self.path / "logs" / (f"{component}.{copy}.log" if index is None else f"{component}.{copy}-{index}.log")

    def endpoints(self, index: int) -> Path:
        """Where the copies of a unit publish host and port."""
        return self.path / "endpoints" / str(index)

    def result_file(self, index: int) -> Path:
        """What a unit leaves behind."""
        return self.path / "results" / f"{index}.json"

    def result(self, index: int) -> Result | None:
        """The result of a unit, or None while there is none. One that is torn raises a UserError: it never counts."""
        file = self.result_file(index)
        return read_model(file, Result) if file.is_file() else None

    def submission(self) -> Submission | None:
        """What was submitted, or None."""
        return read_model(self.submission_file, Submission) if self.submission_file.is_file() else None

    def not_done(self, units: range) -> tuple[int, ...]:
        """Units that have no result that says done."""
        return tuple(index for index in units if not self.is_done(index))

    def is_done(self, index: int) -> bool:
        """Whether the result says so, of this job and unit, without contradicting itself."""
        result = self.result(index)
        if result is None or result.ending is not Ending.DONE:
            return False
        return (result.job, result.index, result.exit_code) == (self.path.name, index, 0)

    def make(self) -> None:
        """Make the directories, which the nodes then write to."""
        for name in ("logs", "endpoints", "results"):
            (self.path / name).mkdir(parents=True, exist_ok=True)


def job_dir(batch: Path, job: Job | str) -> JobDir:
    """The directory of a job; absolute, because nodes have other working directories."""
    return JobDir(batch.absolute() / (job if isinstance(job, str) else job.name))


def save(batch: Path, jobs: Batch) -> None:
    """Store the jobs as data."""
    write_json(batch / BATCH, jobs)


def load(batch: Path) -> Batch:
    """The jobs of a batch directory."""
    if not (batch / BATCH).is_file():
        raise UserError(f"{batch}: no {BATCH} there, so it is not a batch of jobs", "name a directory that `seatrial jobs submit` made")
    return read_model(batch / BATCH, Batch)


def find(root: Path) -> Iterator[Path]:
    """Batch directories at or below `root`, oldest first."""
    if (root / BATCH).is_file():
        yield root
        return
    yield from sorted((file.parent for file in root.glob(f"**/{BATCH}")), key=lambda path: (path / BATCH).stat().st_mtime)


@dataclass(frozen=True, slots=True)
class PlacedStep:
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
class NodeGroup:
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

    groups: tuple[NodeGroup, ...]
    steps: tuple[PlacedStep, ...]
    """Services first, in the order of the components; the client last."""

    @property
    def spans_nodes(self) -> bool:
        """Whether loopback is not enough to reach every component."""
        return len(self.groups) > 1 or self.groups[0].nodes > 1


def layout(job: Job, gpus_per_node: int) -> Layout:
    """Place every copy. Raises a UserError when a copy needs more GPUs than a node has."""
    ordered = (*job.services(), job.client)
    names = job.groups()
    steps: list[PlacedStep] = []
    for number, name in enumerate(names):
        taken = Counter[int]()
        """GPUs taken on each node of this group."""
        for component in ordered:
            if component.group == name:
                steps += _place(component, number, taken, gpus_per_node)
    position = {component.name: place for place, component in enumerate(ordered)}
    steps.sort(key=lambda step: (position[step.component.name], step.copy))
    return Layout(tuple(_group(name, number, steps) for number, name in enumerate(names)), tuple(steps))


def _place(component: Component, group: int, taken: Counter[int], gpus_per_node: int) -> list[PlacedStep]:
    if component.gpus > gpus_per_node:
        raise UserError(
            f"component {component.name}: a copy needs {component.gpus} GPUs on one node, which has {gpus_per_node}",
            "let a copy span more nodes, or correct gpus_per_node of the profile",
        )
    placed: list[PlacedStep] = []
    copies = Counter[int]()
    """Copies of this component on each node."""
    for copy in range(component.replicas):
        node = 0
        while not _fits(component, node, taken, copies, gpus_per_node):
            node += 1
        first = taken[node]
        for place in range(node, node + component.nodes):
            taken[place] += component.gpus
            copies[place] += 1
        placed.append(PlacedStep(component, copy, group, node, tuple(range(first, first + component.gpus))))
    return placed


def _fits(component: Component, node: int, taken: Counter[int], copies: Counter[int], gpus_per_node: int) -> bool:
    places = range(node, node + component.nodes)
    crowded = component.per_node is not None and any(copies[place] >= component.per_node for place in places)
    # A copy has the same GPU numbers on all of its nodes.
    uneven = component.gpus > 0 and any(taken[place] != taken[node] for place in places)
    return not crowded and not uneven and taken[node] + component.gpus <= gpus_per_node


def _group(name: str, number: int, steps: list[PlacedStep]) -> NodeGroup:
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
    return NodeGroup(name, nodes, max(gpus), max(cpus), None if shared else max(memory))
