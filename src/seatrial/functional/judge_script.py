"""The verdict on one script, and copies of the files it left."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shutil
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from seatrial.bisect.run_failures import machine_failures
from seatrial.checks.log_lines import finite, read_facts
from seatrial.checks.training_run import COMMON, Findings, examine
from seatrial.core.errors import UserError
from seatrial.core.files import write_bytes
from seatrial.core.guarded import parse_json
from seatrial.core.records import CheckResult, Diagnosis, replace
from seatrial.core.series import Metrics
from seatrial.core.text import counted, one_line
from seatrial.core.verdict import Boundary, Verdict
from seatrial.evidence.redact import Redactor
from seatrial.functional.plan_scripts import SAYS_PASSED, SAYS_SKIP, Ended, PlannedScript, ScriptResult
from seatrial.loops import get_loop
from seatrial.loops.nightly_scripts import Asserted
from seatrial.metrics.checks import CheckSyntaxError, evaluate, undamaged
from seatrial.metrics.read import read_run
from seatrial.triage.diagnose import STEPS, diagnose
from seatrial.triage.log import read_log

KEPT = ("*.log", "*.log.*", "*.json", "*.jsonl", "*.yaml", "*.txt", "*tfevents*", "*.csv")
TEXTS = (".log", ".json", ".jsonl", ".yaml", ".txt", ".csv")
LARGEST = 64 << 20
STRINGS = re.compile(r'("(?:[^"\\\n]|\\.)*")(?:(\s*:\s*)("(?:[^"\\\n]|\\.)*"))?')
"""The strings of JSON: alone, or as a name with its value."""
MOST_FILES = 2000


def fresh(path: Path, started: float) -> bool:
    try:
        return path.is_file() and path.stat().st_mtime >= started
    except OSError:
        return False


def copy_metrics(source: Path, target: Path, started: float) -> Path:
    """Copy a metrics file, or what is fresh in a directory of them; a UserError says why there is nothing to judge."""
    if not source.exists():
        raise UserError(f"the script left no metrics: {source} does not exist", "")
    found = [source] if source.is_file() else _below(source)
    new = [file for file in found if fresh(file, started)]
    if not new:
        raise UserError(f"{source}: older than this run" if found else f"the script left no metrics: {source} is empty", "")
    place = target if source.is_dir() else target.with_suffix(source.suffix or ".json")
    if "tfevents" in source.name:
        place = target / source.name  # the reader knows event files by their names
    try:
        for file in new:
            into = place / file.relative_to(source) if source.is_dir() else place
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, into)
    except OSError as error:
        raise UserError(f"{source}: cannot be copied: {error.strerror or error}", "") from error
    return place


def content(path: Path | None) -> str:
    try:
        if path is None or not path.is_file():
            return ""
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return ""


def clear_metrics(directory: Path, redactor: Redactor) -> None:
    """Redact the copies of metrics, once they were judged: strings only, since a number that looks like a secret is a number."""
    for file in _below(directory):
        if not file.relative_to(directory).parts[0].startswith("metrics") or file.suffix not in TEXTS:
            continue
        if file.suffix not in (".json", ".jsonl"):
            redactor.file(file)
            continue
        text = file.read_bytes().decode("utf-8", "surrogateescape")
        cleared = STRINGS.sub(lambda found: _cleared(found, redactor), text)
        if cleared != text:
            write_bytes(file, cleared.encode("utf-8", "surrogateescape"))


def _cleared(found: re.Match[str], redactor: Redactor) -> str:
    try:
        name, value = str(parse_json(found[1])), None if found[3] is None else parse_json(found[3])
    except ValueError:
        return redactor.text(found[0])  # no JSON
    if value is None:
        return found[0] if (new := redactor.text(name)) == name else json.dumps(new)
    shown, kept = redactor.text(name), redactor.value({name: value})[name]
    return found[0] if (shown, kept) == (name, value) else f"{json.dumps(shown)}{found[2]}{json.dumps(kept)}"


def copy_outputs(source: Path, target: Path, redactor: Redactor, began: float | None = None) -> tuple[int, tuple[str, ...]]:
    """Copy logs and tables below `source`; with `began` only files that were written since. Returns how many, and what was left out."""
    count, left = 0, list[str]()
    for file in _below(source):
        if file.is_relative_to(target):
            continue
        name = file.relative_to(source).as_posix()
        if not any(fnmatch.fnmatch(file.name, pattern) for pattern in KEPT) or (began is not None and not fresh(file, began)):
            continue
        try:
            if file.stat().st_size > LARGEST or count >= MOST_FILES:
                left.append(name)
                continue
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target / name)
            if file.suffix in TEXTS:
                redactor.file(target / name)
        except OSError as error:
            left.append(f"{name} ({error.strerror or error})")
            continue
        count += 1
    more = " …" if len(left) > 5 else ""
    return count, (f"not copied from {source}, for their size or number: {', '.join(left[:5])}{more}",) if left else ()


def _below(directory: Path) -> list[Path]:
    """Files, sorted; links are not followed out of the directory."""
    found = [Path(parent) / name for parent, _, names in os.walk(directory) for name in names]
    return sorted(file for file in found if file.is_file() and not file.is_symlink())


SKIP_LINES = 5
"""A script that skips itself says so and ends; a line that was followed by more output is about something else."""
TRACE = re.compile(r"\++ ")
"""How `set -x` begins its lines: `+ exit 0` is not what the script says."""
TAGS_SHOWN = 8
UNREAD = "not evaluated: what this asserts cannot be read from the script; write the call out, with the metrics file and the checks"
EXIT_CODE_ONLY = "judged by its exit code alone (--exit-code-only): no metrics and no steps were looked at"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """How a script ended."""

    directory: Path
    """Ours."""
    log: Path
    started: float
    """By the clock of the file system."""
    ended: Ended
    exit_code: int | None
    seconds: float
    trouble: str = ""


def judge_script(planned: PlannedScript, ran: ScriptRun) -> ScriptResult:
    measured, reached, wrote = _measure(planned, ran)
    notes: tuple[str, ...] = ()
    diagnosis, boundary = None, Boundary.ENVIRONMENT if ran.ended in ("not started", "interrupted") else None
    if ran.ended == "not started":
        verdict, reason = Verdict.BLOCKED, ran.trouble
    elif ran.ended == "interrupted":
        verdict, reason = Verdict.BLOCKED, "interrupted, which says nothing about the change"
    elif ran.ended != "exited" or ran.exit_code != 0:
        diagnosis = _diagnose(planned, ran)
        verdict, boundary, reason = _failed(planned, ran, diagnosis)
    else:
        # The rule of `seatrial judge`: errors that a run got over have a limit, and a known failure counts.
        found = _diagnose(planned, ran) if planned.something_to_check else None
        diagnosis = found if found is not None and found.verdict is not None else None
        verdict, boundary, reason = _done(planned, ran, measured, wrote, diagnosis)
        if verdict is Verdict.PASS and not planned.something_to_check:
            notes = (EXIT_CODE_ONLY,)
    return ScriptResult(
        name=planned.name,
        script=str(planned.script),
        verdict=verdict,
        boundary=boundary,
        reason=reason,
        exit_code=ran.exit_code,
        ended=ran.ended,
        seconds=round(ran.seconds, 3),
        steps=planned.steps,
        reached=reached,
        checks=(*measured.checks, *measured.doubts),
        gpus=planned.gpus,
        gpu_hours=None if planned.gpus is None else round(planned.gpus * ran.seconds / 3600, 6),
        notes=notes,
        diagnosis=diagnosis,
    )


def _done(
    planned: PlannedScript, ran: ScriptRun, measured: Findings, wrote: bool, found: Diagnosis | None
) -> tuple[Verdict, Boundary | None, str]:
    said = _skip_line(planned, ran.log)
    if said and not wrote:
        return Verdict.SKIPPED, None, f"the script skipped itself: {said}"
    missed = [check for check in measured.checks if not check.passed]
    if missed:
        more = f" (and {len(missed) - 1} more)" if len(missed) > 1 else ""
        message = missed[0].message or f"wanted {missed[0].threshold}"
        return Verdict.FAIL, missed[0].boundary, f"exit 0, but {missed[0].name}: {one_line(message)}{more}"
    if found is not None:
        often = f" ({found.times} times)" if found.times > 1 else ""
        if found.survived:
            return Verdict.BLOCKED, found.boundary, f"exit 0, but inconclusive: it went on after an error{often}: {one_line(found.cause)}"
        verdict = Verdict.FAIL if found.verdict is Verdict.FAIL else Verdict.BLOCKED
        return verdict, found.boundary, f"exit 0, but the log shows a failure: {one_line(found.cause)}"
    doubt = next((check for check in measured.doubts if not check.passed), None)
    if doubt is not None:
        return Verdict.BLOCKED, doubt.boundary, f"exit 0, but inconclusive: {one_line(doubt.message or doubt.name)}"
    if planned.something_to_check:
        return Verdict.PASS, None, f"exit 0, {counted(len(measured.checks) + len(measured.doubts), 'check')} met"
    if planned.exit_code_only:
        return Verdict.PASS, None, "exit 0; nothing else was looked at"
    fix = "give --check and --metrics, or --steps; or accept its exit code with --exit-code-only"
    return Verdict.FAIL, Boundary.METRICS, f"nothing to check: exit 0 alone proves nothing; {fix}"


def _failed(planned: PlannedScript, ran: ScriptRun, found: Diagnosis) -> tuple[Verdict, Boundary | None, str]:
    told = {
        "deadline": f"did not end within {planned.minutes:g} minutes, and was ended",
        "stalled": f"said nothing for {planned.stall:g} minutes, and was ended",
    }.get(ran.ended, f"exit {ran.exit_code}")
    # Triage also blocks for data or configuration, which a change may have broken: only the machine takes the blame from it.
    blocked = found.signature in machine_failures() and found.verdict is Verdict.BLOCKED
    cause = f": {one_line(found.cause)}" if found.cause else ""
    return (Verdict.BLOCKED if blocked else Verdict.FAIL), found.boundary, f"{told}{cause}"


def _diagnose(planned: PlannedScript, ran: ScriptRun) -> Diagnosis:
    loop = get_loop(planned.known.loop) if planned.known else None
    try:
        if loop is None and ran.exit_code == 0:
            return diagnose(ran.log, STEPS, (), ended=True)
        return diagnose(ran.log, loop.milestones() if loop else (), loop.signatures() if loop else ())
    except UserError:
        return Diagnosis()


def _skip_line(planned: PlannedScript, log: Path) -> str:
    try:
        lines = deque((text for line in read_log(log) if (text := line.text.strip())), maxlen=SKIP_LINES)
    except UserError:
        return ""
    strict = next((one_line(line) for line in lines if any(pattern.search(line) for pattern in planned.skips)), "")
    if strict or planned.something_to_check or not planned.exit_code_only:
        return strict
    last = next((line for line in reversed(lines) if not TRACE.match(line)), "")
    return one_line(last) if SAYS_SKIP.search(last) and not SAYS_PASSED.search(last) else ""


def _measure(planned: PlannedScript, ran: ScriptRun) -> tuple[Findings, int | None, bool]:
    """All checks, also of a script that failed, since they may say why; the last step; whether a metrics file of this run is there."""
    found = Findings()
    reached: int | None = None
    wrote = False
    several = len(planned.asserted) > 1
    # What the loop printed of its one run; a script that ran several printed them all.
    printed = get_loop(planned.known.loop).measures.read_console(ran.log) if planned.known and ran.log.is_file() and not several else None
    if printed is not None and (printed.restarts or not printed.series or not planned.asserted):
        printed = None
    for number, one in enumerate(planned.asserted, 1):
        target = ran.directory / (f"metrics-{number}" if several else "metrics")
        label = f"{one.metrics.name if one.metrics else one.written}: " if several else ""
        made, steps, written = _of_file(planned, one, target, ran, printed)
        found.checks += [replace(check, name=f"{label}{check.name}") for check in made.checks]
        found.doubts += [replace(check, name=f"{label}{check.name}") for check in made.doubts]
        wrote = wrote or written
        if steps is not None:
            reached = max(steps, reached or 0)
    found.checks += [_miss(one_line(text), UNREAD) for text in planned.unread]
    if planned.known and planned.known.table:
        found.checks.append(_own_table(planned.known.table, ran.log))
    if planned.known and planned.asserted:
        found.checks += _fresh_logs(planned.known.logs, ran.started)
    if planned.something_to_check:
        try:
            found.checks += finite(read_facts(read_log(ran.log)))
        except UserError:
            pass  # there is no log
    return found, reached, wrote


def _of_file(
    planned: PlannedScript, one: Asserted, target: Path, ran: ScriptRun, printed: Metrics | None
) -> tuple[Findings, int | None, bool]:
    """The checks of one metrics file, the step that it reaches, and whether this run wrote it."""
    name = "metrics of this run"
    if one.metrics is None:
        return Findings([_miss(name, f"where {one.written} is cannot be told; give --metrics FILE")]), None, False
    try:
        metrics = read_run([copy_metrics(one.metrics, target, ran.started)])
    except UserError as error:
        made = [_miss(name, error.message)]
        made += [_miss(expr, "not evaluated: there are no metrics") for expr in one.checks]
        return Findings(made), None, fresh(one.metrics, ran.started)
    checks = [CheckResult(name=name, kind="proof", passed=True, value=str(one.metrics)), undamaged(metrics)]
    checks += [_evaluated(expr, metrics) for expr in one.checks]
    reached = None
    if one.steps:
        step, reached = _last_step(one.steps, planned.step_tags, metrics)
        checks.append(step)
    found = examine(metrics, printed, get_loop(planned.known.loop).measures.signals if planned.known else COMMON)
    # A bound of the script's own is the one that counts.
    asserted = " ".join(one.checks).replace("'", '"')
    own = [check for check in found.doubts if not (check.subject == "bound" and f'["{check.tag}"]' in asserted)]
    whole = Findings([*checks, *found.checks], own)
    bad = next(((tag, series.non_finite()) for tag, series in sorted(metrics.series.items()) if series.non_finite()), None)
    if bad is not None and (found.checks or found.doubts):  # of a training run every value is a number, whatever the script asserts
        whole.checks.append(replace(_miss("metrics are finite", f"{bad[0]} is not finite at step {bad[1][0]}"), missing=bad[1]))
    return whole, reached, True


def _evaluated(expr: str, metrics: Metrics) -> CheckResult:
    if "$" in expr:
        return _miss(expr, "not evaluated: it holds a shell variable whose value is not known")
    try:
        return evaluate(expr, metrics)
    except CheckSyntaxError as error:
        return _miss(expr, f"not evaluated: {one_line(error.message)}")


def _last_step(wanted: int, tags: tuple[str, ...], metrics: Metrics) -> tuple[CheckResult, int | None]:
    """Whether the last step was reached, by a metric that every step has. Others may count something else, such as seconds."""
    name = f"last step {wanted}"
    series = next((metrics.series[tag] for tag in tags if tag in metrics.series), None)
    if series is None:
        there = ", ".join(sorted(metrics.series)[:TAGS_SHOWN]) + (" …" if len(metrics.series) > TAGS_SHOWN else "")
        fix = f"give --steps-by METRIC, one of {there}" if there else "there is no metric with steps at all"
        return _miss(name, f"steps cannot be counted: no metric {' or '.join(tags)}; {fix}"), None
    reached = max(series.steps, default=0)
    broken = series.non_finite()
    message = f"step {reached} of {wanted}, by {series.tag}" if reached < wanted else ""
    if broken:
        message = f"{series.tag} is not finite at step {broken[0]}" + (f"; {message}" if message else "")
    check = CheckResult(
        name=name,
        kind="proof",
        passed=reached >= wanted and not broken,
        value=float(reached),
        threshold=f">= {wanted}",
        steps=series.steps[-1:],
        missing=broken,
        message=message,
    )
    return check, reached


def _own_table(title: str, log: Path) -> CheckResult:
    name = "the script looked at its own metrics"
    try:
        seen = any(line.body.strip() == title for line in read_log(log))
    except UserError as error:
        return _miss(name, error.message)
    return CheckResult(name=name, kind="proof", passed=seen, message="" if seen else f"no table {title!r} in its log")


def _fresh_logs(logs: Path, started: float) -> list[CheckResult]:
    """Metrics are made from event files: if there are any, this run must have written to one."""
    events = [file for file in logs.rglob("*tfevents*") if file.is_file()]
    if not events:
        return []
    new = any(fresh(file, started) for file in events)
    message = "" if new else f"every event file below {logs} is older than this run: its metrics are those of an earlier one"
    return [CheckResult(name="event files of this run", kind="proof", passed=new, message=message)]


def _miss(name: str, message: str) -> CheckResult:
    return CheckResult(name=name, kind="proof", passed=False, message=message)
