"""Computes the profile of a campaign from its journal, merged or not, complete or not.

- pass@k is unbiased (k of n without replacement); best@k is the expected largest reward of k. maj@k is the vote of the first k rollouts, as
  Gym and Skills count it.
- Intervals are of 95 %: Wilson's for a pass rate, Student's over tasks for a mean, since tasks are the clusters. Where nothing can be
  estimated there is none.
- A group's headline is the mean over its tasks, each counting once; figures over rollouts stand beside it.
"""

from __future__ import annotations

import gc
import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from itertools import chain
from typing import Literal, NamedTuple

from seatrial import __version__
from seatrial.core.errors import UserError
from seatrial.core.records import replace
from seatrial.core.text import counted
from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.journal.journal_scan import FAILED, OK
from seatrial.rollouts.manifest import Units
from seatrial.rollouts.results import profile_data as data
from seatrial.rollouts.results.profile_data import QUANTITIES, Columns, Numbers, Profile, Task
from seatrial.rollouts.rollout_record import InputRow

Z = 1.959963984540054
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""The 97.5 % quantile of Student's distribution with 1, 2, … degrees of freedom."""

Interval = tuple[float, float]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float | None:
    """The sample's standard deviation (n - 1); None for one value, of which none can be known."""
    if len(values) < 2:
        return None
    return math.dist(values, [mean(values)] * len(values)) / math.sqrt(len(values) - 1)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, between neighbours by a straight line; 0.5 is the median."""
    place = (len(ordered) - 1) * share
    low = int(place)
    if low + 1 == len(ordered):
        return ordered[low]
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (place - low)


@cache
def pass_at(n: int, correct: int, k: int) -> float:
    """Of `n` rollouts `correct` are right: the chance that `k` of them hold a right one."""
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {correct} correct of {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def best_at(ordered: Sequence[float], k: int) -> float:
    """The expected largest of `k` of these sorted rewards."""
    return math.fsum([weight * reward for weight, reward in zip(_chances(len(ordered), k), ordered[k - 1 :], strict=True)])


@cache
def _chances(n: int, k: int) -> tuple[float, ...]:
    """With which chance each of the sorted values from the k-th on is the largest of `k` drawn."""
    if not 1 <= k <= n:
        raise ValueError(f"best@{k} of {n}")
    return tuple(math.comb(below, k - 1) / math.comb(n, k) for below in range(k - 1, n))


def majorities(answers: Sequence[int], rewards: Sequence[float], ks: Iterable[int]) -> list[float]:
    """maj@k for each of the ascending `ks`, none above the number of rollouts; equal answers have equal numbers, 0 is no answer."""
    votes: dict[tuple[int, float], int] = {}
    found: list[float] = []
    counted = 0
    for k in ks:
        for vote in zip(answers[counted:k], rewards[counted:k], strict=True):
            if vote[0]:
                votes[vote] = votes.get(vote, 0) + 1
        counted = k
        most = max(votes.values(), default=0)
        tied = [reward for (_, reward), count in votes.items() if count == most]
        found.append(mean(tied) if tied else 0.0)
    return found


def wilson(correct: int, n: int) -> Interval:
    """Where the true pass rate lies, of `correct` among `n` rollouts."""
    rate, square = correct / n, Z * Z
    middle = (rate + square / (2 * n)) / (1 + square / n)
    half = Z * math.sqrt(rate * (1 - rate) / n + square / (4 * n * n)) / (1 + square / n)
    # At the ends the formula gives 0 and 1 but for rounding.
    return (middle - half if correct else 0.0), (middle + half if correct < n else 1.0)


def interval(values: Sequence[float]) -> Interval | None:
    """Where the true mean over tasks lies, by one value per task."""
    spread = std(values)
    if not spread:
        return None
    half = _student(len(values) - 1) * spread / math.sqrt(len(values))
    middle = mean(values)
    return middle - half, middle + half


@cache
def _student(freedom: int) -> float:
    """The 97.5 % quantile; from ten degrees on by its series, good to four digits."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    first, second = (Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3


def default_ks(n: int) -> tuple[int, ...]:
    return (*(2**power for power in range(max(0, n - 1).bit_length())), n) if n else ()


TRUNCATED = frozenset({"length", "max_tokens", "max_output_tokens"})
"""How chat completions, the Responses API and others say that an answer was cut at a limit."""


class Rules(NamedTuple):
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
    return Numbers(n, middle, spread, low, quantile(ordered, 0.5), quantile(ordered, 0.95), high, total)


def rewards_of(columns: Columns, units: range) -> list[float]:
    return [value for value in columns.reward[units.start : units.stop] if value == value]


