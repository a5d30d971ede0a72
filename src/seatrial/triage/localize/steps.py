"""The error of each training step, computed again from its tokens and held against the metric that the loop logged.

A loop that trains a step in several batches of equal size logs the mean over the batches, each a mean over its own
tokens. How many batches there were is not in the rows: the metric agrees when it is the mean over any such split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from seatrial.files import number_to_json
from seatrial.model.localization import StepError
from seatrial.model.series import Metrics
from seatrial.triage.localize import collect

METRIC = "train/token_mult_prob_error"
TOLERANCE = 1e-3


def step_errors(sequences: Sequence[collect.Sequence], metrics: Metrics) -> tuple[StepError, ...]:
    """One entry per run and step, in order."""
    steps: dict[tuple[str, int], list[collect.Sequence]] = {}
    for sequence in sequences:
        steps.setdefault((sequence.run, sequence.step), []).append(sequence)
    alone = len({run for run, _ in steps}) == 1
    return tuple(_step(run, step, steps[run, step], _logged(metrics, run, step, alone)) for run, step in sorted(steps))


def without_tokens(sequences: Sequence[collect.Sequence], metrics: Metrics) -> tuple[str, ...]:
    """Steps that the loop logged the metric of and that no sequence is of, as `step 3 of run`: their token log is lost."""
    seen: dict[str, set[int]] = {}
    for sequence in sequences:
        seen.setdefault(sequence.run, set()).add(sequence.step)
    found = []
    for run in sorted(seen):
        logged = next((metrics.series[tag] for tag in _tags(run, alone=len(seen) == 1) if tag in metrics.series), None)
        found += [f"step {step} of {run}" for step in (logged.steps if logged else ()) if step not in seen[run]]
    return tuple(found)


def mean_error(sequences: Sequence[collect.Sequence]) -> float:
    """Mean of exp(error) over the tokens of these sequences; 0 when there are none, as the loop has it."""
    tokens = sum(sequence.tokens for sequence in sequences)
    return math.fsum(sequence.total for sequence in sequences) / tokens if tokens else 0.0


def _step(run: str, step: int, sequences: list[collect.Sequence], metric: float | None) -> StepError:
    ordered = sorted(sequences, key=lambda sequence: sequence.row)
    counted = [sequence for sequence in ordered if not sequence.masked_out]
    batches = _batches(ordered, metric) if metric is not None else None
    return StepError(
        run=run,
        step=step,
        sequences=len(ordered),
        tokens=sum(sequence.tokens for sequence in counted),
        error=number_to_json(mean_error(counted)),
        with_masked_out=number_to_json(mean_error(ordered)),
        metric=None if metric is None else number_to_json(metric),
        batches=batches,
        agrees=None if metric is None else batches is not None,
        non_finite=sum(sequence.non_finite for sequence in ordered),
    )


def _logged(metrics: Metrics, run: str, step: int, alone: bool) -> float | None:
    """The loop's number."""
    return next((metrics.series[tag].get(step) for tag in _tags(run, alone) if tag in metrics.series), None)


def _tags(run: str, alone: bool) -> tuple[str, ...]:
    """What the metric of a run is logged as; the only run of a level writes its tags without a prefix."""
    return (f"{run}/{METRIC}", METRIC) if alone else (f"{run}/{METRIC}",)


def _batches(ordered: list[collect.Sequence], metric: float) -> int | None:
    """The smallest number of equal batches whose mean is the metric."""
    for count in _divisors(len(ordered)):
        size = len(ordered) // count
        parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        found = math.fsum(mean_error([item for item in part if not item.masked_out]) for part in parts) / count
        if math.isclose(found, metric, rel_tol=TOLERANCE) or not (math.isfinite(found) or math.isfinite(metric)):
            return count
    return None


def _divisors(number: int) -> Iterator[int]:
    return (count for count in range(1, number + 1) if number % count == 0)
