"""`localize`: token rows and metrics of one level in, everything that can be said about their disagreement out.

The conclusion begins with what makes the evidence worthless or the question moot. It says what something points to,
never that it is proven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from seatrial.files import number_to_json
from seatrial.model.errors import UserError
from seatrial.model.localization import Association, Bar, Localization, NonFinite, StepError, WorstSequence
from seatrial.model.series import Metrics
from seatrial.model.tokens import TokenRow
from seatrial.triage.localize import collect
from seatrial.triage.localize.associate import LEAST, associations, in_few
from seatrial.triage.localize.collect import HEAD, THRESHOLDS, Collected, Means, doubling
from seatrial.triage.localize.steps import step_errors, without_tokens

BOUND = 1.05
"""A mult error above it is a mismatch, in a step and in a sequence."""
HINT = 0.05
"""A p below it is no answer to one of many questions, but no evenness either."""
WORST = 20
_PERCENTILES = {"50": 0.5, "90": 0.9, "99": 0.99, "99.9": 0.999, "max": 1.0}


def localize(rows: Iterable[TokenRow], metrics: Metrics, trial: str, level: int, name: str) -> Localization:
    """Analyse the rows of one level; UserError when they hold nothing to compare."""
    collected = collect.collect(rows)
    sequences = collected.sequences
    if not sequences:
        raise UserError(
            f"level {level}: none of {collected.empty} sequences has a token in the loss", "look at the loss mask: nothing was trained on"
        )
    if not collected.recorded:
        raise UserError(
            f"level {level}: the trainer's log-probabilities are all 0: the loop did not record them",
            "run the level with log-probabilities of the policy before the update (no forced on-policy ratio)",
        )
    steps, found = step_errors(sequences, metrics), associations(collected)
    return Localization(
        trial=trial,
        level=level,
        name=name,
        sequences=len(sequences) + collected.empty,
        tokens=collected.tokens(),
        prompts=len(collected.prompts),
        masked_out=sum(sequence.masked_out for sequence in sequences),
        empty=collected.empty,
        percentiles={key: number_to_json(collected.errors.percentile(share)) for key, share in _PERCENTILES.items()},
        above={f"{threshold:g}": collected.above[threshold] / collected.tokens() for threshold in THRESHOLDS},
        sequences_above=sum(sequence.error > BOUND for sequence in sequences) / len(sequences),
        non_finite=NonFinite(in_loss=collected.in_loss, outside=collected.outside, places=tuple(collected.places)),
        steps=steps,
        worst=_worst(collected),
        associations=found,
        conclusion=tuple(_conclusion(collected, steps, without_tokens(sequences, metrics), found)),
        histogram=_histogram(collected),
        by_position=_bars(collected.positions, _doubled),
        by_part=_bars(collected.parts, lambda part: f"{part * 10}-{part * 10 + 10} %"),
        by_length=_by_length(sequences),
    )


def _worst(collected: Collected) -> tuple[WorstSequence, ...]:
    prompts = collected.prompt_texts()
    ordered = sorted(collected.sequences, key=lambda item: (-item.error, -item.position_error, item.run, item.step, item.row))
    return tuple(
        WorstSequence(
            source=item.source,
            run=item.run,
            step=item.step,
            row=item.row,
            prompt=prompts[item.prompt],
            length=item.length,
            tokens=item.tokens,
            error=number_to_json(item.error),
            position=item.position,
            position_error=number_to_json(item.position_error),
            masked_out=item.masked_out,
            truncated=item.truncated,
        )
        for item in ordered[:WORST]
    )


def _conclusion(collected: Collected, steps: Sequence[StepError], lost: Sequence[str], found: Sequence[Association]) -> Iterable[str]:
    yield from _doubts(collected, steps, lost)
    if not _mismatch(collected, steps):
        yield f"no mismatch in these tokens: every step and every sequence has an error of at most {BOUND}"
        return
    follows = [item.sentence for item in found if item.follows]
    yield from follows
    if not found:
        yield f"{len(collected.sequences)} sequences are too few to say what the error follows: at least {LEAST} are needed"
    elif not follows:
        yield _even(found, in_few(collected.sequences), len(collected.sequences))


def _doubts(collected: Collected, steps: Sequence[StepError], lost: Sequence[str]) -> Iterable[str]:
    """What makes the evidence worthless, or less than it looks."""
    if collected.in_loss:
        yield f"{collected.in_loss} tokens of the loss are not finite, the first is {collected.places[0]}: their steps have no finite error"
    if collected.outside:
        yield f"{collected.outside} tokens outside the loss are not finite: they alone can make the loop's metric NaN"
    wrong = [item for item in steps if item.agrees is False]
    if wrong:
        first = wrong[0]
        yield (
            f"the evidence does not belong together: in {len(wrong)} of {len(steps)} steps the tokens do not give the metric "
            f"(step {first.step} of {first.run}: {first.error} from its tokens, {first.metric} logged)"
        )
    if not any(item.agrees for item in steps) and not wrong:
        yield "no metric was at hand to hold the tokens against"
    hidden = [item for item in steps if _number(item.error) <= BOUND < _number(item.with_masked_out)]
    if hidden:
        yield f"in {len(hidden)} of {len(steps)} steps only the masking of sequences keeps the error at or below {BOUND}"
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        yield f"{lost[0]}{more} logged a metric and no tokens: nothing here is about them"
    unused = [item for item in steps if not item.tokens]
    if unused:
        yield f"in {len(unused)} of {len(steps)} steps every sequence was taken out of the loss: nothing was trained on"
    if collected.empty:
        yield f"{collected.empty} of {collected.empty + len(collected.sequences)} sequences have no token in the loss"


def _even(found: Sequence[Association], few: int, count: int) -> str:
    """What to say when nothing was found: spread evenly, unless `few` of the sequences hold it, or something came close."""
    tested = [item for item in found if item.p is not None]
    asked = ", ".join(item.name for item in tested) or "nothing"
    if few:
        return f"{few} of {count} sequences hold most of the error, and share nothing that could be tested ({asked}): look at the worst"
    hint = min(tested, key=lambda item: item.p or 0, default=None)
    if hint is None or (hint.p is not None and hint.p <= HINT):
        close = f"; the nearest is {hint.name} (p = {hint.p:.3f})" if hint else ""
        return f"too few sequences, or too little difference, to say what the error follows{close}; tested: {asked}"
    return f"the error follows none of what could be tested ({asked}): spread evenly, it points to the weights or to precision"


def _mismatch(collected: Collected, steps: Sequence[StepError]) -> bool:
    largest = max(sequence.error for sequence in collected.sequences)
    return largest > BOUND or any(_number(item.error) > BOUND for item in steps)


def _number(value: float | str) -> float:
    """A stored number; one that is not finite is worse than any bound."""
    return math.inf if isinstance(value, str) else value


def _histogram(collected: Collected) -> tuple[Bar, ...]:
    bars = [Bar(label=f"≤ {edge:.1g}", value=float(count), count=count) for edge, count in collected.errors.bars()]
    while len(bars) > 1 and not bars[-1].count:
        bars.pop()
    infinite = collected.errors.infinite
    return (*bars, *((Bar(label="not finite", value=float(infinite), count=infinite),) if infinite else ()))


def _bars(means: Means, label: Callable[[int], str]) -> tuple[Bar, ...]:
    return tuple(
        Bar(label=label(place), value=means.sums[place] / means.counts[place], count=means.counts[place]) for place in sorted(means.counts)
    )


def _doubled(place: int) -> str:
    first = HEAD << (place - 1) if place else 0
    return f"{first}-{(HEAD << place) - 1}"


def _by_length(sequences: Sequence[collect.Sequence]) -> tuple[Bar, ...]:
    """Mult error by the number of tokens in the loss."""
    bins: dict[int, list[collect.Sequence]] = {}
    for sequence in sequences:
        bins.setdefault(doubling(sequence.tokens), []).append(sequence)
    return tuple(
        Bar(
            label=_doubled(place),
            value=number_to_json(math.fsum(item.total for item in inside) / sum(item.tokens for item in inside)),
            count=len(inside),
        )
        for place, inside in sorted(bins.items())
    )