def make_task(row: InputRow, units: range, columns: Columns, rules: Rules) -> Task:
    first, last = units.start, units.stop
    state = columns.state[first:last]
    n, given_up, expected = state.count(OK), state.count(FAILED), last - first
    rewards = rewards_of(columns, units)
    correct = sum([reward >= rules.pass_at for reward in rewards])
    low, high = wilson(correct, n) if n else (None, None)
    whole = n == expected
    answers = columns.answer[first:last] if whole else [columns.answer[unit] for unit in units if columns.state[unit] == OK]
    passes, best, majority = _task_at_k(rewards, correct, answers, rules)
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
        **{name: numbers(getattr(columns, name)[first:last]) for name in QUANTITIES},
        correct=correct,
        pass_rate=correct / n if n else None,
        pass_low=low,
        pass_high=high,
        pass_at=passes,
        best_at=best,
        majority_at=majority,
        finish=finish,
        truncated=truncated(finish),
        metrics={name: found for name, column in columns.metrics.items() if (found := numbers(column[first:last]))},
    )


def _task_at_k(rewards: list[float], correct: int, answers: Sequence[int], rules: Rules) -> tuple[tuple[float | None, ...], ...]:
    """pass@k, best@k and maj@k; None where there are fewer rollouts than k."""
    n = len(rewards)
    within = [k for k in rules.ks if k <= n]
    beyond = (None,) * (len(rules.ks) - len(within))
    passes = tuple([pass_at(n, correct, k) for k in within])
    if rewards.count(1.0) == correct and rewards.count(0.0) == n - correct:
        best = passes  # the largest of rewards of 0 and 1 is 1 as often as one of them is
    else:
        ordered = sorted(rewards)
        best = tuple([best_at(ordered, k) for k in within])
    return passes + beyond, best + beyond, tuple(majorities(answers, rewards, within)) + beyond


def _counts(codes: bytearray, names: Sequence[str]) -> dict[str, int]:
    """How often each name stands there; code 0 is none."""
    return {names[code]: codes.count(code) for code in sorted(set(codes)) if code}


def truncated(finish: dict[str, int]) -> float | None:
    """Share of rollouts that were cut at a limit, of those that say how they ended."""
    told = sum(finish.values())
    return sum(count for name, count in finish.items() if name in TRUNCATED) / told if told else None


By = Literal["overall", "dataset", "agent", "tag", "dataset x agent"]
NO_AGENT = "(none)"


class Sources(NamedTuple):
    """What groups are made from."""

    columns: Columns
    units_of: Callable[[int], range]
    ks: tuple[int, ...]


def make_groups(tasks: Sequence[Task], sources: Sources) -> tuple[data.Group, ...]:
    """The group of all first, then the others by their kind and name."""
    overall = _group("overall", "all tasks", tasks, sources)
    made = [overall]
    agents, datasets = {task.agent for task in tasks}, {task.dataset for task in tasks}
    divisions = [_divided("dataset", tasks, lambda task: (task.dataset,))]
    if any(agents):
        divisions.append(_divided("agent", tasks, lambda task: (task.agent or NO_AGENT,)))
    divisions.append(_divided("tag", tasks, lambda task: tuple(dict.fromkeys(task.tags))))
    if any(agents) and len(datasets) > 1 and len(agents) > 1:
        divisions.append(_divided("dataset x agent", tasks, lambda task: (f"{task.dataset} x {task.agent or NO_AGENT}",)))
    for by, name, members in chain.from_iterable(divisions):
        # One dataset is all of them: nothing is to be counted again.
        same = len(members) == len(tasks)
        made.append(replace(overall, by=by, name=name) if same else _group(by, name, members, sources))
    return tuple(made)


def _divided(by: By, tasks: Sequence[Task], names: Callable[[Task], tuple[str, ...]]) -> Iterator[tuple[By, str, Sequence[Task]]]:
    found: dict[str, list[Task]] = {}
    for task in tasks:
        for name in names(task):
            found.setdefault(name, []).append(task)
    for name in sorted(found):
        yield by, name, found[name]


