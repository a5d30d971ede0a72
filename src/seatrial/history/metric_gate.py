"""The gate: does a run lie where the trusted runs before it lay?

- The reference of a metric: the last `last` trusted, unpoisoned runs before the run under test (by time, then number) with the same
  project, kind, name and machine. Runs of its own commit are never part of it: a commit that is run often would make its own band.
- A reference with a step or drift in it is no sample of one thing: at best Blocked, until a person marks the runs of the wrong side.
  So is a value that only outliers of the reference let in. Nothing is written.
- Outside the band, on either side: Fail, and the direction is said, since better than ever is as suspicious as worse.
- A value that is not finite, or a metric that the reference has and the run has not, also where it is text: Fail. A non-finite value in
  the reference: Blocked until that run is marked. Fewer than `fewest` runs: Blocked, since nothing was compared.
- A metric that is new, so that no reference run has it, is told as Skipped, and Blocked where it was asked for by name. It takes no
  part in the verdict of the whole, unless nothing else was compared: then that is Blocked.
- A run that failed is Fail, wherever its metrics lie; that nobody knows whether it passed is said.
- Times of tests are not judged unless they are asked for: those of short tests vary with whatever else the machine does. One that the
  run lacks is Fail all the same, since then the test did not run. What was left out is told; where nothing is left: Blocked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from seatrial.core.errors import UserError
from seatrial.core.text import counted
from seatrial.core.verdict import Verdict, worst
from seatrial.history.change_points import Change, TooFew, find_changes
from seatrial.history.importing import NOT_PASSED
from seatrial.history.store import UNKNOWN, RunValue, Store, StoredRun, Take
from seatrial.history.thresholds import ABSOLUTE, FEWEST_FOR_BAND, RATE, RELATIVE, SIGMAS, Band, band

LAST = 20
MOST = 0.5
"""A higher rate of false alarms would be a gate that nobody can pass."""
TIMES = "*/_elapsed"
"""How long each test took."""
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """How wide the bands are, and from how many runs."""

    sigmas: float = SIGMAS
    relative: float = RELATIVE
    absolute: float = ABSOLUTE
    rate: float = RATE
    last: int = LAST
    fewest: int = FEWEST_FOR_BAND
    take: Take = "last"

    def __post_init__(self) -> None:
        if not FEWEST_FOR_BAND <= self.fewest <= self.last:  # a person gives --last only
            raise UserError(
                f"a band needs {FEWEST_FOR_BAND} runs or more: at least {self.fewest} of the last {self.last} makes no sense", "--last 20"
            )
        if not 0 < self.rate <= MOST:
            raise UserError(f"--false-alarms {self.rate}: must lie between 0 and {MOST}", f"--false-alarms {RATE}")
        for name in ("sigmas", "relative", "absolute"):
            width = getattr(self, name)
            if not (math.isfinite(width) and width >= 0):
                raise UserError(f"--{name} {width}: must be a finite number of at least 0", f"--{name} {SIGMAS if name == 'sigmas' else 0}")

    def band(self, numbers: Sequence[float]) -> Band:
        return band(numbers, sigmas=self.sigmas, relative=self.relative, absolute=self.absolute, rate=self.rate)


def doubt(runs: Sequence[StoredRun], numbers: Sequence[float], value: float, settings: GateSettings, *, inside: bool) -> str:
    """Why the reference is in doubt, with what a person can do; or empty. A value inside its band must not pass then. A step or drift is
    told of any value, the rest only of one that is inside: it says why the band may be too wide. Fewer wild runs than make a step widen the
    band all the same: the value must lie in the band without them, too. Where the runs are too few to tell which are wild, in that of the
    first ones."""
    try:
        changes = find_changes(numbers, alarm=settings.rate)
    except TooFew:
        if not inside or settings.band(numbers[:FEWEST_FOR_BAND]).side(value) == "inside":
            return ""
        return (
            f"it lies outside the band of the first {FEWEST_FOR_BAND} of these runs, and so few cannot tell whether the later ones changed"
        )
    if lasting := [change for change in changes if change.kind != "outlier"]:
        return _changed(runs, lasting[-1])
    wild = {change.index for change in changes}
    steady = [number for index, number in enumerate(numbers) if index not in wild]
    if not inside or not wild or (len(steady) >= FEWEST_FOR_BAND and settings.band(steady).side(value) == "inside"):
        return ""
    names = " ".join(str(runs[index].id) for index in sorted(wild))
    return f"only outliers make the band so wide, runs {names}: take out those that are wrong, `seatrial history mark RUN --reason TEXT`"


def _changed(runs: Sequence[StoredRun], last: Change) -> str:
    """The step or drift of a reference, and the commands that take one side of a step out."""
    moved = f"{last.before:.6g} -> {last.after:.6g}"
    if last.kind == "drift":
        ends = f"from run {runs[last.index].id} to run {runs[last.end - 1].id}"
        return f"the reference itself drifts {ends}, {moved}: see `seatrial history trend`, and mark the runs that are wrong"
    before, first = runs[last.index - 1], runs[last.index]
    where = f"run {first.id}" + (f", commit {first.commit[:10]}" if first.commit else "")
    later, earlier = (f"`seatrial history mark {run.id} --and-{way} --reason TEXT`" for run, way in ((first, "later"), (before, "earlier")))
    return f"the reference itself changed at {where}, {moved}: decide which side is right, and take the other out: {later} or {earlier}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedMetric:
    metric: str
    verdict: Verdict
    value: float | None
    band: Band | None
    direction: Literal["inside", "above", "below", ""]
    why: str
    text: bool = False
    """It is text, here and in every reference run."""

    def line(self) -> str:
        return f"{self.verdict:<7} {self.metric}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    run: StoredRun
    judged: tuple[JudgedMetric, ...]
    left_out: tuple[str, ...] = ()
    """What was not judged, and why: a line each."""

    @property
    def verdict(self) -> Verdict:
        """The worst of what has a baseline; where nothing has, nothing was compared. A run that failed cannot pass."""
        if self.run.passed is False:
            return Verdict.FAIL
        compared = [judged.verdict for judged in self.judged if judged.verdict is not Verdict.SKIPPED]
        return worst(compared) if compared else Verdict.BLOCKED

    def lines(self) -> list[str]:
        """What failed first, then what is Blocked or new, then the rest."""
        order = (Verdict.FAIL, Verdict.BLOCKED, Verdict.SKIPPED, Verdict.PASS)
        found = [judged.line() for verdict in order[:2] for judged in self.judged if judged.verdict is verdict]
        found += [judged.line() for judged in self.judged if judged.verdict is Verdict.SKIPPED and not judged.text]
        texts = [judged for judged in self.judged if judged.text]
        if len(texts) > 1:
            names = ", ".join(judged.metric for judged in texts[:_SHOWN]) + (", …" if len(texts) > _SHOWN else "")
            found.append(f"{Verdict.SKIPPED:<7} {len(texts)} metrics are text, not numbers: nothing to compare: {names}")
        else:
            found += [judged.line() for judged in texts]
        found += [judged.line() for judged in self.judged if judged.verdict is Verdict.PASS]
        counts = ", ".join(f"{sum(judged.verdict is verdict for judged in self.judged)} {verdict}" for verdict in order)
        whole = f"{self.verdict}: {counts}" if self.judged else f"{self.verdict}: no metric to compare"
        whole = f"{whole}; the run itself failed" if self.run.passed is False else whole
        return [*self._outcome(), *found, *self.left_out, *self._alarms(), whole]

    def _outcome(self) -> list[str]:
        """What is known of the run itself, unless it passed."""
        if self.run.passed is None:
            return ["outcome unknown: the results do not say whether the run passed, so only its metrics are judged"]
        if self.run.passed:
            return []
        _, _, contradicts = self.run.why_untrusted.partition(f"{NOT_PASSED}: ")
        return [f"{Verdict.FAIL:<7} the run itself failed, wherever its metrics lie" + (f": {contradicts}" if contradicts else "")]

    def _alarms(self) -> list[str]:
        """What the bands are worth: the more metrics, the more of them fail by chance. Or why there may be none."""
        rates = [judged.band.rate for judged in self.judged if judged.band]
        if not rates:
            why = f"the results name no machine, so only runs of an {UNKNOWN} are their baselines: --machine names it"
            return [why] if self.run.machine == UNKNOWN else []
        expected = f"{sum(rates):.2g} false alarms expected over {counted(len(rates), 'metric')}"
        each = f"at most {max(rates):.2g} of good values outside a band, {expected}"
        return [f"false alarms, if values are normal: {each}; more where they have heavy tails"]


def judge_metric(
    metric: str, value: RunValue | None, reference: Sequence[RunValue], settings: GateSettings, *, asked: bool = False
) -> JudgedMetric:
    """One metric of the run under test against the same metric of the reference runs; pure."""

    def found(
        verdict: Verdict, why: str, made: Band | None = None, direction: Literal["inside", "above", "below", ""] = ""
    ) -> JudgedMetric:
        return JudgedMetric(metric=metric, verdict=verdict, value=value.value if value else None, band=made, direction=direction, why=why)

    only_text = all(past.mark == "text" for past in reference)
    if value is None:
        # text, too: nothing else may tell that what writes it did not run
        return found(Verdict.FAIL, f"missing: {'text ' if only_text else ''}of {counted(len(reference), 'reference run')}, not of this run")
    if value.mark == "text" and only_text:
        return replace(found(Verdict.SKIPPED, "is text, not a number: nothing to compare"), text=True)
    if value.mark or value.value is None or not math.isfinite(value.value):
        return found(Verdict.FAIL, f"has a value that is no finite number: {value.mark or value.value}")
    if not reference:
        return found(Verdict.BLOCKED if asked else Verdict.SKIPPED, "no baseline: no trusted run of another commit before this one has it")
    bad = [past for past in reference if past.mark or past.value is None or not math.isfinite(past.value)]
    if bad:
        what = f"reference run {bad[0].run.id} holds {bad[0].mark or bad[0].value}"
        return found(Verdict.BLOCKED, f"{what}: take it out with `seatrial history mark {bad[0].run.id} --reason TEXT`")
    numbers = [past.value for past in reference if past.value is not None]
    if len(numbers) < settings.fewest:
        return found(Verdict.BLOCKED, f"{counted(len(numbers), 'trusted run')}, {settings.fewest} are needed")
    made = settings.band(numbers)
    side = made.side(value.value)
    room = f"[{made.low:.6g}, {made.high:.6g}] (median {made.middle:.6g} of {made.count} runs, width by {made.why})"
    changed = doubt([past.run for past in reference], numbers, value.value, settings, inside=side == "inside")
    if side != "inside":
        return found(Verdict.FAIL, "; ".join(filter(None, (f"{value.value:.6g} lies {side} {room}", changed))), made, side)
    if changed:
        return found(Verdict.BLOCKED, f"{value.value:.6g} in {room}, but {changed}", made, side)
    return found(Verdict.PASS, f"{value.value:.6g} in {room}", made, side)


def gate_run(
    store: Store | None,
    run: StoredRun,
    values: Mapping[str, RunValue],
    settings: GateSettings,
    patterns: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Gate:
    """Judge a run that need not be in the store; without a store there is no baseline."""
    past = [store.of_run(before.id or 0, take=settings.take) for before in _baselines(store, run, settings.last)] if store else []
    names, left_out = _to_judge(sorted(set(values).union(*past)), values, patterns, exclude)
    judged = [
        judge_metric(name, values.get(name), [metrics[name] for metrics in past if name in metrics], settings, asked=bool(patterns))
        for name in names
    ]
    return Gate(run=run, judged=tuple(judged), left_out=tuple(left_out))


def _to_judge(
    names: Sequence[str], values: Mapping[str, RunValue], patterns: Sequence[str], exclude: Sequence[str]
) -> tuple[list[str], list[str]]:
    """The metrics that are judged, and a line for each reason why others are not."""
    found, lines = _matching(names, patterns) if patterns else list(names), list[str]()
    for pattern in exclude:
        out = {name for name in found if _takes(pattern, name)}
        found = [name for name in found if name not in out]
        lines.append(f"left out by --exclude {pattern!r}: {counted(len(out), 'metric')}")
    if not patterns and (times := {name for name in found if _takes(TIMES, name) and name in values}):
        found = [name for name in found if name not in times]
        lines.append(f"not judged: {counted(len(times), 'time')} of tests; to judge them: --metric {TIMES!r}")
    return found, lines


def _baselines(store: Store, run: StoredRun, last: int) -> list[StoredRun]:
    """The latest trusted, unpoisoned runs of the same identity and of other commits that are strictly before the run."""
    kept = store.by_digest(run.digest)
    if kept is not None:
        run = replace(run, id=kept.id)  # the file of a run that is kept has the number of that run
    runs = store.runs(project=run.project, kind=run.kind, name=run.name, machine=run.machine, trusted=True)
    # A short commit is the long one that begins so.
    own = run.commit
    others = [past for past in runs if not (own and past.commit and (own.startswith(past.commit) or past.commit.startswith(own)))]
    return [past for past in others if past.baseline and past.order < run.order][-last:]


def _takes(pattern: str, name: str) -> bool:
    """`*` and `?` stand for anything; `[` for itself, since keys of parametrised tests hold it."""
    return name == pattern or fnmatchcase(name, pattern.replace("[", "[[]"))


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Names that a pattern takes; a pattern that takes none is an error, since a typo would compare nothing."""
    names, found = list(names), set()
    for pattern in patterns:
        taken = {name for name in names if _takes(pattern, name)}
        if not taken:
            raise UserError(f"no metric of this run or of its baseline matches {pattern!r}", "seatrial history show '*' lists metrics")
        found |= taken
    return sorted(found)
