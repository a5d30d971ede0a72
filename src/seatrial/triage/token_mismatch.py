"""`localize`: token rows and metrics of one level in, where generator and trainer disagree and what the error follows out. Reads no files.

- The conclusion begins with what makes the evidence worthless or the question moot.
- The unit of every test is the sequence: tokens of one sequence are not independent.
- The error of each step is computed again from its tokens and held against the metric that the loop logged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from seatrial.core.errors import UserError
from seatrial.core.files import number_to_json
from seatrial.core.records import Association, Bar, Localization, NonFinite, StepError, WorstSequence
from seatrial.core.series import Metrics, TokenRow
from seatrial.triage import token_errors
from seatrial.triage.token_errors import HEAD, LIMIT, THRESHOLDS, Collected, Means, TokenSequence, doubling

LEAST = 8
"""Sequences below which nothing is said about what the error follows."""
LEAST_GROUP = 3
ALPHA = 0.05
BUILDS_UP = "it points to what builds up over tokens: KV cache, rope, position ids"
BEGINNING = "it points to where the response begins: prefill, the end of the prompt, prefix caching"


@dataclass(frozen=True, slots=True)
class _Tested:
    """One question with its answer; which sentence holds depends on how many were asked."""

    name: str
    statistic: str
    value: float | None
    p: float | None
    rows: int
    large: bool
    """The effect is of a size that matters."""
    yes: str
    no: str


def associations(collected: Collected) -> tuple[Association, ...]:
    """Every question that the rows can be asked, each with its answer."""
    rows = collected.sequences
    if len(rows) < LEAST:
        return ()
    tested = [_prompt(collected), _length(rows), _position(rows), _head(collected)]
    tested += [_two(rows, "truncated", lambda row: row.truncated, "cut-off sequences", "it points to the length limit")]
    hidden = "masking hides what it is to show, and the metric of the loss must not be trusted"
    tested += [_two(rows, "masked out", lambda row: row.masked_out, "sequences taken out of the loss", hidden)]
    names = sorted({key for row in rows for key, _ in row.settings})
    tested += [
        _kinds(name, [dict(row.settings).get(name, "") for row in rows], rows, "it points to how tokens are sampled") for name in names
    ]
    tested += [_kinds("run", [row.run for row in rows], rows, "it points to what differs between the runs"), _step(rows)]
    asked = sum(item.p is not None for item in tested)
    return tuple(_answer(item, asked) for item in tested)


def _answer(item: _Tested, asked: int) -> Association:
    follows = item.p is not None and item.large and item.p <= ALPHA / asked
    numbers = "" if item.value is None else f": {item.statistic} {item.value:.2f} over {item.rows} sequences, {_p(item.p)}"
    sentence = item.yes.replace("{}", numbers) if follows else f"{item.no}{numbers}"
    return Association(
        name=item.name, statistic=item.statistic, value=item.value, p=item.p, rows=item.rows, follows=follows, sentence=sentence
    )


def _p(p: float | None) -> str:
    if p is None:
        return "not tested"
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _prompt(collected: Collected) -> _Tested:
    rows = collected.sequences
    groups = [row.prompt for row in rows]
    count = len(set(groups))
    words = "share of the variance between prompts"
    if count < 2 or count == len(rows):
        why = "there is only one" if count < 2 else "each has one sequence only"
        return _Tested("prompt", words, None, None, len(rows), False, "", f"whether it follows the prompt cannot be told: {why}")
    share, p = token_errors.between_groups(groups, _within_steps(rows))
    few = concentrated(collected)
    where = f"is concentrated in {few} of {count} prompts" if few * 4 <= count else "differs between prompts"
    yes = f"the error {where}{{}}: it points to what they hold (their tokens, length or template)"
    return _Tested("prompt", words, share, p, len(rows), (share or 0) >= 0.2, yes, "the error does not follow the prompt")


def severity(row: TokenSequence) -> float:
    """How far the error is above 1, in powers of e, so that it is comparable over its whole range."""
    return min(math.log(max(row.error - 1, 1e-6)), LIMIT)


def _within_steps(rows: Sequence[TokenSequence]) -> list[float]:
    """Severities less the mean of their step: a prompt is mostly of one step, and must not stand for it."""
    steps: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        steps.setdefault((row.run, row.step), []).append(severity(row))
    means = {step: math.fsum(values) / len(values) for step, values in steps.items()}
    return [severity(row) - means[row.run, row.step] for row in rows]


def concentrated(collected: Collected) -> int:
    """The smallest number of prompts that hold four fifths of the error above 1."""
    excess = [0.0] * len(collected.prompts)
    for row in collected.sequences:
        excess[row.prompt] += _excess(row)
    return _holders(excess)


def in_few(rows: Sequence[TokenSequence]) -> int:
    """The number of sequences that hold four fifths of the error above 1; 0 when they are more than a quarter of all."""
    count = _holders([_excess(row) for row in rows])
    return count if count * 4 <= len(rows) else 0


def _excess(row: TokenSequence) -> float:
    return min(row.total, 1e30) - row.tokens


def _holders(excess: Sequence[float]) -> int:
    left, count = 0.8 * math.fsum(excess), 0
    for value in sorted(excess, reverse=True):
        if left <= 0:
            break
        left, count = left - value, count + 1
    return count


def _length(rows: Sequence[TokenSequence]) -> _Tested:
    rho, p = token_errors.spearman([row.tokens for row in rows], [row.error for row in rows])
    grows = (rho or 0) > 0
    yes = f"the error {'grows' if grows else 'falls'} with the length of the response{{}}: " + (BUILDS_UP if grows else BEGINNING)
    no = "the error does not follow the length of the response"
    return _Tested("response length", "Spearman", rho, p, len(rows), abs(rho or 0) >= 0.3, yes, no)


def _position(rows: Sequence[TokenSequence]) -> _Tested:
    slopes = [row.slope for row in rows if row.slope is not None]
    if len(slopes) < LEAST:
        no = f"whether it follows the position cannot be told: {len(slopes)} sequences are long enough and not constant"
        return _Tested("position", "mean Spearman", None, None, len(slopes), False, "", no)
    mean = math.fsum(slopes) / len(slopes)
    yes = f"the error {'grows' if mean > 0 else 'falls'} with position{{}}: " + (BUILDS_UP if mean > 0 else BEGINNING)
    no = "the error does not follow the position"
    return _Tested("position", "mean Spearman", mean, token_errors.signs(slopes), len(slopes), abs(mean) >= 0.2, yes, no)


def _head(collected: Collected) -> _Tested:
    differences = [row.head for row in collected.sequences if row.head is not None]
    name, words = f"first {HEAD} tokens", "ratio to the rest"
    if len(differences) < LEAST:
        no = f"whether the first {HEAD} tokens differ cannot be told: {len(differences)} sequences are longer"
        return _Tested(name, words, None, None, len(differences), False, "", no)
    means = [collected.heads.sums[part] / collected.heads.counts[part] for part in (0, 1)]
    ratio = means[0] / means[1] if means[1] else (LIMIT if means[0] else 1.0)
    yes = f"the first {HEAD} tokens have {'more' if ratio > 1 else 'less'} of the error{{}}: " + (BEGINNING if ratio > 1 else BUILDS_UP)
    no = f"the first {HEAD} tokens are not unlike the rest"
    return _Tested(name, words, ratio, token_errors.signs(differences), len(differences), not 2 / 3 < ratio < 1.5, yes, no)


def _two(rows: Sequence[TokenSequence], name: str, of: Callable[[TokenSequence], bool | None], what: str, points: str) -> _Tested:
    known = [(bool(of(row)), row.error) for row in rows if of(row) is not None]
    inside, outside = ([error for flag, error in known if flag is side] for side in (True, False))
    words = "chance to have the larger error"
    if min(len(inside), len(outside)) < LEAST_GROUP:
        why = f"{len(inside)} of {len(known)} sequences are" if known else "the loop does not say which are"
        return _Tested(name, words, None, None, len(known), False, "", f"whether it follows {what} cannot be told: {why}")
    often = token_errors.exceeds(inside, outside)
    _, p = token_errors.spearman([float(flag) for flag, _ in known], [error for _, error in known])
    yes = f"{what} have the {'larger' if often > 0.5 else 'smaller'} error{{}}: {points}"
    return _Tested(name, words, often, p, len(known), abs(often - 0.5) >= 0.2, yes, f"the error does not follow {what}")


def _kinds(name: str, values: Sequence[str], rows: Sequence[TokenSequence], points: str) -> _Tested:
    kinds = sorted(set(values))
    words = "share of the variance"
    if len(kinds) < 2:
        no = f"whether it follows {name} cannot be told: all sequences have {kinds[0] or 'none'}"
        return _Tested(name, words, None, None, len(rows), False, "", no)
    groups = [kinds.index(value) for value in values]
    share, p = token_errors.between_groups(groups, [severity(row) for row in rows])
    yes = f"the error differs with {name} ({', '.join(kinds[:4])}){{}}: {points}"
    return _Tested(name, words, share, p, len(rows), (share or 0) >= 0.2, yes, f"the error does not follow {name}")


def _step(rows: Sequence[TokenSequence]) -> _Tested:
    if len({row.step for row in rows}) < 2:
        return _Tested(
            "step", "Spearman", None, None, len(rows), False, "", "whether it follows the step cannot be told: there is only one"
        )
    rho, p = token_errors.spearman([row.step for row in rows], [row.error for row in rows])
    grows = (rho or 0) > 0
    points = "it points to weights that do not reach the generator (refit)" if grows else "it points to how the run begins"
    yes = f"the error {'grows' if grows else 'falls'} from step to step{{}}: {points}"
    return _Tested("step", "Spearman", rho, p, len(rows), abs(rho or 0) >= 0.3, yes, "the error does not follow the step")


METRIC = "train/token_mult_prob_error"
TOLERANCE = 1e-3


def step_errors(sequences: Sequence[TokenSequence], metrics: Metrics) -> tuple[StepError, ...]:
    """One entry per run and step, in order."""
    steps: dict[tuple[str, int], list[TokenSequence]] = {}
    for sequence in sequences:
        steps.setdefault((sequence.run, sequence.step), []).append(sequence)
    alone = len({run for run, _ in steps}) == 1
    return tuple(_error_of_step(run, step, steps[run, step], _logged(metrics, run, step, alone)) for run, step in sorted(steps))


def without_tokens(sequences: Sequence[TokenSequence], metrics: Metrics) -> tuple[str, ...]:
    """Steps that the loop logged the metric of and that no sequence is of, as `step 3 of run`: their token log is lost."""
    seen: dict[str, set[int]] = {}
    for sequence in sequences:
        seen.setdefault(sequence.run, set()).add(sequence.step)
    found = []
    for run in sorted(seen):
        logged = next((metrics.series[tag] for tag in _tags(run, alone=len(seen) == 1) if tag in metrics.series), None)
        found += [f"step {step} of {run}" for step in (logged.steps if logged else ()) if step not in seen[run]]
    return tuple(found)


def mean_error(sequences: Sequence[TokenSequence]) -> float:
    """Mean of exp(error) over the tokens of these sequences; 0 when there are none, as the loop has it."""
    tokens = sum(sequence.tokens for sequence in sequences)
    return math.fsum(sequence.total for sequence in sequences) / tokens if tokens else 0.0


def _error_of_step(run: str, step: int, sequences: list[TokenSequence], metric: float | None) -> StepError:
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


def _batches(ordered: list[TokenSequence], metric: float) -> int | None:
    """The smallest number of equal batches whose mean is the metric."""
    for count in (count for count in range(1, len(ordered) + 1) if len(ordered) % count == 0):
        size = len(ordered) // count
        parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        found = math.fsum(mean_error([item for item in part if not item.masked_out]) for part in parts) / count
        if math.isclose(found, metric, rel_tol=TOLERANCE) or not (math.isfinite(found) or math.isfinite(metric)):
            return count
    return None


BOUND = 1.05
"""A mult error above it is a mismatch, in a step and in a sequence."""
HINT = 0.05
"""A p below it is no answer to one of many questions, but no evenness either."""
WORST = 20
_PERCENTILES = {"50": 0.5, "90": 0.9, "99": 0.99, "99.9": 0.999, "max": 1.0}


def localize(rows: Iterable[TokenRow], metrics: Metrics, trial: str, level: int, name: str) -> Localization:
    """Analyse the rows of one level; UserError when they hold nothing to compare."""
    collected = token_errors.collect(rows)
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
    same = WorstSequence.model_fields.keys() - {"prompt", "error", "position_error"}
    return tuple(
        WorstSequence(
            prompt=prompts[item.prompt],
            error=number_to_json(item.error),
            position_error=number_to_json(item.position_error),
            **{name: getattr(item, name) for name in same},
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


def _by_length(sequences: Sequence[TokenSequence]) -> tuple[Bar, ...]:
    """Mult error by the number of tokens in the loss."""
    bins: dict[int, list[TokenSequence]] = {}
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
