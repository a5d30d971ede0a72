"""What the metrics of any training run must show, whichever loop wrote them: pure functions from metrics to checks.

Every logged step is there once, with all that a step logs and no value that cannot be; gradient, learning rate and loss moved at most
steps; nothing left the bounds of the loop or of the run's own first steps; files and log tell of the same steps and values.
A check is made only of metrics that are there. A miss of `Findings.checks` is a failure; a miss of `Findings.doubts` leaves the run
inconclusive.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, pairwise
from statistics import median

from seatrial.core.files import number_to_json
from seatrial.core.records import CheckResult, replace
from seatrial.core.series import Metrics, Series
from seatrial.core.specs import Bound, Signals
from seatrial.core.verdict import Boundary

DEAD_GRADIENT, DEAD_SHARE = 1e-10, 1e-7
"""A norm up to these (the second as a share of the largest of the first steps) moves no weight of any precision. The least of the healthy
samples is 0.1."""
DEAD_RATE = 1e-14
NO_SPREAD = 1e-8
"""Advantages are of size 1 where they are normalized, and as large as rewards where not."""
FEW = 10
"""One in so many steps may show nothing without making a run doubtful: a batch that was clipped, a lost update."""
MOST_HOLES = 10_000
"""Missing steps that are listed: one row with a step of 2**31 leaves more than the memory holds."""
SLACK = 1.5
"""Rows that are logged by epochs lie not quite evenly; a lost row makes a hole of twice the usual distance."""
FIRST = 5
"""Steps that a run's own bounds are taken from."""
DIGITS, NEAR_ZERO = 0.01, 0.001
"""A log rounds: to three decimals in the coarsest loop."""
MOST_APART = 0.05
"""Share of all values that may differ between a log and its metrics, where the steps of the log are estimates."""
EXACT = 1e-6
COMMON = Signals(
    loss=(r"(?:train/)?loss",),
    grad_norm=(r"(?:\w+/)?grad_norm",),
    rate=(r"(?:\w+/)?(?:lr|learning_rate)",),
    reward=(r"(?:train/)?rewards?(?:/mean)?",),
    spreads=(("train/advantages/max", "train/advantages/min"), ("critic/advantages/max", "critic/advantages/min")),
    deviations=(r"(?:train/)?reward_std",),
    ties=(r"(?:train/)?frac_reward_zero_std",),
    lengths=(r"(?:train/)?(?:completions/mean_length|mean_gen_tokens_per_sample)", "response_length/mean"),
    entropy=(r"(?:\w+/)?(?:approx_)?entropy",),
    moving=(r"(?:\w+/)?kl",),
    bounds=(
        Bound(r"(?:train/)?loss", low=-1e6, high=1e6, floor=100, growth=100),
        Bound(r"(?:\w+/)?grad_norm", high=1e6, floor=1e3, growth=300),
        Bound(r"(?:\w+/)?(?:(?:ppo_)?kl|kl_loss|gen_kl_error)", low=-1e3, high=1e4, floor=20, growth=100),
        Bound(r"(?:\w+/)?(?:lr|learning_rate)", high=10),
        Bound(r"(?:\w+/)?(?:approx_)?entropy", high=1e4, floor=20, growth=20),
    ),
)
"""The names of the field, for scripts that no loop knows."""
BELOW_ZERO = 0.01
"""Sums of rounded terms may end a little below zero."""


@dataclass(slots=True)
class Findings:
    """Checks whose miss is a failure, and those whose miss leaves a run inconclusive."""

    checks: list[CheckResult] = field(default_factory=list)
    doubts: list[CheckResult] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        self.checks += other.checks
        self.doubts += other.doubts

    def missed_doubt(self) -> CheckResult | None:
        return next((check for check in self.doubts if not check.passed), None)


