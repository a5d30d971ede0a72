"""From columns to one `Task` per row of the inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.rollouts.journal.scan import FAILED, OK
from seatrial.rollouts.profile import formulas
from seatrial.rollouts.profile.columns import Columns
from seatrial.rollouts.profile.model import Numbers, Task
from seatrial.rollouts.work import Row

TRUNCATED = frozenset({"length", "max_tokens", "max_output_tokens"})
"""How chat completions, the Responses API and others say that an answer was cut at a limit."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the user chose."""

    pass_at: float
    ks: tuple[int, ...]


def numbers(values: Sequence[float]) -> Numbers | None:
    """All figures of one quantity; NaN is no value, and None is said for no values at all."""
    ordered = sorted(values)
    total = math.fsum(ordered)
    if total != total:
        # NaN among them: sorting has no meaning, and the sum tells it for free.
        ordered = sorted([value for value in values if value == value])
        total = math.fsum(ordered)
    n = len(ordered)
    if not n:
        return None
    middle = total / n
    low, high = ordered[0], ordered[-1]
    if low == high:
        return Numbers(n, low, 0.0 if n > 1 else None, low, low, low, low, total)
    spread = math.dist(ordered, [middle] * n) / math.sqrt(n - 1)
    return Numbers(n, middle, spread, low, formulas.quantile(ordered, 0.5), formulas.quantile(ordered, 0.95), high, total)


def rewards_of(columns: Columns, units: range) -> list[float]:
    """Rewards of the rollouts that worked, in order of their repetitions."""
    return [value for value in columns.reward[units.start : units.stop] if value == value]


def make_task(row: Row, units: range, columns: Columns, rules: Rules) -> Task:
    """The figures of one row; its units follow each other."""
    first, last = units.start, units.stop
    state = columns.state[first:last]
    n, given_up, expected = state.count(OK), state.count(FAILED), last - first
    rewards = rewards_of(columns, units)
    correct = sum([reward >= rules.pass_at for reward in rewards])
    low, high = formulas.wilson(correct, n) if n else (None, None)
    passes, best, majority = _at_k(rewards, correct, _answers(columns, units) if n < expected else columns.answer[first:last], rules)
    finish = _counts(columns.finish[first:last], columns.finishes)
    return Task(
        index=row.index,
        id=row.id,
        dataset=row.dataset,
        agent=row.agent,
        tags=row.tags,
        source=row.source,
        expected=expected,
        n=n,
        failed=_counts(columns.kind[first:last], columns.kinds) if given_up else {},
        missing=expected - n - given_up,
        coverage=n / expected,
        reward=numbers(rewards),
        correct=correct,
        pass_rate=correct / n if n else None,
        pass_low=low,
        pass_high=high,
        pass_at=passes,
        best_at=best,
        majority_at=majority,
        input_tokens=numbers(columns.input_tokens[first:last]),
        output_tokens=numbers(columns.output_tokens[first:last]),
        turns=numbers(columns.turns[first:last]),
        latency_s=numbers(columns.latency_s[first:last]),
        finish=finish,
        truncated=truncated(finish),
        metrics={name: found for name, column in columns.metrics.items() if (found := numbers(column[first:last]))},
    )


def _answers(columns: Columns, units: range) -> list[int]:
    return [columns.answer[unit] for unit in units if columns.state[unit] == OK]


def _at_k(rewards: list[float], correct: int, answers: Sequence[int], rules: Rules) -> tuple[tuple[float | None, ...], ...]:
    """pass@k, best@k and maj@k; None where there are fewer rollouts than k."""
    n = len(rewards)
    within = [k for k in rules.ks if k <= n]
    beyond = (None,) * (len(rules.ks) - len(within))
    passes = tuple([formulas.pass_at(n, correct, k) for k in within])
    if rewards.count(1.0) == correct and rewards.count(0.0) == n - correct:
        best = passes  # the largest of rewards of 0 and 1 is 1 as often as one of them is
    else:
        ordered = sorted(rewards)
        best = tuple([formulas.best_at(ordered, k) for k in within])
    return passes + beyond, best + beyond, tuple(formulas.majorities(answers, rewards, within)) + beyond


def _counts(codes: bytearray, names: Sequence[str]) -> dict[str, int]:
    """How often each name stands there; code 0 is none."""
    return {names[code]: codes.count(code) for code in sorted(set(codes)) if code}


def truncated(finish: dict[str, int]) -> float | None:
    """Share of rollouts that were cut at a limit, of those that say how they ended."""
    told = sum(finish.values())
    return sum(count for name, count in finish.items() if name in TRUNCATED) / told if told else None
