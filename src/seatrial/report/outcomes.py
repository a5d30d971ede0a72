"""What every requested level came to, and the deliverables of a report, in the order of the fixed summary format.

- Each planned level has an outcome, and so has a result that no plan names. Nothing requested is left unmentioned.
- A recorded Pass counts only if the record itself supports it: a missed check, an unreached step or a vacuous run revokes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from seatrial.core.records import (
    Alteration,
    Baseline,
    BitComparison,
    BitDifference,
    CheckResult,
    Comparison,
    Deliverable,
    Finding,
    ImportProof,
    LevelResult,
    PlannedLevel,
    RepoState,
    SideResult,
    Trial,
)
from seatrial.core.specs import Level
from seatrial.core.text import first_few, number, shortened
from seatrial.core.verdict import Boundary, Verdict, worst

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
class LevelOutcome:
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


def outcomes(trial: Trial) -> tuple[LevelOutcome, ...]:
    """The outcome of every requested level, in the plan's order, then of results outside the plan."""
    found: list[LevelOutcome] = []
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
    return f"altered after it was recorded: {first_few(words, shown, ', and ')}"


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


def _judged(result: LevelResult) -> LevelOutcome:
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
    return LevelOutcome(result.number, result.name, result.title, verdict, reason, boundary, result)


def _without_result(trial: Trial, level: PlannedLevel) -> LevelOutcome:
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
    return LevelOutcome(level.number, level.name, level.title, verdict, reason, boundary)


def difference_words(found: BitDifference) -> str:
    """Where two runs first differ: `first differs at step 3, stage reward, in rewards: aa, on the base bb`."""
    place = [f"step {found.step}"] if found.step is not None else []
    place += [f"stage {found.stage}"] if found.stage else []
    place += [f"phase {found.phase}"] if found.phase not in ("run", ".") else []
    where = f" at {', '.join(place)}" if place else ""
    return f"first differs{where}, in {found.name}: {shortened(found.found, 40)}, on the base {shortened(found.expected, 40)}"


def bit_words(found: BitComparison) -> str:
    """One comparison in one line."""
    alone = "; the metrics alone were compared" if found.sources == ("metrics",) else ""
    if found.outcome == "identical":
        return f"identical to the base ({found.compared} values{alone})"
    if found.difference is None:
        return f"not compared bit by bit: {found.reason}"
    return f"{difference_words(found.difference)}{alone}"


NOT_REQUESTED: Literal["Not requested"] = "Not requested"
LOG = "run.log"
METRICS = "metrics.jsonl"
JUNIT = "junit.xml"
PROBE = "probe/probe.json"
_SHOWN_MISSES = 10
_SHOWN_CHECKS = 4


def deliverables(
    trial: Trial, loop_title: str, run_dir: Path, ladder: Sequence[Level], levels: Sequence[LevelOutcome]
) -> tuple[Deliverable, ...]:
    """Every deliverable of the trial; `levels` are its outcomes, `ladder` all levels of the loop."""
    run = f"{loop_title} policy run"
    zero = [_level(trial, run, outcome) for outcome in levels if outcome.number == 0]
    lines = [*_change_side(trial, run_dir), _local_import(trial, loop_title)]
    lines += zero or [Deliverable(name=run, verdict=NOT_REQUESTED, proof="level 0 is not in the plan")]
    lines += [_level(trial, f"Requested variants, {outcome.label}", outcome) for outcome in levels if outcome.number != 0]
    for outcome in levels:
        name, left = f"Requested variants, part of level {outcome.number}", outcome.result.left_out if outcome.result else ()
        lines += [Deliverable(name=name, verdict=Verdict.SKIPPED, proof=why) for why in left]
    others = [level for level in ladder if (level.number, level.name) not in {(o.number, o.name) for o in levels}]
    if others:
        names = "; ".join(f"level {level.number} ({level.title})" for level in others)
        lines.append(Deliverable(name="Requested variants, other levels", verdict=NOT_REQUESTED, proof=f"not in the plan: {names}"))
    lines.append(_capture(run_dir, ladder, levels))
    return tuple(lines)


def requested(lines: Sequence[Deliverable]) -> list[tuple[Deliverable, Verdict]]:
    """The deliverables that were asked for, with their verdicts."""
    return [(line, line.verdict) for line in lines if isinstance(line.verdict, Verdict)]


def level_directory(outcome: LevelOutcome) -> str:
    """The level's directory, relative to the run directory."""
    return (outcome.result.directory if outcome.result else "") or f"levels/{outcome.key}"