@dataclass(frozen=True, slots=True)
class _Run:
    """One training run in a set of metrics: its tags without their prefix."""

    prefix: str
    series: dict[str, Series]

    def named(self, names: Iterable[str]) -> dict[str, Series]:
        patterns = [_compiled(name) for name in names]
        return {tag: series for tag, series in self.series.items() if series.steps and any(p.fullmatch(tag) for p in patterns)}

    def whole_tag(self, tag: str) -> str:
        return self.prefix + tag


@lru_cache(maxsize=512)
def _compiled(name: str) -> re.Pattern[str]:
    return re.compile(name)


def matches(tag: str, names: Iterable[str]) -> bool:
    """Whether one of these expressions names a tag, of whatever run."""
    return any(_compiled(rf"(?:[^/]+/)*?(?:{name})").fullmatch(tag) for name in names)


def examine(metrics: Metrics, printed: Metrics | None, signals: Signals, end: int | None = None, interval: int | None = None) -> Findings:
    """Everything that metrics show about their runs, and what the log prints beside them. `metrics` is what the verdict rests on. `printed`
    is what the log prints, where `metrics` come from files. `end` is the last step of the run, `interval` the distance of logged steps,
    as far as the run's own files say them."""
    found = Findings()
    for run in _runs(metrics, signals):
        found.add(_whole(run, signals, metrics, end, interval))
        found.add(_moved(run, signals))
        found.add(_bounded(run, signals))
        found.checks += _possible(run, signals)
    found.checks += _numbers(metrics, signals)
    found.doubts += _restarted(metrics, signals, "the metrics")
    if printed is None:
        return found
    found.checks += _numbers(printed, signals)
    found.checks += _finite(printed)
    found.doubts += _restarted(printed, signals, "the log")
    for run in _runs(printed, signals):
        found.checks += [check for check in _possible(run, signals) if not check.passed]
        found.doubts += [check for check in _bounded(run, signals).doubts if not check.passed]
        if not printed.damage:
            found.checks += [check for check in _whole(run, signals, printed, None, None).checks if not check.passed]
    found.add(_beside(metrics, printed, signals))
    return found


def _runs(metrics: Metrics, signals: Signals) -> list[_Run]:
    known = [*signals.loss, *signals.grad_norm, *signals.reward]
    pattern = _compiled(rf"((?:[^/]+/)*?)(?:{'|'.join(known)})")
    prefixes = {match[1] for tag in metrics.series if (match := pattern.fullmatch(tag))}
    return [
        _Run(prefix, {tag.removeprefix(prefix): series for tag, series in metrics.series.items() if tag.startswith(prefix)})
        for prefix in sorted(prefixes)
    ]


def _check(
    name: str,
    passed: bool,
    value: float | str | None,
    at: Boundary,
    message: str = "",
    steps: Sequence[int] = (),
    limit: str = "",
    tag: str = "",
) -> CheckResult:
    shown = number_to_json(value) if isinstance(value, float) else value
    step, missing = (steps[0] if steps else None, tuple(steps)) if not passed else (None, ())
    made = CheckResult(name=name, kind="proof", passed=passed, value=shown, threshold=limit, message=message, boundary=at)
    return replace(made, missing=missing, step=step, tag=tag)


def _list(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps[:5])) + (" …" if len(steps) > 5 else "")


def _numbers(metrics: Metrics, signals: Signals) -> list[CheckResult]:
    """A metric of training that holds text, true or false at every row. Made only where one does."""
    tag = next((tag for tag in sorted(metrics.words) if matches(tag, signals.every)), None)
    if tag is None:
        return []
    return [_check("every metric is a number", False, None, Boundary.METRICS, str(metrics.words[tag]), tag=tag)]


def _finite(printed: Metrics) -> list[CheckResult]:
    bad = [(tag, steps) for tag, series in sorted(printed.series.items()) if (steps := series.non_finite())]
    if not printed.series:
        return []
    name, at = "the log prints finite values", Boundary.METRICS
    if not bad:
        return [_check(name, True, 0, at)]
    tag, steps = bad[0]
    return [_check(name, False, len(bad), at, f"{tag} is not finite at step {_list(steps)} of the log", steps, tag=tag)]


