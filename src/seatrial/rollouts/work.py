"""What passes between the collector and whatever makes rollouts: a unit to do, its outcome, or its failure."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from seatrial.rollouts.record import FailureKind

HEALING = frozenset({FailureKind.TIMEOUT, FailureKind.CONNECTION, FailureKind.RATE_LIMIT, FailureKind.HTTP_5XX})
"""Classes that another try may mend; judge and sandbox failures say it case by case."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the inputs, as `inputs.jsonl` stores it."""

    index: int
    """Position among all rows of the campaign: Gym's `_ng_task_index`."""
    id: str
    """Stable: from the content, duplicates kept apart."""
    dataset: str
    """Name of a `[[datasets]]` table."""
    data: Mapping[str, Any]
    """The row as the user wrote it."""
    agent: str | None = None
    """Gym: who rolls it out."""
    tags: tuple[str, ...] = ()
    source: str = ""
    """`file:line`, for messages."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One rollout that is owed."""

    number: int
    """Among all units of the campaign; the key of its record."""
    row: Row
    repeat: int
    """Which repetition: Gym's `_ng_rollout_index`."""
    seed: int
    """Derived, so that a retry asks for the same."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A rollout that worked."""

    row: Mapping[str, Any]
    """As Gym writes it: responses_create_params, response, reward, fields of the verifier, _ng_task_index, _ng_rollout_index,
    agent_ref."""
    reward: float
    answer: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    turns: int | None = None
    finish: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    latency_s: float | None = None
    """Where it is another than that of the call: of a rollout that was stored before."""


class RolloutError(Exception):
    """A rollout that did not work, and whether another try may heal it."""

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        heals: bool | None = None,
        after_s: float | None = None,
        row: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.heals = kind in HEALING if heals is None else heals
        self.after_s = after_s
        """What the server asked to wait (Retry-After)."""
        self.row: Mapping[str, Any] = row or {}
        """What is worth keeping of it, such as the response that the judge could not read."""


class ServersGoneError(Exception):
    """Nobody answers any more: the attempt ends, its units are owed again."""


class Backend(Protocol):
    """Makes rollouts, many at a time, in one event loop."""

    async def open(self) -> None:
        """Connect and see that everything is there; raises BlockedError or UserError."""

    async def roll(self, unit: Unit) -> Outcome:
        """One try. Raises RolloutError, and ServersGoneError when it knows that no server is left."""

    async def alive(self) -> str | None:
        """None, or why nobody answers: asked when connections fail."""

    async def close(self) -> None:
        """End everything that was started."""


@runtime_checkable
class Streaming(Backend, Protocol):
    """A backend that takes many units at once and hands them on as they are done, by a collector of its own."""

    def stream(self, units: Sequence[Unit]) -> AsyncGenerator[tuple[Unit, Outcome | RolloutError], None]:
        """Each unit once, in any order; what never comes out is owed."""


class Verifier(Protocol):
    """Scores an answer."""

    async def score(self, row: Row, text: str, output: Sequence[Mapping[str, Any]]) -> Score:
        """`text` is the model's last message, `output` the items of the response. Raises RolloutError (reward, sandbox, judge)."""

    async def close(self) -> None:
        """End what it started."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a verifier says."""

    reward: float
    answer: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Kept in the row, beside the reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