def _group(by: By, name: str, tasks: Sequence[Task], sources: Sources) -> data.Group:
    columns = sources.columns
    ranges = [sources.units_of(task.index) for task in tasks]
    finish = _added(task.finish for task in tasks)

    arrays = {name: getattr(columns, name) for name in QUANTITIES}
    pools = {name: columns.ordered(column) if by == "overall" else _pooled(column, ranges) for name, column in arrays.items()}
    quantities = {name: numbers(pool) for name, pool in pools.items()}
    reward = quantities["reward"]
    # Where no rollout of a dataset ever has an answer, a vote says nothing.
    answered = {task.dataset for task, units in zip(tasks, ranges, strict=True) if any(columns.answer[units.start : units.stop])}
    voting = [task for task in tasks if task.dataset in answered]
    # No mean of such rewards lies beyond: an interval that does says less than is known.
    within = reward is not None and reward.min >= 0 and reward.max <= 1
    expected, ok = sum(task.expected for task in tasks), sum(task.n for task in tasks)
    return data.Group(
        by=by,
        name=name,
        tasks=len(tasks),
        measured=sum(task.n > 0 for task in tasks),
        expected=expected,
        ok=ok,
        failed=_added(task.failed for task in tasks),
        missing=sum(task.missing for task in tasks),
        coverage=ok / expected if expected else 0.0,
        mean=_estimate([task.reward.mean for task in tasks if task.reward], within),
        **quantities,
        pass_at=_group_at_k(tasks, sources.ks, lambda task: task.pass_at, within=True),
        best_at=_group_at_k(tasks, sources.ks, lambda task: task.best_at, within),
        majority_at=_group_at_k(voting, sources.ks, lambda task: task.majority_at, within),
        average_of=_averages(columns, ranges, sources.ks, within),
        never=sum(task.pass_rate == 0 for task in tasks),
        always=sum(task.pass_rate == 1 for task in tasks),
        finish=finish,
        truncated=truncated(finish),
        metrics={key: found for key, column in columns.metrics.items() if (found := numbers(_pooled(column, ranges)))},
    )


def _pooled(column: array[float], ranges: Sequence[range]) -> list[float]:
    """What a column holds for these units, without the units that have nothing."""
    return [value for units in ranges for value in column[units.start : units.stop] if value == value]


def _added(counts: Iterator[Mapping[str, int]]) -> dict[str, int]:
    added: Counter[str] = Counter()
    for one in counts:
        added.update(one)
    return dict(sorted(added.items(), key=lambda item: (-item[1], item[0])))


def _estimate(values: Sequence[float], within: bool) -> data.Estimate:
    """The mean with its interval; `within`: no value can lie beyond 0 and 1."""
    low, high = interval(values) or (None, None)
    if within and low is not None and high is not None:
        low, high = max(0.0, low), min(1.0, high)
    return data.Estimate(value=mean(values) if values else None, low=low, high=high, tasks=len(values))


def _group_at_k(
    tasks: Sequence[Task], ks: Sequence[int], figures: Callable[[Task], tuple[float | None, ...]], within: bool
) -> tuple[data.AtK, ...]:
    made = []
    for place, k in enumerate(ks):
        values = [value for task in tasks if (value := figures(task)[place]) is not None]
        made.append(data.AtK(k=k, **dict(_estimate(values, within))))
    return tuple(made)


def _averages(columns: Columns, ranges: Sequence[range], ks: Sequence[int], within: bool) -> tuple[data.AverageOf, ...]:
    rewards = [rewards_of(columns, units) for units in ranges]
    made = []
    for k in ks:
        rewards = [row for row in rewards if len(row) >= k]
        firsts = [row[:k] for row in rewards]
        runs = [mean(run) for run in zip(*firsts, strict=True)]
        spread = std(runs)
        found = _estimate([mean(row) for row in firsts], within)
        error = None if spread is None else spread / math.sqrt(k)
        made.append(data.AverageOf(k=k, std_dev_across_runs=spread, std_err_across_runs=error, **dict(found)))
    return tuple(made)


BARS = 20


def make_histograms(tasks: Sequence[Task], columns: Columns) -> tuple[data.Histogram, ...]:
    """Only of what there is; of quantities that differ."""
    keys = ("output_tokens", "input_tokens", "turns", "latency_s")
    drawn = {QUANTITIES[key]: bars(columns.ordered(getattr(columns, key))) for key in keys}
    made = [
        data.Histogram(name="pass rate", of="tasks", bars=pass_rates([task.pass_rate for task in tasks if task.pass_rate is not None])),
        data.Histogram(name="reward", of="rollouts", bars=bars(columns.ordered(columns.reward))),
        *(data.Histogram(name=title, of="rollouts", bars=found) for title, found in drawn.items() if len(found) > 1),
    ]
    return tuple(one for one in made if one.bars)


def pass_rates(rates: Sequence[float]) -> tuple[data.Bar, ...]:
    """0 and 1 have bars of their own: such tasks teach nothing."""
    if not rates:
        return ()
    edges = [step / 10 for step in range(11)]
    labels = ["0", *(f"to {edge:.1f}" for edge in edges[1:-1]), "below 1", "1"]
    counts = [0] * len(labels)
    for rate in rates:
        counts[11 if rate == 1 else bisect_left(edges, rate)] += 1
    return tuple(data.Bar(label=label, count=count) for label, count in zip(labels, counts, strict=True))


