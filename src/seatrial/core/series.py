"""Metric series, token rows, and the damage found while reading them.

- `Series` holds the points of one metric, one value per step, sorted by step. NaN and infinities are kept.
- `TokenRow` is one sequence of a training step as generator and trainer saw it, token by token.
- `Damage` is something that a reader could not read. It is part of the result: a reader never drops bytes silently.
- `Overlap` says that a step was written more than once with different values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Scalar = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes or rows that could not be read: where, how many, and why."""

    path: str
    where: str
    """Human-readable position, for example `offset 1024` or `line 17`."""
    count: int
    """How many records (or rows) are lost at least; 0 when unknown."""
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.where}: {self.what} ({self.count or 'unknown number of'} lost)"


@dataclass(frozen=True, slots=True)
class Overlap:
    """Steps of one tag that were written more than once."""

    tag: str
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over steps."""

    tag: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)

    def non_finite(self) -> tuple[int, ...]:
        """Steps whose value is NaN or infinite."""
        return tuple(s for s, v in zip(self.steps, self.values, strict=True) if not math.isfinite(v))

    def get(self, step: int) -> float | None:
        """The value at `step`, or None."""
        try:
            return self.values[self.steps.index(step)]
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Metrics:
    """Everything that readers found in the files of one run."""

    series: dict[str, Series] = field(default_factory=dict)
    scalars: dict[str, Scalar] = field(default_factory=dict)
    """Top-level values without steps, as some metrics.json files hold."""
    damage: tuple[Damage, ...] = ()
    words: dict[str, Damage] = field(default_factory=dict)
    """Tags of rows that hold text, true or false and never a number: damage where the tag is known to be a metric."""
    overlaps: tuple[Overlap, ...] = ()
    sources: tuple[str, ...] = ()
    restarts: tuple[Overlap, ...] = ()
    """Steps at which one file did not go on: it had written them, or later ones, before; whatever the values."""
    estimated: bool = False
    """The steps were not written but worked out from the number of rows."""
    steps_taken: int | None = None
    """How many steps the run itself says it took; fewer than its last step where it was resumed."""

    def last_step(self) -> int | None:
        """The highest step of any series."""
        return max((s.steps[-1] for s in self.series.values() if s.steps), default=None)


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One sampled sequence. The per-token tuples are of equal length; position 0 is the first token of the prompt."""

    source: str
    """File and line, for example `train_data_step1.jsonl:3`."""
    run: str
    """Which run of the level it is of: `run`, `delta`, …"""
    step: int
    row: int
    prompt: str
    """Identifies the prompt: rows of one prompt have the same text."""
    generation: tuple[float, ...]
    """Log-probabilities of the generator; those of the prompt are not looked at."""
    training: tuple[float, ...]
    """Log-probabilities that the trainer computed for the same tokens."""
    mask: tuple[bool, ...]
    """Tokens that count in the loss."""
    masked_out: bool = False
    length: int = 0
    """Tokens that are no padding."""
    reward: float | None = None
    truncated: bool | None = None
    """Whether generation was cut off by the length limit; None when the loop does not say."""
    settings: tuple[tuple[str, str], ...] = ()
    """Sampling settings in force, such as temperature and top_p, where known."""
