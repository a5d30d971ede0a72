"""Evidence, limitations and follow-ups of a report, one text per bullet.

- Evidence names every repository's exact state, the command, the environment, the decisive lines and the times.
- Limitations say what a reader must not conclude; equal ones of several levels become one.
- Follow-ups say what to do next; every level that is not a Pass has at least one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from seatrial.model.advice import Situation, advise
from seatrial.model.record import Baseline, EnvironmentRecord, LevelResult, RepoState, Trial
from seatrial.model.verdict import Boundary, Verdict
from seatrial.report.bits import bit_words
from seatrial.report.outcome import Outcome, altered_words, compared, known_issues, side_name, stoppers
from seatrial.report.text import unique

_KEY_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "vllm",
    "sglang",
    "ray",
    "megatron-core",
    "megatron-bridge",
    "deepspeed",
    "numpy",
)
_SHOWN_PATHS = 20


def evidence(trial: Trial, levels: Sequence[Outcome]) -> tuple[str, ...]:
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


def limitations(trial: Trial, levels: Sequence[Outcome]) -> tuple[str, ...]:
    """What must not be concluded, from the levels first and then from where they ran."""
    lines = _by_level((o.number, text) for o in levels if o.result for text in o.result.limitations)
    noise = [(o.number, text) for o in levels if o.result and o.result.diagnosis for text in o.result.diagnosis.noise]
    lines += _by_level((level, f"residual log noise: {text}") for level, text in noise)
    if trial.plan.unmatched:
        lines.append(f"no level names these changed paths, the default levels stand in for them: {_some(trial.plan.unmatched)}")
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
    lines += _environment_limits(trial.environment)
    lines += [altered_words(trial.alterations, _SHOWN_PATHS)] if trial.alterations else []
    return unique(lines)


def _bit_limits(trial: Trial) -> list[str]:
    """What a bit comparison does not show."""
    bits = trial.baseline.bits if trial.baseline else ()
    alone = [str(one.level) for one in bits if one.sources == ("metrics",)]
    lines = (
        [f"level {', '.join(alone)}: only logged metrics were compared with the base: what moves none of them is not seen"] if alone else []
    )
    differs = any(one.outcome == "differs" for one in bits)
    if differs and trial.environment and trial.environment.gpus:
        lines.append("a run on a GPU is not known to repeat bit by bit: a difference from the base may be the machine's")
    return lines


def follow_ups(trial: Trial, levels: Sequence[Outcome]) -> tuple[str, ...]:
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
    lines += [] if waiting else _of_sides(trial)
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


def _of_sides(trial: Trial) -> list[str]:
    """What to do about tests before the levels that did not pass."""
    todo = {
        Verdict.FAIL: "find the cause in {}/run.log",
        Verdict.BLOCKED: "remove what blocks them, then resume the trial",
        Verdict.SKIPPED: "run the tests of that repository by hand",
    }
    return [f"{side.name}: {todo[side.verdict].format(side.directory)}" for side in trial.sides if side.verdict in todo]


def _pre_existing(trial: Trial, levels: Sequence[Outcome]) -> list[str]:
    """Failures that the baseline has, too."""
    owns = [outcome.result.own if outcome.result else None for outcome in levels]
    names = [(outcome.label, own.verdict if own else outcome.verdict) for outcome, own in zip(levels, owns, strict=True)]
    names += [(side.name, side.own.verdict if side.own else side.verdict) for side in trial.sides]
    found = [one for name, verdict in names if (one := compared(trial, name, verdict)) and one.word == "fail (pre-existing)"]
    return [f"{one.deliverable}: pre-existing{': not evidence against the change' if one.excuses else ''} ({one.note})" for one in found]


def _next_step(outcome: Outcome, trial: Trial) -> list[str]:
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


def _repository(repo: RepoState) -> str:
    state = "clean" if not repo.dirty else f"dirty: {_some(repo.dirty)}" + (f" (patch: {repo.patch})" if repo.patch else "")
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


def _environment_limits(environment: EnvironmentRecord | None) -> list[str]:
    if environment is None:
        return ["the environment was not recorded"]
    lines = [] if environment.lock else ["the environment was not built from a lock; another machine may hold other packages"]
    return lines if environment.gpus else [*lines, "no GPU was used; nothing here covers GPU kernels, memory or communication"]


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


def _time(trial: Trial, levels: Sequence[Outcome]) -> str:
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


def _some(paths: Sequence[str]) -> str:
    more = f", and {len(paths) - _SHOWN_PATHS} more" if len(paths) > _SHOWN_PATHS else ""
    return ", ".join(paths[:_SHOWN_PATHS]) + more
