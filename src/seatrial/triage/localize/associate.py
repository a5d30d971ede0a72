"""What the error follows: prompt, length, position, truncation, masking, settings, run or step.

- Unit of every test is the sequence: tokens of one sequence are not independent, and thousands of them prove little.
- `follows` needs both an effect of some size and a p that holds for as many questions as were asked (Bonferroni).
- The sentences say what an answer points to. None of them proves a cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seatrial.model.localization import Association
from seatrial.triage.localize import collect, ranks
from seatrial.triage.localize.collect import HEAD, LIMIT, Collected

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
    share, p = ranks.between_groups(groups, _within_steps(rows))
    few = concentrated(collected)
    where = f"is concentrated in {few} of {count} prompts" if few * 4 <= count else "differs between prompts"
    yes = f"the error {where}{{}}: it points to what they hold (their tokens, length or template)"
    return _Tested("prompt", words, share, p, len(rows), (share or 0) >= 0.2, yes, "the error does not follow the prompt")


def severity(row: collect.Sequence) -> float:
    """How far the error is above 1, in powers of e, so that it is comparable over its whole range."""
    return min(math.log(max(row.error - 1, 1e-6)), LIMIT)


def _within_steps(rows: Sequence[collect.Sequence]) -> list[float]:
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


def in_few(rows: Sequence[collect.Sequence]) -> int:
    """The number of sequences that hold four fifths of the error above 1; 0 when they are more than a quarter of all."""
    count = _holders([_excess(row) for row in rows])
    return count if count * 4 <= len(rows) else 0


def _excess(row: collect.Sequence) -> float:
    return min(row.total, 1e30) - row.tokens


def _holders(excess: Sequence[float]) -> int:
    left, count = 0.8 * math.fsum(excess), 0
    for value in sorted(excess, reverse=True):
        if left <= 0:
            break
        left, count = left - value, count + 1
    return count


def _length(rows: Sequence[collect.Sequence]) -> _Tested:
    rho, p = ranks.spearman([row.tokens for row in rows], [row.error for row in rows])
    grows = (rho or 0) > 0
    yes = f"the error {'grows' if grows else 'falls'} with the length of the response{{}}: " + (BUILDS_UP if grows else BEGINNING)
    no = "the error does not follow the length of the response"
    return _Tested("response length", "Spearman", rho, p, len(rows), abs(rho or 0) >= 0.3, yes, no)


def _position(rows: Sequence[collect.Sequence]) -> _Tested:
    slopes = [row.slope for row in rows if row.slope is not None]
    if len(slopes) < LEAST:
        no = f"whether it follows the position cannot be told: {len(slopes)} sequences are long enough and not constant"
        return _Tested("position", "mean Spearman", None, None, len(slopes), False, "", no)
    mean = math.fsum(slopes) / len(slopes)
    yes = f"the error {'grows' if mean > 0 else 'falls'} with position{{}}: " + (BUILDS_UP if mean > 0 else BEGINNING)
    no = "the error does not follow the position"
    return _Tested("position", "mean Spearman", mean, ranks.signs(slopes), len(slopes), abs(mean) >= 0.2, yes, no)


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
    return _Tested(name, words, ratio, ranks.signs(differences), len(differences), not 2 / 3 < ratio < 1.5, yes, no)


def _two(rows: Sequence[collect.Sequence], name: str, of: Callable[[collect.Sequence], bool | None], what: str, points: str) -> _Tested:
    known = [(bool(of(row)), row.error) for row in rows if of(row) is not None]
    inside, outside = ([error for flag, error in known if flag is side] for side in (True, False))
    words = "chance to have the larger error"
    if min(len(inside), len(outside)) < LEAST_GROUP:
        why = f"{len(inside)} of {len(known)} sequences are" if known else "the loop does not say which are"
        return _Tested(name, words, None, None, len(known), False, "", f"whether it follows {what} cannot be told: {why}")
    often = ranks.exceeds(inside, outside)
    _, p = ranks.spearman([float(flag) for flag, _ in known], [error for _, error in known])
    yes = f"{what} have the {'larger' if often > 0.5 else 'smaller'} error{{}}: {points}"
    return _Tested(name, words, often, p, len(known), abs(often - 0.5) >= 0.2, yes, f"the error does not follow {what}")


def _kinds(name: str, values: Sequence[str], rows: Sequence[collect.Sequence], points: str) -> _Tested:
    kinds = sorted(set(values))
    words = "share of the variance"
    if len(kinds) < 2:
        no = f"whether it follows {name} cannot be told: all sequences have {kinds[0] or 'none'}"
        return _Tested(name, words, None, None, len(rows), False, "", no)
    groups = [kinds.index(value) for value in values]
    share, p = ranks.between_groups(groups, [severity(row) for row in rows])
    yes = f"the error differs with {name} ({', '.join(kinds[:4])}){{}}: {points}"
    return _Tested(name, words, share, p, len(rows), (share or 0) >= 0.2, yes, f"the error does not follow {name}")


def _step(rows: Sequence[collect.Sequence]) -> _Tested:
    if len({row.step for row in rows}) < 2:
        return _Tested(
            "step", "Spearman", None, None, len(rows), False, "", "whether it follows the step cannot be told: there is only one"
        )
    rho, p = ranks.spearman([row.step for row in rows], [row.error for row in rows])
    grows = (rho or 0) > 0
    points = "it points to weights that do not reach the generator (refit)" if grows else "it points to how the run begins"
    yes = f"the error {'grows' if grows else 'falls'} from step to step{{}}: {points}"
    return _Tested("step", "Spearman", rho, p, len(rows), abs(rho or 0) >= 0.3, yes, "the error does not follow the step")
