"""The facts of a closed loop as typed rows: each there once, of the right form, with one entry per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from seatrial.loops.facts import Facts
from seatrial.loops.refits.rows import Count, Number, Row, Rows, Word, typed


class Setup(Row):
    """What ran."""

    engine: Word
    note: str
    steps: Count
    dtype: Word
    experts: Count


class Unmoved(Row):
    """Parameters that a step left as they were."""

    count: Count
    names: list[str]


class Learn(Row):
    """The real run."""

    rewards: list[list[Number]]
    unmoved: list[Unmoved]
    rows: list[dict[str, Any]]


class Gap(Row):
    """token_mult_prob_error of one step of a control."""

    value: Number
    p50: Number


class NoRefit(Row):
    """The control whose generator keeps the base."""

    rewards: list[list[Number]]
    still: list[Count]
    mismatch: list[Gap]
    touched: list[str]


class Refit(Row):
    """One refit of the control that does not learn."""

    changed: Count
    wrong_names: list[str]
    refused: str | None


class NoLearning(Row):
    """The control whose learning rate is zero."""

    rewards: list[list[Number]]
    still: list[Count]
    refits: list[Refit]


class Reimport(Row):
    """The last export, imported again."""

    parameters: Count
    unequal: list[str]
    unequal_count: Count


@dataclass(frozen=True)
class Run:
    """All facts of one closed loop."""

    setup: Setup
    learn: Learn
    no_refit: NoRefit
    no_learning: NoLearning
    reimport: Reimport
    rows: Rows
    device: str


R = TypeVar("R", bound=Row)


def read(facts: Facts, device: str) -> Run:
    """The facts, each there once and of the right form; a ValueError says what is not."""

    def one(model: type[R], kind: str, **match: str) -> R:
        found = facts.of(kind, **match)
        if len(found) != 1:
            raise ValueError(f"fact {kind} {match or ''}: there are {len(found)}, not one")
        try:
            return model.model_validate(found[0])
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"fact {kind} {match or ''}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    setup, learn = one(Setup, "setup"), one(Learn, "loop", run="learn")
    no_refit, no_learning = one(NoRefit, "control", run="no-refit"), one(NoLearning, "control", run="no-learning")
    counted: dict[str, Sequence[object]] = {"unmoved": learn.unmoved, "mismatch": no_refit.mismatch}
    counted |= {"still of no-refit": no_refit.still, "still of no-learning": no_learning.still}
    for name, each in {"learn": learn.rewards, "no-refit": no_refit.rewards, "no-learning": no_learning.rewards}.items():
        counted[f"rewards of {name}"] = each
        if any(len(row) < 2 or not all(0 <= value <= 1 for value in row) for row in each):
            raise ValueError(f"rewards of {name}: a step has fewer than two, or one that is not between 0 and 1")
    off = {name: len(values) for name, values in counted.items() if len(values) != setup.steps}
    if off or not setup.steps:
        raise ValueError(f"{setup.steps} steps, and not as many entries: {off}")
    if not all(isinstance(row.get("fact"), str) for row in learn.rows):
        raise ValueError("a row of the refits is no fact")
    return Run(setup, learn, no_refit, no_learning, one(Reimport, "reimport"), typed(Facts(tuple(learn.rows))), device)
