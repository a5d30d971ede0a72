"""What every requested level came to, including those that left no result.

- Each planned level gets an outcome; so does a result that no plan names. Nothing requested is left unmentioned.
- A recorded Pass is believed only if the record itself supports it: a missed check, an unreached step or a vacuous
  run takes it back, with the reason. This repeats the judge on purpose: a report must not be better than its evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.model.record import Alteration, Baseline, Comparison, Finding, LevelResult, PlannedLevel, Trial
from seatrial.model.verdict import Boundary, Verdict

NOT_EVIDENCE = "this is not evidence against the change"
DOUBT = "compare them before you excuse it"
"""Ends the note on a failure that was there before, but was not quite the same."""

RECORD = "trial.json"
ALTERED = {
    "changed": "changed",
    "removed": "is gone",
    "added": "was added",
    "linked": "is a link now",
    "edited": "was edited",
    "unrecorded": "has no digests",
}
OLDER = "an older Seatrial recorded this trial without digests, so nobody can tell whether its files are as they were"
_SHOWN_ALTERED = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """One level of a report: its verdict, why, and the stored result if there is one."""

    number: int
    name: str
    title: str
    verdict: Verdict
    reason: str
    boundary: Boundary | None = None
    result: LevelResult | None = None

    @property
    def key(self) -> str:
        """Names the level within a trial: `0-smoke`, as its directory does."""
        return f"{self.number}-{self.name}"

    @property
    def label(self) -> str:
        """`level 0 (GRPO smoke)`."""
        return f"level {self.number} ({self.title})"


def outcomes(trial: Trial) -> tuple[Outcome, ...]:
    """The outcome of every requested level, in the plan's order, then of results outside the plan."""
    found: list[Outcome] = []
    planned = {(level.number, level.name) for level in trial.plan.levels}
    for level in trial.plan.levels:
        results = [result for result in trial.levels if (result.number, result.name) == (level.number, level.name)]
        found.extend(_judged(result) for result in results)
        if not results:
            found.append(_without_result(trial, level))
    found.extend(_judged(result) for result in trial.levels if (result.number, result.name) not in planned)
    return tuple(found)


def altered_words(found: Sequence[Alteration], shown: int = _SHOWN_ALTERED) -> str:
    """What of a run directory was altered, in a few words."""
    if any(one.path == RECORD and one.code == "unrecorded" for one in found):
        return OLDER
    words = [f"{one.path} {ALTERED[one.code]}" for one in found]
    more = f", and {len(words) - shown} more" if len(words) > shown else ""
    return f"altered after it was recorded: {', '.join(words[:shown])}{more}"


def ran(result: LevelResult) -> bool:
    """Whether a process of the level was started. A Pass or Fail claims that one was."""
    return bool(result.phases) or result.verdict in (Verdict.PASS, Verdict.FAIL)


def stoppers(trial: Trial) -> tuple[Finding, ...]:
    """Failed preflight findings, when they kept every level from running."""
    if any(ran(result) for result in trial.levels):
        return ()
    return tuple(finding for finding in trial.findings if not finding.ok)


def compared(trial: Trial, name: str, verdict: Verdict) -> Comparison | None:
    """The deliverable beside the baseline's; none without a baseline, and none when it was made of another verdict."""
    comparisons = trial.baseline.comparisons if trial.baseline else ()
    return next((one for one in comparisons if one.deliverable == name and one.after is verdict), None)


def side_name(baseline: Baseline) -> str:
    """`base NAME 0123456789ab`, or `baseline origin/main`."""
    return f"{'base' if baseline.origin == 'base' else 'baseline'} {baseline.source}"


def known_issues(trial: Trial, result: LevelResult) -> tuple[str, ...]:
    """`ID: TEXT` of every upstream issue that explains this level: by its known failure, or by a missed check."""
    if result.verdict is Verdict.PASS:
        return ()
    names = [result.diagnosis.signature] if result.diagnosis else []
    names += [check.name for check in result.checks if not check.passed]
    issues = {_compact(name): text for name, text in trial.plan.known_issues.items()}
    return tuple(f"{name}: {issues[_compact(name)]}" for name in dict.fromkeys(names) if name and _compact(name) in issues)


def _compact(name: str) -> str:
    """The id of a known issue without what does not count in an expression: blanks, and which quotes it uses."""
    return "".join(name.split()).replace("'", '"')


def _judged(result: LevelResult) -> Outcome:
    verdict, reason, boundary = result.verdict, result.reason, result.boundary
    if verdict is Verdict.PASS:
        missed = next((check for check in result.checks if not check.passed), None)
        reached, expected = result.steps_reached, result.steps_expected
        if missed is not None:
            verdict, boundary = Verdict.FAIL, missed.boundary
            reason = f"recorded as Pass, but this check was missed: {missed.name}"
        elif expected is not None and (reached is None or reached < expected):
            verdict, boundary = Verdict.FAIL, boundary or Boundary.METRICS
            reason = f"recorded as Pass, but it reached {'no step' if reached is None else f'step {reached}'} of {expected}"
        elif result.vacuous:
            verdict = Verdict.BLOCKED
            reason = "recorded as Pass, but the run was vacuous: it could not have shown anything"
    return Outcome(result.number, result.name, result.title, verdict, reason, boundary, result)


def _without_result(trial: Trial, level: PlannedLevel) -> Outcome:
    blocked = stoppers(trial)
    verdict, boundary = Verdict.SKIPPED, None
    if level.skip:
        reason = level.skip
    elif blocked:
        verdict, boundary = Verdict.BLOCKED, blocked[0].boundary
        reason = f"not started, the preflight stopped it: {blocked[0].name}: {blocked[0].message}"
    elif trial.status != "done":
        reason = f"not run: the trial has not finished (status: {trial.status})"
    else:
        reason = "not run: the trial recorded no result for it"
    return Outcome(level.number, level.name, level.title, verdict, reason, boundary)