def check_words(check: CheckResult) -> str:
    """One check with what it measured: `mean(data["train/loss"]) < 1.05 (measured 0.3)`."""
    wanted = f", wanted {check.threshold}" if check.threshold and check.threshold not in check.name else ""
    return f"{check.name} (measured {number(check.value)}{wanted})"


def side_verdict(side: SideResult, run_dir: Path) -> tuple[Verdict, str]:
    """The verdict on the tests of one repository; a recorded Pass without its evidence is taken back."""
    if side.verdict is not Verdict.PASS:
        return side.verdict, side.reason
    if side.failed or side.errors:
        return Verdict.FAIL, f"recorded as Pass, but {side.failed + side.errors} {_counted(side)}s failed"
    if not side.passed:
        return Verdict.BLOCKED, f"recorded as Pass, but no {_counted(side)} passed"
    left = PROBE if side.kind == "probe" else JUNIT
    gaps = [f"{name} is {state}" for name in (LOG, left) if (state := _file_state(run_dir / side.directory / name))]
    return (Verdict.FAIL, f"recorded as Pass, but in {side.directory} {', '.join(gaps)}") if gaps else (Verdict.PASS, side.reason)


def _counted(side: SideResult) -> str:
    """What its counts count."""
    return "rung" if side.kind == "probe" else "test"


def _change_side(trial: Trial, run_dir: Path) -> list[Deliverable]:
    if not trial.sides:
        proof = "no tests of the change were run: the loop knows of none, or they were left out; run them in its repository"
        if trial.status != "done" and not trial.levels:  # they go before the levels
            proof = f"no test of the change came to its end before the trial was cut off (status: {trial.status})"
        return [Deliverable(name="Change-side checks", verdict=NOT_REQUESTED, proof=proof)]
    made = []
    for side in trial.sides:
        verdict, reason = side_verdict(side, run_dir)
        where = [f"boundary: {side.boundary}"] if side.boundary else []
        parts = [
            reason,
            *where,
            *side.notes,
            *([NOT_EVIDENCE] if verdict is Verdict.BLOCKED else []),
            *_against(trial, side.name, side.own.verdict if side.own else verdict),
        ]
        made.append(Deliverable(name=side.name, verdict=verdict, proof="; ".join(part.rstrip(".") for part in parts)))
    return made


def _against(trial: Trial, name: str, verdict: Verdict) -> list[str]:
    """What the baseline says of a deliverable."""
    found = compared(trial, name, verdict)
    if found is None or trial.baseline is None:
        return []
    return [f"against the {side_name(trial.baseline)}: {found.word}" + (f" ({found.note})" if found.note else "")]


def _local_import(trial: Trial, loop_title: str) -> Deliverable:
    name = f"Local import in {loop_title}"
    if not trial.plan.changes:
        return Deliverable(name=name, verdict=NOT_REQUESTED, proof="no change was given; the environment's own packages were used")
    if not trial.plan.levels:
        return Deliverable(name=name, verdict=NOT_REQUESTED, proof="no level was to run")
    proofs = [proof for proof in trial.imports if proof.expected is not None]
    wrong = [proof for proof in proofs if not proof.ok]
    if wrong:
        broken = all(proof.file is None for proof in wrong) and trial.verdict is not Verdict.BLOCKED
        verdict = Verdict.FAIL if broken else Verdict.BLOCKED
        words = "; ".join(_import_words(proof) for proof in wrong)
        return Deliverable(name=name, verdict=verdict, proof=words + ("" if broken else f"; {NOT_EVIDENCE}, nor for it"))
    unproven = [words for repo in trial.plan.changes for words in _unproven(repo, proofs)]
    if unproven:
        return Deliverable(name=name, verdict=Verdict.BLOCKED, proof=f"{'; '.join(unproven)}; {NOT_EVIDENCE}, nor for it")
    return Deliverable(name=name, verdict=Verdict.PASS, proof="; ".join(_import_groups(proofs)))


def _import_groups(proofs: Sequence[ImportProof]) -> list[str]:
    """One text per package and file, with the processes that imported it and those that only would have."""
    places: dict[tuple[str, str | None], dict[str, bool]] = {}
    for proof in proofs:
        processes = places.setdefault((proof.package, proof.file), {})
        processes[proof.process] = processes.get(proof.process, False) or proof.method == "imported"
    return [
        f"{package} {f'from {file}' if file else 'not found'} ({_processes(processes)})" for (package, file), processes in places.items()
    ]


def _processes(processes: Mapping[str, bool]) -> str:
    imported = [name for name, real in processes.items() if real]
    found = [name for name, real in processes.items() if not real]
    parts = [f"imported by {', '.join(imported)}"] if imported else []
    return "; ".join([*parts, *([f"only found by {', '.join(found)}"] if found else [])])