def _restarted(metrics: Metrics, signals: Signals, where: str) -> list[CheckResult]:
    """One run: no step is written again, no counter falls."""
    if not metrics.series:
        return []
    again = next((row for row in metrics.restarts if row.steps and matches(row.tag, signals.every_step)), None)
    message = f"{again.tag} is written again at step {_list(again.steps)}" if again else ""
    steps: tuple[int, ...] = again.steps if again else ()
    for run in _runs(metrics, signals):
        for tag, series in run.named(signals.counters).items():
            fallen = [after for after, (old, new) in zip(series.steps[1:], pairwise(series.values), strict=True) if new < old * (1 - 1e-3)]
            if fallen and not message:
                message, steps = f"{run.whole_tag(tag)} falls at step {_list(fallen)}", tuple(fallen)
    more = f"{message}: more than one run in {where}; judge one at a time" if message else ""
    return [_check(f"one run in {where}", not message, None, Boundary.METRICS, more, steps)]


def _whole(run: _Run, signals: Signals, metrics: Metrics, end: int | None, interval: int | None) -> Findings:
    """Steps are logged without holes, and each with all that a step logs."""
    found = Findings()
    every = run.named(signals.every_step)
    losses = run.named(signals.loss)
    if not losses:
        return found
    last = max(series.steps[-1] for series in losses.values())
    rows = sorted({step for series in every.values() for step in series.steps if step <= last})
    usual = _usual(rows, interval)
    starts = _starts(run, signals)
    reused = _reused(run, signals, rows)
    for tag, series in every.items():
        if tag in reused:
            continue
        have = set(series.steps)
        lost = [step for step in rows if step not in have and step >= starts.get(tag.rpartition("/")[0], 0)]
        if len(lost) > len(rows) / 2:
            continue  # logged now and then
        name = f"{run.whole_tag(tag)} is logged without holes"
        holes = sorted({*lost, *_holes(rows, usual)}) if tag in losses else lost
        if tag in losses or holes:
            value = f"{len(series)} rows, usually {usual} apart" if len(rows) > 1 else f"{len(series)} row"
            message = f"nothing at step {_list(holes)}" if holes else ""
            found.checks.append(_check(name, not holes, value, Boundary.METRICS, message, holes, tag=run.whole_tag(tag)))
    expected = _expected(rows, interval, max(end or 0, last)) if interval and not metrics.estimated else []
    first_loss = run.whole_tag(next(iter(losses)))
    if expected:
        message = f"rows are logged every {interval} steps, and nothing is logged at step {_list(expected)}"
        name = "every row that was to be logged is there"
        found.checks.append(_check(name, False, len(expected), Boundary.METRICS, message, expected, tag=first_loss))
    if end is not None and end - last >= usual and not metrics.estimated:
        message = f"the run went on to step {end}, and the last loss is that of step {last}"
        tail = list(islice(range(last + 1, end + 1), MOST_HOLES))
        check = _check(f"the last steps are logged ({first_loss})", False, last, Boundary.METRICS, message, tail, tag=first_loss)
        (found.checks if len(rows) > 1 else found.doubts).append(check)
    return found


def _reused(run: _Run, signals: Signals, rows: Sequence[int]) -> set[str]:
    """Metrics of generation where each batch is trained on twice: all of them are logged at the same rows, every second one."""
    ends = tuple(tag for pair in signals.spreads for tag in pair)
    made = run.named((*signals.reward, *ends, *signals.deviations, *signals.ties, *signals.lengths))
    logged = {tuple(step for step in series.steps if step <= rows[-1]) for series in made.values()}
    return set(made) if len(made) > 1 and len(rows) > 2 and logged <= {tuple(rows[::2]), tuple(rows[1::2])} and len(logged) == 1 else set()