def bars(ordered: Sequence[float]) -> tuple[data.Bar, ...]:
    """A bar per value where there are few of them, else equal steps up to the 99th percentile and one bar for the rest."""
    few: list[data.Bar] = []
    place = 0
    while place < len(ordered) and len(few) <= BARS:
        end = bisect_right(ordered, ordered[place], place)
        few.append(data.Bar(label=f"{ordered[place]:.6g}", count=end - place))
        place = end
    return tuple(few) if len(few) <= BARS else _steps(ordered)


def _steps(ordered: Sequence[float]) -> tuple[data.Bar, ...]:
    low, high = ordered[0], quantile(ordered, 0.99)
    if high == low:
        high = ordered[-1]
    step = (high - low) / BARS
    edges = [*(low + step * place for place in range(1, BARS)), high]
    ends = [bisect_right(ordered, edge) for edge in edges]
    made = [
        data.Bar(label=f"{edge - step:.4g} to {edge:.4g}", count=end - start)
        for start, end, edge in zip([0, *ends[:-1]], ends, edges, strict=True)
    ]
    rest = len(ordered) - ends[-1]
    return (*made, data.Bar(label=f"above {high:.4g}", count=rest)) if rest else tuple(made)


def make_profile(
    place: CampaignDir, *, pass_at: float = 1.0, ks: Sequence[int] | None = None, progress: Callable[[str], None] = lambda _: None
) -> Profile:
    """The profile of all rollouts there are. A reward of `pass_at` and more is correct; `ks` are 1, 2, 4, … unless said."""
    if not math.isfinite(pass_at):
        raise UserError(f"a reward of {pass_at} and more is correct: no reward is", "say a finite number")
    manifest = manifests.load_manifest(place)
    most = max(len(labels) for labels in manifest.repeats.values())
    wrong = [k for k in ks or () if not 1 <= k <= most]
    if wrong or (ks is not None and not ks):
        raise UserError(f"k = {', '.join(map(str, wrong)) or 'nothing'}: tasks have up to {most} rollouts", f"choose k from 1 to {most}")
    rules = Rules(pass_at, default_ks(most) if ks is None else tuple(sorted(set(ks))))
    with Units(place, manifest) as units, _no_collection():
        progress(f"reading the rollouts of {counted(manifest.units, 'unit')}")
        columns, scan = data.read_columns(place, units)
        found = f"{counted(scan.ok, 'rollout')}, {counted(scan.failed, 'failure')}, {scan.owed} missing"
        progress(f"{found}; counting {counted(manifest.rows, 'task')}")
        tasks = tuple(make_task(units.row(index), units.units_of_row(index), columns, rules) for index in range(units.rows))
        groups = make_groups(tasks, Sources(columns, units.units_of_row, rules.ks))
    summary = data.Summary(
        campaign=manifest.name,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        seatrial=__version__,
        inputs_sha256=manifest.inputs_sha256,
        pass_at=pass_at,
        ks=rules.ks,
        rules=_in_words(rules, columns),
        journal=data.Journal(torn=scan.torn, tails=scan.tails, foreign=scan.foreign, duplicates=scan.duplicates, conflicts=scan.conflicts),
        groups=groups,
        histograms=make_histograms(tasks, columns),
    )
    return Profile(summary, tasks)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Many small objects are made and none of them forms a cycle: looking for cycles took a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _in_words(rules: Rules, columns: Columns) -> tuple[str, ...]:
    said = [
        "Only rollouts that worked have a reward. Failures and missing rollouts are counted beside them, never as a reward of 0.",
        "The headline of a group is the mean over its tasks, each counting once; figures over rollouts weigh each rollout the same.",
        f"A rollout is correct when its reward is {rules.pass_at:g} or more.",
        "pass@k: the chance that k of a task's n rollouts, drawn without replacement, hold a correct one, 1 - C(n-c,k)/C(n,k); "
        "best@k: the expected largest reward of k drawn. Both are unbiased.",
        "maj@k: the first k rollouts vote with their answers; same answer with another reward is another vote, no answer is no vote, "
        "winners that tie are averaged, nobody voting is 0. Datasets without any answer take no part.",
        "Tasks with fewer than k rollouts are left out of figures at k; each says how many tasks it used.",
        "Intervals are of 95 %: Wilson's for the pass rate of a task; for means over tasks Student's with tasks as clusters, "
        "none where tasks do not differ, cut at 0 and 1 where all rewards lie there.",
        "std is that of the sample (n - 1), and unknown for one rollout. Run i of avg-of-k is made of the i-th rollout of each task.",
    ]
    if columns.metrics_left_out:
        said.append(f"{columns.metrics_left_out} further metric values were left out: more than {len(columns.metrics)} names.")
    return tuple(said)