def _import_words(proof: ImportProof) -> str:
    where = f"{proof.process}: {proof.package} from {proof.file}" if proof.file else f"{proof.process}: {proof.package} cannot be imported"
    if not proof.ok:
        return f"{where}, expected from {proof.expected}"
    return where + (" (found, not imported)" if proof.method == "found" else "")


def _unproven(repo: RepoState, proofs: Sequence[ImportProof]) -> list[str]:
    if not repo.packages:
        return [f"{repo.name} provides no Python package, so nothing proves that the loop used it"]
    seen = {proof.package for proof in proofs}
    return [f"no process reported from where it imported {package}" for package in repo.packages if package not in seen]


def _level(trial: Trial, name: str, outcome: LevelOutcome) -> Deliverable:
    parts = [f"{outcome.title}: {outcome.reason}" if outcome.number == 0 else outcome.reason]
    if outcome.result is not None:
        parts += _measured(outcome.result)
    if outcome.verdict is Verdict.BLOCKED:
        parts.append(NOT_EVIDENCE)
    own = outcome.result.own if outcome.result else None
    parts += _against(trial, outcome.label, own.verdict if own else outcome.verdict)
    if trial.baseline is not None and outcome.result is not None:
        parts += [bit_words(found) for found in trial.baseline.bits if found.level == outcome.number]
    return Deliverable(name=name, verdict=outcome.verdict, proof="; ".join(part.rstrip(".") for part in parts))


def _measured(result: LevelResult) -> list[str]:
    """Step and check counts with values: every miss, or the first hits; and where a failure sits."""
    parts = []
    if result.steps_expected is not None:
        parts.append(f"{result.steps_reached or 0}/{result.steps_expected} steps")
    if result.checks:
        missed = [check for check in result.checks if not check.passed]
        stages = dict.fromkeys(check.stage for check in result.checks if check.stage)
        if stages and not missed:
            parts.append(f"every step recomputed without the change: {', '.join(stages)}")
        shown = missed[:_SHOWN_MISSES] or [check for check in result.checks if not check.stage][:_SHOWN_CHECKS]
        left = len(missed or result.checks) - len(shown)
        values = ", ".join(check_words(check) for check in shown) + (f", and {left} more" if left else "")
        count = f"{len(missed)} of {len(result.checks)} checks missed" if missed else f"{len(shown) + left}/{len(result.checks)} checks met"
        parts.append(f"{count}: {values}")
    if result.boundary is not None:
        parts.append(f"boundary: {result.boundary}")
    return parts


def _capture(run_dir: Path, ladder: Sequence[Level], levels: Sequence[LevelOutcome]) -> Deliverable:
    name = "Metrics and log capture"
    started = [(outcome, outcome.result) for outcome in levels if outcome.result is not None and ran(outcome.result)]
    if not started:
        blocked = any(outcome.verdict is Verdict.BLOCKED for outcome in levels)
        return Deliverable(name=name, verdict=Verdict.BLOCKED if blocked else Verdict.SKIPPED, proof="no level was started")
    specs = {(level.number, level.name): len(level.checks) for level in ladder}
    verdicts, words = [], []
    for outcome, result in started:
        gaps = _gaps(run_dir / level_directory(outcome), result, specs.get((outcome.number, outcome.name), 0))
        # What a Blocked level could not write is part of its block; anywhere else missing evidence cannot exclude the change.
        verdicts.append(Verdict.PASS if not gaps else Verdict.BLOCKED if outcome.verdict is Verdict.BLOCKED else Verdict.FAIL)
        files = f"{level_directory(outcome)}/{LOG} and {METRICS}"
        words.append(f"{files}: {', '.join(gaps)}" if gaps else f"{files}, {len(result.checks)} checks evaluated")
    return Deliverable(name=name, verdict=worst(verdicts), proof="; ".join(words))


def _gaps(directory: Path, result: LevelResult, specs: int) -> list[str]:
    gaps = [f"{name} is {state}" for name in (LOG, METRICS) if (state := _file_state(directory / name))]
    evaluated = sum(check.kind == "expression" for check in result.checks)
    if not result.checks:
        gaps.append("no check was evaluated")
    elif evaluated < specs:
        gaps.append(f"{evaluated} of {specs} checks of the level were evaluated")
    return gaps


def _file_state(path: Path) -> str:
    """What is wrong with an evidence file; empty when it is there and has content."""
    if not path.is_file():
        return "missing"
    return "" if path.stat().st_size else "empty"
