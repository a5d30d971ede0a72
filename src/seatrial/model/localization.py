"""What `seatrial localize` found in the token logs of one level, as it is stored in localize.json.

Errors are per token of the loss, |generator - trainer| in log-probability; a mult error is the mean of exp(error).
Non-finite numbers are stored as the strings "NaN", "Infinity", "-Infinity".
"""

from __future__ import annotations

from pydantic import Field

from seatrial.model.record import Record

LOCALIZATION_VERSION = 1
Value = float | str


class StepError(Record):
    """The error of one training step, computed again from its tokens, beside the metric that the loop logged."""

    run: str
    step: int
    sequences: int
    tokens: int
    """Tokens in the loss, without those of sequences that were taken out of it."""
    error: Value
    """Mean of exp(error) over those tokens."""
    with_masked_out: Value
    """The same over all sequences: what the step would show if none had been taken out of the loss."""
    metric: Value | None = None
    """The loop's own number; None when it logged none for this step."""
    batches: int | None = None
    """Batches that the step was trained in when the metric is the mean over that many; None when it agrees with no split."""
    agrees: bool | None = None
    """Whether tokens and metric are of the same run; None when there is nothing to compare."""
    non_finite: int = 0


class WorstSequence(Record):
    """One of the sequences with the largest error."""

    source: str
    run: str
    step: int
    row: int
    prompt: str
    length: int
    tokens: int
    error: Value
    position: int
    """Of its worst token; position 0 is the first token of the prompt."""
    position_error: Value
    masked_out: bool
    truncated: bool | None


class Association(Record):
    """Whether the error follows one property of the sequences."""

    name: str
    statistic: str
    """What `value` is, in words."""
    value: float | None
    p: float | None
    """Of a permutation or rank test; None when nothing could be tested."""
    rows: int
    follows: bool
    sentence: str


class Bar(Record):
    """One bar of a plot."""

    label: str
    value: Value
    count: int


class NonFinite(Record):
    """Tokens whose log-probability is NaN or infinite on one side at least."""

    in_loss: int = 0
    outside: int = 0
    """Outside the loss: they can still make the loop's metric NaN."""
    places: tuple[str, ...] = ()
    """The first of them: file and line, position, values."""


class Localization(Record):
    """localize.json."""

    schema_version: int = Field(default=LOCALIZATION_VERSION)
    trial: str
    level: int
    name: str
    sequences: int
    tokens: int
    """Tokens in the loss, with those of sequences that were taken out of it."""
    prompts: int
    masked_out: int
    empty: int
    """Sequences without a token in the loss."""
    percentiles: dict[str, Value]
    """Of the error per token, to within 1.2 %; the largest is exact."""
    above: dict[str, float]
    """Share of tokens whose error is larger, by threshold."""
    sequences_above: float
    """Share of sequences whose mult error is larger than 1.05."""
    non_finite: NonFinite
    steps: tuple[StepError, ...]
    worst: tuple[WorstSequence, ...]
    associations: tuple[Association, ...]
    conclusion: tuple[str, ...]
    histogram: tuple[Bar, ...]
    by_position: tuple[Bar, ...]
    by_part: tuple[Bar, ...]
    by_length: tuple[Bar, ...]