def _starts(run: _Run, signals: Signals) -> dict[str, int]:
    """Where the metrics of each trained model begin, by their directory: a critic may be warmed up before the policy is trained."""
    begun: dict[str, int] = {}
    for tag, series in run.named((*signals.loss, *signals.grad_norm)).items():
        place = tag.rpartition("/")[0]
        begun[place] = min(begun.get(place, series.steps[0]), series.steps[0])
    return begun if len(begun) > 1 else {}


def _usual(rows: Sequence[int], interval: int | None) -> int:
    distances = [after - before for before, after in pairwise(rows)]
    if rows and rows[0] == 1 and len(distances) > 1:
        distances = distances[1:]
    if not distances:
        return interval or (rows[0] if rows else 1)
    counted = Counter(distances)
    return min(counted, key=lambda distance: (-counted[distance], distance))


def _holes(rows: Sequence[int], usual: int) -> list[int]:
    wide = ((before, after) for before, after in pairwise(rows) if after - before > usual * SLACK)
    return list(islice((step for before, after in wide for step in range(before + usual, after, usual)), MOST_HOLES))


def _expected(rows: Sequence[int], interval: int, end: int) -> list[int]:
    """Steps that were to be logged and are not; none where rows are logged by another rule (epochs)."""
    if any(step % interval for step in rows if step not in (1, end)):
        return []
    have = set(rows)
    return list(islice((step for step in range(interval, end + 1, interval) if step not in have), MOST_HOLES))


def _at(series: Series | None) -> dict[int, float]:
    return dict(zip(series.steps, series.values, strict=True)) if series else {}


def _spread(run: _Run, signals: Signals) -> dict[int, bool]:
    """Whether there was something to learn, by step; steps of which nothing is known are left out. Step 0 is no training step."""
    known: dict[int, bool] = {}
    for high, low in signals.spreads:
        top, bottom = _at(run.series.get(high)), _at(run.series.get(low))
        if top and bottom:
            known = {step: top[step] - bottom[step] > NO_SPREAD for step in top.keys() & bottom.keys() if step > 0}
            break
    for names, sign, limit in ((signals.deviations, 1, NO_SPREAD), (signals.ties, -1, EXACT - 1)):
        for series in run.named(names).values():
            for step, value in _at(series).items():
                known[step] = known.get(step, True) and sign * value > limit
    return known


def _moved(run: _Run, signals: Signals) -> Findings:
    found = Findings()
    spread = _spread(run, signals)
    supervised = not run.named(signals.reward)
    rates = run.named(signals.rate)
    alive = {step: value > DEAD_RATE for series in rates.values() for step, value in _at(series).items()}
    norms = run.named(signals.grad_norm)
    for tag, series in norms.items():
        found.checks.append(_gradient(run.whole_tag(tag), series, spread, alive))
    if run.prefix != signals.control or not signals.control:
        for tag, series in rates.items():
            found.doubts.append(_rate(run.whole_tag(tag), series))
    if spread:
        flat = sorted(step for step, learned in spread.items() if not learned)
        message = f"nothing to learn from at step {_list(flat)}: all advantages are zero there" if len(flat) * 2 > len(spread) else ""
        value = f"{len(spread) - len(flat)} of {len(spread)} steps"
        found.doubts.append(
            _check(f"there was something to learn{_where(run)}", not message, value, Boundary.REWARD, message, flat, "most steps")
        )
    for tag, series in run.named(signals.lengths).items():
        empty = [step for step, value in _at(series).items() if value == 0 and step > 0]
        bad = len(empty) > len(series) // FEW
        message = f"no token was generated or counted at step {_list(empty)}" if bad else ""
        name = f"{run.whole_tag(tag)} is not zero"
        found.doubts.append(_check(name, not bad, f"{len(empty)} steps", Boundary.ROLLOUT, message, empty, tag=run.whole_tag(tag)))
    for tag, series in run.named(signals.entropy).items():
        if not any(series.values):
            message = "it is exactly 0 at every step: the policy has no choice left, or it was not computed"
            name = f"{run.whole_tag(tag)} is not zero"
            found.doubts.append(_check(name, False, 0.0, Boundary.METRICS, message, series.steps, tag=run.whole_tag(tag)))
    found.doubts += [_living_loss(run.whole_tag(tag), series, supervised) for tag, series in run.named(signals.loss).items()]
    found.doubts += _fresh_rows(run, signals)
    return found


