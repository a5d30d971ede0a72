"""The gate: does a run lie where the trusted runs before it lay?

- The reference of a metric: the last `last` trusted, unpoisoned runs before the run under test with the same project, kind, name and
  machine. The run itself is never part of it. Nothing is written.
- Outside the band, on either side: Fail, and the direction is said, since better than ever is as suspicious as worse.
- A value that is not finite, or a metric that the reference has and the run has not: Fail. A non-finite value in the reference: Blocked
  until that run is marked. Fewer than `fewest` runs: Blocked, since nothing was compared.
- A metric that is new, so that no reference run has it, is told as Skipped, and Blocked where it was asked for by name. It takes no
  part in the verdict of the whole, unless nothing else was compared: then that is Blocked.
- A run that failed is Fail, wherever its metrics lie; that nobody knows whether it passed is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from seatrial.model.errors import UserError
from seatrial.model.verdict import Verdict, worst
from seatrial.regress.history.numbers.bands import ABSOLUTE, FEWEST, RATE, RELATIVE, SIGMAS, Band, band
from seatrial.regress.history.record import Run, RunValue, Take
from seatrial.regress.history.store import Store

LAST = 20
MOST = 0.5
"""A higher rate of false alarms would be a gate that nobody can pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How wide the bands are, and from how many runs."""

    sigmas: float = SIGMAS
    relative: float = RELATIVE
    absolute: float = ABSOLUTE
    rate: float = RATE
    last: int = LAST
    fewest: int = FEWEST
    take: Take = "last"

    def __post_init__(self) -> None:
        if not FEWEST <= self.fewest <= self.last:  # a person gives --last only
            raise UserError(
                f"a band needs {FEWEST} runs or more: at least {self.fewest} of the last {self.last} makes no sense", "--last 20"
            )
        if not 0 < self.rate <= MOST:
            raise UserError(f"--false-alarms {self.rate}: must lie between 0 and {MOST}", f"--false-alarms {RATE}")
        for name in ("sigmas", "relative", "absolute"):
            width = getattr(self, name)
            if not (math.isfinite(width) and width >= 0):
                raise UserError(f"--{name} {width}: must be a finite number of at least 0", f"--{name} {SIGMAS if name == 'sigmas' else 0}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One metric."""

    metric: str
    verdict: Verdict
    value: float | None
    band: Band | None
    direction: Literal["inside", "above", "below", ""]
    why: str

    def line(self) -> str:
        """For a person."""
        return f"{self.verdict:<7} {self.metric}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """All metrics of one run."""

    run: Run
    judged: tuple[Judged, ...]

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
        found = [judged.line() for verdict in order for judged in self.judged if judged.verdict is verdict]
        counts = ", ".join(f"{sum(judged.verdict is verdict for judged in self.judged)} {verdict}" for verdict in order)
        whole = f"{self.verdict}: {counts}" if self.judged else f"{self.verdict}: no metric to compare"
        return [*self._outcome(), *found, *self._alarms(), f"{whole}; the run itself failed" if self.run.passed is False else whole]

    def _outcome(self) -> list[str]:
        """What is known of the run itself, unless it passed."""
        if self.run.passed is None:
            return ["outcome unknown: the results do not say whether the run passed, so only its metrics are judged"]
        return [] if self.run.passed else [f"{Verdict.FAIL:<7} the run itself failed, wherever its metrics lie"]

    def _alarms(self) -> list[str]:
        """What the bands are worth: the more metrics, the more of them fail by chance."""
        rates = [judged.band.rate for judged in self.judged if judged.band]
        if not rates:
            return []
        each = f"at most {max(rates):.2g} of good values outside a band, {sum(rates):.2g} false alarms expected over {len(rates)} metrics"
        return [f"false alarms, if values are normal: {each}; more where they have heavy tails"]


def judge(metric: str, value: RunValue | None, reference: Sequence[RunValue], settings: Settings, *, asked: bool = False) -> Judged:
    """One metric of the run under test against the same metric of the reference runs; pure."""

    def found(verdict: Verdict, why: str, made: Band | None = None, direction: Literal["inside", "above", "below", ""] = "") -> Judged:
        return Judged(metric=metric, verdict=verdict, value=value.value if value else None, band=made, direction=direction, why=why)

    if value is None:
        return found(Verdict.FAIL, f"missing: {len(reference)} reference runs have it, this run does not")
    texts = sum(past.mark == "text" for past in reference)
    if value.mark == "text" and texts == len(reference):
        return found(Verdict.SKIPPED, "is text, not a number: nothing to compare")
    if value.mark or value.value is None or not math.isfinite(value.value):
        return found(Verdict.FAIL, f"has a value that is no finite number: {value.mark or value.value}")
    if not reference:
        return found(Verdict.BLOCKED if asked else Verdict.SKIPPED, "no baseline: no trusted run before this one has it")
    bad = [past for past in reference if past.mark or past.value is None or not math.isfinite(past.value)]
    if bad:
        what = f"reference run {bad[0].run.id} holds {bad[0].mark or bad[0].value}"
        return found(Verdict.BLOCKED, f"{what}: take it out with `seatrial history mark {bad[0].run.id} --reason TEXT`")
    numbers = [past.value for past in reference if past.value is not None]
    if len(numbers) < settings.fewest:
        return found(Verdict.BLOCKED, f"{len(numbers)} trusted runs, {settings.fewest} are needed")
    made = band(numbers, sigmas=settings.sigmas, relative=settings.relative, absolute=settings.absolute, rate=settings.rate)
    side = made.side(value.value)
    room = f"[{made.low:.6g}, {made.high:.6g}] (median {made.middle:.6g} of {made.count} runs, width by {made.why})"
    if side == "inside":
        return found(Verdict.PASS, f"{value.value:.6g} in {room}", made, side)
    return found(Verdict.FAIL, f"{value.value:.6g} lies {side} {room}", made, side)


def gate(
    store: Store,
    key: int,
    *,
    patterns: Sequence[str] = (),
    last: int = LAST,
    take: Take = "last",
    sigmas: float = SIGMAS,
    relative: float = RELATIVE,
    absolute: float = ABSOLUTE,
    rate: float = RATE,
) -> Gate:
    """Judge the run of that number; with `patterns` only the metrics that they take."""
    settings = Settings(sigmas=sigmas, relative=relative, absolute=absolute, rate=rate, last=last, take=take)
    run = store.run(key)
    if run is None:
        raise UserError(f"no run {key} in {store.path}", "seatrial history runs lists them")
    return against(store, run, store.of_run(key, take=take), settings, patterns)


def against(store: Store, run: Run, values: Mapping[str, RunValue], settings: Settings, patterns: Sequence[str] = ()) -> Gate:
    """Judge a run that need not be in the store."""
    past = [store.of_run(before.id, take=settings.take) for before in _baselines(store, run, settings.last) if before.id is not None]
    names = sorted(set(values).union(*past))
    if patterns:
        names = _matching(names, patterns)
    judged = [
        judge(name, values.get(name), [metrics[name] for metrics in past if name in metrics], settings, asked=bool(patterns))
        for name in names
    ]
    return Gate(run=run, judged=tuple(judged))


def _baselines(store: Store, run: Run, last: int) -> list[Run]:
    """The latest trusted, unpoisoned runs of the same identity that are older; the run itself never among them."""
    runs = store.runs(project=run.project, kind=run.kind, name=run.name, machine=run.machine, trusted=True)
    older = [past for past in runs if past.baseline and past.digest != run.digest and past.id != run.id and past.time <= run.time]
    return older[-last:]


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Names that a pattern takes; a pattern that takes none is an error, since a typo would compare nothing."""
    names, found = list(names), set()
    for pattern in patterns:
        taken = {name for name in names if name == pattern or fnmatchcase(name, pattern.replace("[", "[[]"))}
        if not taken:
            raise UserError(f"no metric of this run or of its baseline matches {pattern!r}", "seatrial history show")
        found |= taken
    return sorted(found)
