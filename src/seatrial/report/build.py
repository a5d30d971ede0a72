"""The report of a trial (result, deliverables, evidence, limitations, follow-ups), its summary.md, its four files and its JSON Schemas.

- `build_report` is a function of the trial record and of which evidence files exist; it writes nothing.
- Evidence names every repository's exact state, the command, the environment, the decisive lines and the times. Limitations say what a
  reader must not conclude. Follow-ups say what to do next.
- summary.md answers "did the requested deliverables pass?" in its first line.
- `write_reports` writes each of the four reports atomically, all from the same report.
- The files under `schemas/` are shipped for consumers; a test holds them equal to what `schemas` generates.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from seatrial.core.files import write_json, write_text
from seatrial.core.records import (
    SCHEMA_VERSION,
    TRIAL_VERSION,
    Baseline,
    BitComparison,
    Deliverable,
    LevelResult,
    Record,
    Report,
    RepoState,
    Trial,
    replace,
)
from seatrial.core.series import Metrics
from seatrial.core.specs import Level
from seatrial.core.text import first_few, unique
from seatrial.core.verdict import Boundary, Verdict, worst
from seatrial.report.ci import junit_xml
from seatrial.report.html import report_html
from seatrial.report.markdown import prose
from seatrial.report.outcomes import (
    NOT_EVIDENCE,
    LevelOutcome,
    altered_words,
    bit_words,
    compared,
    deliverables,
    known_issues,
    outcomes,
    requested,
    side_name,
    stoppers,
)
from seatrial.triage.advice import Situation, advise

_KEY_PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "datasets", "vllm", "sglang", "ray"),
    *("megatron-core", "megatron-bridge", "deepspeed", "numpy"),
)
_SHOWN_PATHS = 20
_TODO = {
    Verdict.FAIL: "find the cause in {}/run.log",
    Verdict.BLOCKED: "remove what blocks them, then resume the trial",
    Verdict.SKIPPED: "run the tests of that repository by hand",
}
"""About tests before the levels that did not pass."""


def evidence(trial: Trial, levels: Sequence[LevelOutcome]) -> tuple[str, ...]:
    """What was run, on what, and what it said."""
    lines = [_repository(repo) for repo in trial.plan.changes]
    if all(repo.companion for repo in trial.plan.changes):
        lines.append("Change: none; the packages of the environment were used")
    lines.append(f"Command: {shlex.join(trial.command)}")
    if trial.plan.options:
        lines.append(f"Options: {', '.join(f'{name}={value}' for name, value in trial.plan.options.items())}")
    if trial.plan.arguments:
        lines.append(f"Loop arguments: {shlex.join(trial.plan.arguments)}")
    lines.append(_environment(trial))
    lines += [f"{side.name}: {shlex.join(side.command)} (log in {side.directory})" for side in trial.sides if side.command]
    lines += [f"Preflight: {finding.name}: {finding.message}" for finding in trial.findings if not finding.ok]
    for outcome in levels:
        if outcome.result is not None:
            lines.append(f"Key lines of level {outcome.number}: {'; '.join(_key_lines(outcome.result)) or 'none'}")
            lines += [f"Known issue {text}" for text in known_issues(trial, outcome.result)]
    if trial.baseline is not None:
        lines.append(_baseline(trial.baseline))
    lines.append(_time(trial, levels))
    return unique(lines)


def limitations(trial: Trial, levels: Sequence[LevelOutcome]) -> tuple[str, ...]:
    """What must not be concluded, from the levels first and then from where they ran."""
    lines = _by_level((o.number, text) for o in levels if o.result for text in o.result.limitations)
    noise = [(o.number, text) for o in levels if o.result and o.result.diagnosis for text in o.result.diagnosis.noise]
    lines += _by_level((level, f"residual log noise: {text}") for level, text in noise)
    if trial.plan.unmatched:
        lines.append(f"no level names these changed paths, the default levels stand in for them: {_paths(trial.plan.unmatched)}")
    located = {(proof.package, proof.process) for proof in trial.imports if proof.expected and proof.method == "found"}
    located -= {(proof.package, proof.process) for proof in trial.imports if proof.method == "imported"}
    for package in sorted({package for package, _ in located}):
        processes = ", ".join(sorted(process for name, process in located if name == package))
        lines.append(f"{package} was located in {processes}, not proven by a real import there")
    for repo in trial.plan.changes:
        states = [f"{module.path} {module.state}" for module in repo.submodules if module.state != "clean"]
        if states:
            lines.append(f"submodules of {repo.name} are not at the recorded commit: {', '.join(states)}")
        if repo.dirty and repo.patch is None:
            lines.append(f"{repo.name} has changes that no commit holds, and no patch of them was kept")
    if trial.baseline is not None:
        lines += [f"{'base' if trial.baseline.origin == 'base' else 'baseline'}: {note}" for note in trial.baseline.notes]
        lines += _bit_limits(trial)
    if trial.environment is None:
        lines.append("the environment was not recorded")
    elif not trial.environment.lock:
        lines.append("the environment was not built from a lock; another machine may hold other packages")
    if trial.environment is not None and not trial.environment.gpus:
        lines.append("no GPU was used; nothing here covers GPU kernels, memory or communication")
    lines += [altered_words(trial.alterations, _SHOWN_PATHS)] if trial.alterations else []
    return unique(lines)


def _bit_limits(trial: Trial) -> list[str]:
    """What a bit comparison does not show."""
    bits = trial.baseline.bits if trial.baseline else ()
    alone = [str(one.level) for one in bits if one.sources == ("metrics",)]
    told = f"level {', '.join(alone)}: only logged metrics were compared with the base: what moves none of them is not seen"
    lines = [told] if alone else []
    differs = any(one.outcome == "differs" for one in bits)
    if differs and trial.environment and trial.environment.gpus:
        lines.append("a run on a GPU is not known to repeat bit by bit: a difference from the base may be the machine's")
    return lines


def follow_ups(trial: Trial, levels: Sequence[LevelOutcome]) -> tuple[str, ...]:
    """What to do next; empty when there is nothing."""
    fixes = [finding for finding in trial.findings if not finding.ok and finding.fix]
    lines = [f"fix {finding.name}: {finding.fix}" for finding in fixes]
    told_already = {finding.fix for finding in fixes}
    lines += _by_level((o.number, text) for o in levels if o.result for text in o.result.follow_ups if text not in told_already)
    lines += [
        f"level {o.number}: {o.result.diagnosis.advice}" for o in levels if o.result and o.result.diagnosis and o.result.diagnosis.advice
    ]
    lines += _by_level((o.number, f"known issue {text}") for o in levels if o.result for text in known_issues(trial, o.result))
    lines += _pre_existing(trial, levels)
    waiting = bool(stoppers(trial))
    for side in () if waiting else trial.sides:
        lines += [f"{side.name}: {_TODO[side.verdict].format(side.directory)}"] if side.verdict in _TODO else []
    for outcome in levels:
        told = outcome.result is not None and (outcome.result.follow_ups or (outcome.result.diagnosis and outcome.result.diagnosis.advice))
        if outcome.verdict is Verdict.SKIPPED and trial.status == "done":
            lines.append(f"run level {outcome.number} ({outcome.title}): {outcome.reason}")
        elif outcome.verdict in (Verdict.FAIL, Verdict.BLOCKED) and not told and not waiting:
            lines += _next_step(outcome, trial)
    if waiting:
        lines.append("run the trial again once the preflight passes")
    elif trial.status != "done":
        lines.append("resume the trial, or run it again")
    return unique(lines)


def _pre_existing(trial: Trial, levels: Sequence[LevelOutcome]) -> list[str]:
    """Failures that the baseline has, too."""
    owns = [outcome.result.own if outcome.result else None for outcome in levels]
    names = [(outcome.label, own.verdict if own else outcome.verdict) for outcome, own in zip(levels, owns, strict=True)]
    names += [(side.name, side.own.verdict if side.own else side.verdict) for side in trial.sides]
    found = [one for name, verdict in names if (one := compared(trial, name, verdict)) and one.word == "fail (pre-existing)"]
    return [f"{one.deliverable}: pre-existing{': not evidence against the change' if one.excuses else ''} ({one.note})" for one in found]


def _next_step(outcome: LevelOutcome, trial: Trial) -> list[str]:
    """What to do about a level that says no more than its verdict."""
    result, interrupted = outcome.result, trial.status != "done"
    if interrupted and outcome.verdict is Verdict.BLOCKED:
        return []  # resuming is what there is to do, and is said once
    boundary = (result.boundary if result else None) or Boundary.ENVIRONMENT
    fault = trial.baseline is not None and trial.baseline.absent == "fault"
    situation = Situation(
        boundary=boundary,
        verdict=outcome.verdict,
        loop=trial.plan.loop,
        level=outcome.number,
        run=f"trials/{trial.id}",
        changes=tuple(f"{repo.name}={repo.path}" for repo in trial.plan.changes if not repo.companion),
        options=trial.plan.options,
        model=trial.plan.model,
        arguments=trial.plan.arguments,
        compared=trial.baseline is not None and trial.baseline.absent is None,
        fault="of --fault" if fault else None,
    )
    return [f"level {outcome.number}: {text}" for text in advise(situation)]


def _paths(paths: Sequence[str]) -> str:
    return first_few(paths, _SHOWN_PATHS, ", and ")


def _repository(repo: RepoState) -> str:
    state = "clean" if not repo.dirty else f"dirty: {_paths(repo.dirty)}" + (f" (patch: {repo.patch})" if repo.patch else "")
    modules = ", ".join(f"{module.path} at {module.commit}" for module in repo.submodules)
    where = repo.branch or "detached HEAD"
    return f"{repo.name} repo: {repo.commit} ({where}), {state}" + (f"; submodules: {modules}" if modules else "")


def _baseline(baseline: Baseline) -> str:
    states = ", ".join(f"{repo.name} {repo.commit[:12]}{' (dirty)' if repo.dirty else ''}" for repo in baseline.changes)
    name = side_name(baseline)
    name = name[0].upper() + name[1:]
    if baseline.absent is not None:
        return f"Base: none ({baseline.absent})"
    words = [f"{one.deliverable}: {one.word}" for one in baseline.comparisons] or ["not run yet"]
    words += [f"level {one.level}: {bit_words(one)}" for one in baseline.bits]
    words += [f"reused from the cache: level {', '.join(map(str, baseline.reused))}"] if baseline.reused else []
    where = f", run directory {baseline.directory}" if baseline.directory else ""
    shown = f" ({states})" if states and baseline.origin != "base" else ""
    return f"{name}{shown}{where}: {'; '.join(words)}"


def _environment(trial: Trial) -> str:
    environment = trial.environment
    if environment is None:
        return "Environment: not recorded, the trial stopped before it was read"
    names = [name for name in (trial.plan.loop, *_KEY_PACKAGES) if name in environment.packages]
    packages = ", ".join(f"{name} {environment.packages[name]}" for name in dict.fromkeys(names)) or "none of the usual packages"
    origin = f"lock {environment.lock[:12]}" if environment.lock else "not from a lock"
    devices = ", ".join(environment.gpus) or "no GPU"
    machine = f"{environment.platform}, {environment.cpu_count} CPUs, {devices}".lstrip(", ")
    return (
        f"Environment: Python {environment.python_version} ({environment.python}), fingerprint {environment.fingerprint[:12]}, {origin}; "
        f"{packages}, {len(environment.packages)} packages in all; {machine}"
    )


def _key_lines(result: LevelResult) -> list[str]:
    lines = list(result.key_lines)
    if result.diagnosis is not None and result.diagnosis.cause:
        diagnosis = result.diagnosis
        where = ":".join(str(part) for part in (diagnosis.file, diagnosis.line) if part is not None)
        lines.insert(0, f"first error: {diagnosis.cause}" + (f" ({where})" if where else ""))
    if result.steps_expected is not None:
        lines.append(f"{result.steps_reached or 0}/{result.steps_expected} steps completed")
    claims = [check for check in result.checks if check.passed and check.boundary is Boundary.CONFIG]
    lines += [f"{check.name}: {check.message or check.value}" for check in claims]
    if result.checks:
        lines.append(f"{sum(check.passed for check in result.checks)}/{len(result.checks)} checks met")
    return lines


def _time(trial: Trial, levels: Sequence[LevelOutcome]) -> str:
    spans = [
        f"level {o.number} {o.result.seconds:.0f} s ({o.result.cpu_seconds:.0f} CPU s)" for o in levels if o.result and o.result.seconds
    ]
    return f"Time: {trial.created} to {trial.ended or 'not ended'}" + (f"; {', '.join(spans)}" if spans else "")


def _by_level(texts: Iterable[tuple[int, str]]) -> list[str]:
    """`level 0, 1: text`, each text once with the levels that said it."""
    levels: dict[str, list[int]] = {}
    for level, text in texts:
        levels.setdefault(text, []).append(level)
    return [f"level {', '.join(map(str, dict.fromkeys(numbers)))}: {text}" for text, numbers in levels.items() if text.strip()]


def build_report(trial: Trial, loop_title: str, run_dir: Path, ladder: Sequence[Level]) -> Report:
    """The report of `trial` as it stands; `ladder` is every level of its loop."""
    levels = outcomes(trial)
    names = ", ".join(outcome.label for outcome in levels) or "no level"
    arguments = f"; loop arguments: {' '.join(trial.plan.arguments)}" if trial.plan.arguments else ""
    lines = deliverables(trial, loop_title, run_dir, ladder, levels)
    result = worst([trial.verdict or Verdict.BLOCKED, *(verdict for _, verdict in requested(lines))])
    return Report(
        result=result,
        answer=_answer(trial, result, levels, lines),
        requested_coverage=f"{loop_title} {names}{arguments}",
        model=trial.plan.model,
        deliverables=lines,
        evidence=evidence(trial, levels),
        limitations=limitations(trial, levels),
        follow_ups=follow_ups(trial, levels),
        trial=replace(trial, seal=""),  # it seals trial.json alone
    )


def _answer(trial: Trial, result: Verdict, levels: Sequence[LevelOutcome], lines: Sequence[Deliverable]) -> str:
    """One sentence that says whether the requested deliverables passed."""
    against = _against(trial)
    if result is Verdict.PASS:
        changes = ", ".join(f"{repo.name} {repo.commit[:12]}{' (dirty)' if repo.dirty else ''}" for repo in trial.plan.changes)
        where = f"with {changes}" if changes else "without a change"
        return f"every requested deliverable passed {where}: {', '.join(outcome.label for outcome in levels)}{against}."
    words = _why(trial, result, levels, lines).rstrip(".") + against
    return f"{words}; {NOT_EVIDENCE}." if result is Verdict.BLOCKED and NOT_EVIDENCE not in words else f"{words}."


def _against(trial: Trial) -> str:
    """What differs from the baseline, in a few words; nothing without one."""
    if trial.baseline is None or not trial.baseline.comparisons:
        return ""
    words = [f"{one.deliverable} {one.word}" for one in trial.baseline.comparisons if one.word != "pass"]
    bits = [f"level {one.level} {_bits(one)}" for one in trial.baseline.bits if one.outcome != "not comparable"]
    return f"; against the {side_name(trial.baseline)}: {', '.join([*(words or ['pass on both sides']), *bits])}"


def _bits(found: BitComparison) -> str:
    if found.difference is None:
        return found.outcome
    step, stage = found.difference.step, found.difference.stage
    return "differs" + (f" from step {step}" if step is not None else "") + (f", stage {stage}" if stage else "")


def _why(trial: Trial, result: Verdict, levels: Sequence[LevelOutcome], lines: Sequence[Deliverable]) -> str:
    level = next((outcome for outcome in levels if outcome.verdict is result), None)
    line = next((line for line, verdict in requested(lines) if verdict is result), None)
    if trial.verdict is result and trial.reason:
        return trial.reason
    if level is not None:
        cause = f"{level.label} is {result}{f' at {level.boundary}' if level.boundary else ''}: {level.reason}"
    elif line is not None:
        cause = f"{line.name} is {result}: {line.proof}"
    else:
        cause = trial.reason or "it was interrupted or is still running"
    if trial.verdict is None:
        return f"the trial has no verdict (status: {trial.status}): {cause}"
    return cause if trial.verdict is result else f"the trial recorded {trial.verdict}, but {cause}"


def summary_md(report: Report) -> str:
    """The summary; recorded texts are no markup, and stay on one line each, so that none can imitate a heading."""
    head = [
        f"Result: {report.result} - {prose(report.answer)}",
        f"Requested coverage: {prose(report.requested_coverage)}",
        f"Model: {prose(report.model)}",
    ]
    sections = (
        ("Deliverables", (f"{line.name}: {line.verdict} - {line.proof}" for line in report.deliverables)),
        ("Evidence", report.evidence),
        ("Limitations", report.limitations),
        ("Follow-ups", report.follow_ups),
    )
    return "\n\n".join(["\n".join(head), *(_section(title, bullets) for title, bullets in sections)]) + "\n"


def _section(title: str, bullets: Iterable[str]) -> str:
    lines = [f"- {prose(bullet)}" for bullet in bullets] or ["- none"]
    return "\n".join([f"{title}:", *lines])


SUMMARY, JSON, JUNIT, HTML = "summary.md", "report.json", "junit.xml", "report.html"


def write_reports(run_dir: Path, trial: Trial, loop_title: str, ladder: Sequence[Level], metrics_by_level: Mapping[str, Metrics]) -> Report:
    """Build the report of `trial` and write summary.md, report.json, junit.xml and report.html into `run_dir`.

    `metrics_by_level` has the metrics of each level under `<number>-<name>`, the name of its directory.
    Everything is rendered before anything is written: an error leaves the earlier reports as they were.
    """
    report = build_report(trial, loop_title, run_dir, ladder)
    texts = {SUMMARY: summary_md(report), JUNIT: junit_xml(report), HTML: report_html(report, metrics_by_level)}
    write_json(run_dir / JSON, report)
    for name, text in texts.items():
        write_text(run_dir / name, text)
    return report


DIRECTORY = Path(__file__).parent / "schemas"
_KINDS: dict[str, type[Record]] = {"report": Report, "trial": Trial}


def schemas() -> dict[str, str]:
    """The text of every shipped schema, by file name."""
    return {f"{name}.schema.json": schema_text(name, kind, version=TRIAL_VERSION) for name, kind in _KINDS.items()}


def schema_text(
    name: str, kind: type[Record], mode: Literal["serialization", "validation"] = "serialization", version: int = SCHEMA_VERSION
) -> str:
    """The schema of a file; `validation` where keys that were not said may be absent."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:seatrial:{name}:{version}"}
    return json.dumps(head | kind.model_json_schema(mode=mode), indent=2, ensure_ascii=False) + "\n"