def _where(run: _Run) -> str:
    return f" in {run.prefix.rstrip('/')}" if run.prefix else ""


def _gradient(tag: str, series: Series, spread: dict[int, bool], alive: dict[int, bool]) -> CheckResult:
    """A gradient wherever there was something to learn and a learning rate to learn it with."""
    points = {step: value for step, value in _at(series).items() if step > 0}
    first = [abs(value) for value in points.values() if math.isfinite(value)][:FIRST]
    usual = [value for value in first if value <= first[0] / DEAD_SHARE]  # of a spike the other steps are no share
    limit = max(DEAD_GRADIENT, DEAD_SHARE * max(usual, default=0.0))
    asked = [step for step in points if spread.get(step, True) and alive.get(step, True)] or list(points)
    dead = [step for step in asked if abs(points[step]) <= limit]
    most = 1 if len(asked) > 3 else 0
    bad = len(dead) > max(most, len(asked) // FEW)
    message = f"no gradient at step {_list(dead)}, although there was something to learn" if bad else ""
    value = f"{len(asked) - len(dead)} of {len(asked)} steps"
    return _check(f"{tag} is not zero", not bad, value, Boundary.OPTIMIZER, message, dead, tag=tag)


def _rate(tag: str, series: Series) -> CheckResult:
    """A schedule may begin with 0 and end with 0; a rate of 0 between is no training."""
    points = [(step, value) for step, value in _at(series).items() if step > 0]
    zero = [step for step, value in points if abs(value) <= DEAD_RATE]
    inner = list(points)
    if len(inner) > 1 and abs(inner[0][1]) <= DEAD_RATE:
        inner = inner[1:]
    if len(inner) > 1 and abs(inner[-1][1]) <= DEAD_RATE:
        inner = inner[:-1]
    idle = [step for step, value in inner if abs(value) <= DEAD_RATE]
    bad = bool(inner) and len(idle) > len(inner) // FEW
    message = f"vacuous: the learning rate is 0 at step {_list(zero)}, so no weight could change there" if bad else ""
    value = f"{len(points) - len(zero)} of {len(points)} steps"
    return _check(f"{tag} is not zero", not bad, value, Boundary.OPTIMIZER, message, zero, tag=tag)


def _living_loss(tag: str, series: Series, supervised: bool) -> CheckResult:
    """A supervised loss is never 0; no loss is the same number at every step. One of a policy may be 0: its advantages cancel out."""
    zero = [step for step, value in _at(series).items() if value == 0]
    same = len(series) > 2 and len(set(series.values)) == 1 and not zero
    empty = supervised and len(zero) > len(series) // FEW
    message = f"it is {series.values[0]} at every step: nothing new was computed" if same else ""
    if empty:
        message = f"it is exactly 0 at step {_list(zero)}: no token counted"
    steps = zero if empty else series.steps if same else ()
    return _check(f"{tag} is computed anew", not message, f"{len(set(series.values))} values", Boundary.METRICS, message, steps, tag=tag)


def _fresh_rows(run: _Run, signals: Signals) -> list[CheckResult]:
    """No step shows the very numbers of another. Two values that are not zero are enough to tell them apart."""
    names = (*signals.loss, *signals.grad_norm, *signals.entropy, *signals.reward, *signals.moving)
    tables = [_at(series) for series in run.named(names).values()]
    steps = sorted({step for table in tables for step in table})
    seen: dict[tuple[float | None, ...], int] = {}
    copies: list[tuple[int, int]] = []
    for step in steps:
        row = tuple(table.get(step) for table in tables)
        if len({value for value in row if value}) < 2:
            continue
        if row in seen:
            copies.append((seen[row], step))
        seen.setdefault(row, step)
    if len(steps) < 2 or len(tables) < 2:
        return []
    message = f"all numbers of step {copies[0][1]} are those of step {copies[0][0]}" if copies else ""
    value = f"{len(copies)} of {len(steps)} steps"
    return [
        _check(f"no step repeats another{_where(run)}", not copies, value, Boundary.METRICS, message, [step for _, step in copies], "0")
    ]


def _possible(run: _Run, signals: Signals) -> list[CheckResult]:
    """No value that its definition excludes."""
    wrong: list[tuple[str, int, float, str]] = []
    signed = (*signals.grad_norm, *signals.rate, *signals.deviations, *signals.lengths)
    for names, low, high in (
        (signed, -EXACT * EXACT, math.inf),
        ((*signals.not_negative, *signals.entropy), -BELOW_ZERO, math.inf),
        ((*signals.shares, *signals.ties), -EXACT, 1 + EXACT),
    ):
        text = ">= 0" if high == math.inf else "within 0 and 1"
        for tag, series in run.named(names).items():
            wrong += [(tag, step, value, text) for step, value in _at(series).items() if value < low or value > high]
    for less, more in (*signals.ordered, *((low, high) for high, low in signals.spreads)):
        upper = _at(run.series.get(more))
        for step, value in _at(run.series.get(less)).items():
            if step in upper and value > upper[step] + EXACT * max(1.0, abs(upper[step])):
                wrong.append((less, step, value, f"at most {more}, which is {upper[step]:g}"))
    message = f"{run.whole_tag(wrong[0][0])} is {wrong[0][2]:g} at step {wrong[0][1]}; it is {wrong[0][3]} by definition" if wrong else ""
    steps = [step for _, step, _, _ in wrong]
    first = run.whole_tag(wrong[0][0]) if wrong else ""
    name = f"every value is possible{_where(run)}"
    return [_check(name, not wrong, f"{len(wrong)} are not", Boundary.METRICS, message, steps, "0", tag=first)]


def _bounded(run: _Run, signals: Signals) -> Findings:
    found = Findings()
    supervised = not run.named(signals.reward)
    losses = (Bound(name, floor=20, growth=5) for name in signals.loss) if supervised else ()
    for bound in (*losses, *signals.bounds):
        for tag, series in run.named((bound.tag,)).items():
            found.doubts.append(_within(run.whole_tag(tag), series, bound))
    return found


def _within(tag: str, series: Series, bound: Bound) -> CheckResult:
    sizes = [abs(value) for step, value in _at(series).items() if math.isfinite(value) and step > 0]
    first = sizes[:FIRST]
    own = bound.growth * min(median(first), next((size for size in first if size), 0.0)) if first else 0.0
    high = min(bound.high, max(bound.floor, own)) if bound.floor < math.inf else bound.high
    low = max(bound.low, -high)
    out = [(step, value) for step, value in _at(series).items() if not low <= value <= high]
    message = ""
    if out:
        step, value = max(out, key=lambda point: abs(point[1]))
        message = f"{tag} is {value:g} at step {step}; a sound run stays within {low:g} and {high:g}"
    worst = max(out, key=lambda point: abs(point[1]))[1] if out else max(sizes, default=0.0)
    steps = [step for step, _ in out]
    made = _check(f"{tag} stays in bounds", not out, worst, Boundary.METRICS, message, steps, f"{low:g} to {high:g}", tag=tag)
    return replace(made, subject="bound")


def _beside(metrics: Metrics, printed: Metrics, signals: Signals) -> Findings:
    found = Findings()
    if not printed.series or not metrics.series:
        return found
    shared = [tag for tag in printed.series if matches(tag, signals.every_step) and metrics.series.get(tag)]
    lost, unprinted = _lost(metrics, printed, shared)
    name = "the metrics hold every step that the log prints"
    if shared:
        message = f"the log prints {lost[0]} at step {_list(lost[1])}, and the metrics do not hold it" if lost else ""
        steps, tag = (lost[1], lost[0]) if lost else ([], "")
        found.checks.append(_check(name, not lost, f"{len(shared)} metrics", Boundary.METRICS, message, steps, tag=tag))
    if unprinted:
        message = f"the metrics hold {unprinted[0]} at step {_list(unprinted[1])}, and the log does not print it"
        name = "the log prints every step that the metrics hold"
        found.doubts.append(_check(name, False, f"{len(unprinted[1])}", Boundary.METRICS, message, unprinted[1], tag=unprinted[0]))
    learned = (*signals.loss, *signals.grad_norm)
    told = next((tag for tag in printed.series if matches(tag, learned) and tag not in metrics.series), None)
    if told is not None and metrics.series.keys() & printed.series.keys():
        message = f"the log prints {told}, and the metrics do not hold it: it is missing there, or no number"
        found.doubts.append(_check("the metrics hold what the log prints", False, None, Boundary.METRICS, message, tag=told))
    found.doubts.append(_same_values(metrics, printed, set() if printed.estimated else set(shared), signals))
    return found


def _lost(metrics: Metrics, printed: Metrics, shared: Sequence[str]) -> tuple[tuple[str, list[int]] | None, tuple[str, list[int]] | None]:
    """The first metric that lacks steps of the log, and the first of which the log lacks steps between those that it prints."""
    lost = unprinted = None
    for tag in shared:
        told, held = set(printed.series[tag].steps), set(metrics.series[tag].steps)
        if printed.estimated:
            gone = sorted(told)[len(held) :]
        else:
            gone = sorted(told - held)
            more = sorted(step for step in held - told if min(told) < step)
            unprinted = unprinted or ((tag, more) if more and not printed.damage else None)
        lost = lost or ((tag, gone) if gone else None)
    return lost, unprinted


def _same_values(metrics: Metrics, printed: Metrics, strict: set[str], signals: Signals) -> CheckResult:
    """Both come from the same numbers: what the log prints of them may be rounded, not different."""
    rates = {tag for tag in printed.series if matches(tag, signals.rate)}
    points, apart = 0, list[tuple[str, int, float, float]]()
    for tag, step, told, held in _pairs(metrics, printed):
        points += 1
        if _apart(told, held, tag in rates):
            apart.append((tag, step, told, held))
    telling = [row for row in apart if row[0] in strict and math.isfinite(row[2]) and math.isfinite(row[3])]
    name = "the metrics are those that the log prints"
    if not points:
        message = "the log and the metrics share no step: the metrics are of another run"
        return _check(name, False, "0 values", Boundary.METRICS, message)
    message = ""
    if len(apart) > points * MOST_APART:
        message = f"{len(apart)} of {points} values are not those that the log prints: the metrics are of another run"
    elif telling:
        tag, step, told, held = telling[0]
        message = f"{tag} is {held:g} at step {step}, and the log prints {told:g}"
    shown = (telling or apart) if message else []
    steps = [step for _, step, _, _ in shown]
    return _check(name, not message, f"{points} values", Boundary.METRICS, message, steps, tag=shown[0][0] if shown else "")


def _apart(told: float, held: float, rate: bool) -> bool:
    """Whether two values are not one, as rounded in the log. A learning rate is small, and 0 only where it is 0."""
    if not rate:
        return not math.isclose(told, held, rel_tol=DIGITS, abs_tol=NEAR_ZERO)
    still = abs(told) <= DEAD_RATE
    return still is not (abs(held) <= DEAD_RATE) or (not still and not 0.5 <= told / held <= 2)


def _pairs(metrics: Metrics, printed: Metrics) -> Iterator[tuple[str, int, float, float]]:
    for tag, series in printed.series.items():
        held = _at(metrics.series.get(tag))
        for step, value in _at(series).items():
            if step in held:
                yield tag, step, value, held[step]
