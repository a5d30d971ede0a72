"""Runs functional scripts one after another and writes functional.json, summary.md and junit.xml."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace as replace_run
from pathlib import Path

from seatrial import __version__
from seatrial.core.errors import BlockedError
from seatrial.core.files import write_json, write_text
from seatrial.core.records import replace
from seatrial.core.text import counted as numbered
from seatrial.core.text import visible
from seatrial.core.verdict import Verdict, worst
from seatrial.evidence.redact import Redactor
from seatrial.functional.hermetic import ExecutionPlace
from seatrial.functional.judge_script import ScriptRun, clear_metrics, content, copy_outputs, fresh, judge_script
from seatrial.functional.plan_scripts import FunctionalRun, PlannedScript, ScriptResult
from seatrial.report.ci import add_case, add_checks, add_properties, document, new_suite, put_output, put_verdict
from seatrial.report.markdown import cell, code, prose
from seatrial.report.outcomes import check_words
from seatrial.runtime.interrupt import stop_requested
from seatrial.trial.run_dir import now

PREFIX = "seatrial.functional"


def counted_scripts(whole: FunctionalRun) -> str:
    counts = Counter(result.verdict for result in whole.results)
    return f"{numbered(len(whole.results), 'script')}: " + ", ".join(f"{counts[kind]} {kind}" for kind in Verdict if counts[kind])


def summary_md(whole: FunctionalRun) -> str:
    lines = [f"# {whole.verdict}: {counted_scripts(whole)}", "", f"{whole.id}, {whole.created}, Seatrial {whole.seatrial}", ""]
    lines += ["| script | verdict | steps | time | GPU hours | reason |", "|---|---|---|---|---|---|"]
    for result in whole.results:
        lines.append(f"| {' | '.join(map(cell, cells_of(result)))} |")
    for result in whole.results:
        lines += ["", f"## {prose(result.name)}: {result.verdict}", "", f"{code(str(result.script))}: {prose(result.reason)}"]
        if result.boundary is not None:
            lines.append(f"- boundary: {result.boundary}")
        for check in result.checks:
            told = f"{check.name}: {check.message}" if check.message else check_words(check)
            lines.append(f"- {'met' if check.passed else 'MISSED'}: {prose(told)}")
        lines += [f"- note: {prose(note)}" for note in result.notes]
        if result.diagnosis and result.diagnosis.advice:
            lines.append(f"- advice: {prose(result.diagnosis.advice)}")
    return "\n".join(lines) + "\n"


def cells_of(result: ScriptResult) -> tuple[str, ...]:
    """Script, verdict, steps, time, GPU hours and reason."""
    steps = "-" if result.steps is None else f"{result.reached if result.reached is not None else 'none'} of {result.steps}"
    hours = "-" if result.gpu_hours is None else f"{result.gpu_hours:.3g}"
    return result.name, str(result.verdict), steps, f"{result.seconds:.1f} s", hours, result.reason


def junit_xml(whole: FunctionalRun) -> str:
    seconds = sum(result.seconds for result in whole.results)
    suite = new_suite(whole.id, whole.created, seconds)
    add_properties(suite, [("verdict", str(whole.verdict)), ("seatrial", whole.seatrial)])
    for result in whole.results:
        case = add_case(suite, PREFIX, result.name, result.seconds)
        detail = [result.reason, *result.notes]
        if result.diagnosis is not None:
            detail += [result.diagnosis.cause, *result.diagnosis.excerpt, result.diagnosis.advice]
        put_verdict(case, result.verdict, result.boundary, result.reason, "\n".join(line for line in detail if line))
        if result.verdict is Verdict.PASS and result.notes:
            put_output(case, "\n".join(detail))
        if result.verdict is not Verdict.SKIPPED:
            add_checks(suite, f"{PREFIX}.{visible(result.name)}", result.checks, result.verdict)
    return document(suite, seconds)


SAME = "{} holds the same bytes as before this run: a run that repeats itself looks like that, and so does an old file with a new time"


def run_all(
    scripts: Sequence[PlannedScript], out: Path, place: ExecutionPlace, tell: Callable[[str], None], done: Callable[[ScriptResult], None]
) -> FunctionalRun:
    """Run every script at `place` (here, a container or a fresh environment); reports go to `out`, which exists."""
    redactor, results, created = Redactor(os.environ), list[ScriptResult](), now()
    whole = FunctionalRun(id=out.name, created=created, seatrial=__version__, verdict=Verdict.SKIPPED, results=())
    for planned in scripts:
        if stop_requested():
            reason = "not begun: Seatrial was interrupted before"
            result = ScriptResult(
                name=planned.name,
                script=str(planned.script),
                verdict=Verdict.SKIPPED,
                reason=reason,
                ended="not started",
                gpus=planned.gpus,
            )
        else:
            tell(f"{planned.name}: {shlex.join(redactor.value(planned.argv))}")
            result = run_one(planned, out / planned.name, place, redactor)
        results.append(result)
        done(result)
        owed = [Verdict.SKIPPED] if len(results) < len(scripts) else []
        whole = replace(whole, verdict=worst([*(one.verdict for one in results), *owed]), results=tuple(results))
        write_json(out / "functional.json", whole)
        write_text(out / "summary.md", summary_md(whole))
        write_text(out / "junit.xml", junit_xml(whole))
    return whole


def run_one(planned: PlannedScript, directory: Path, place: ExecutionPlace, redactor: Redactor) -> ScriptResult:
    directory.mkdir(parents=True)
    notes: list[str] = []
    if planned.known is not None:
        before, _ = copy_outputs(planned.known.output, directory / "before", redactor)
        notes += [f"results of an earlier run were kept in {directory.name}/before"] if before else []
    argv, env = place.command(planned.argv, planned.cwd)
    command = directory / "command.sh"
    shown = redactor.value(argv)
    told = "# Secrets are left out: put them in before you run this.\n" if shown != argv else ""
    write_text(command, f"#!/bin/bash\n{told}cd {shlex.quote(str(planned.cwd))} || exit\nexec {shlex.join(shown)}\n")
    command.chmod(0o755)
    earlier = {one.metrics: content(one.metrics) for one in planned.asserted}
    # The time of a file that was just written: what a file system says of the script's files is by the same clock.
    started, log = command.stat().st_mtime, directory / "run.log"
    watch = (planned.known.output,) if planned.known else ()
    ran = ScriptRun(directory=directory, log=log, started=started, ended="not started", exit_code=None, seconds=0.0)
    try:
        outcome = place.run(argv, env, planned.cwd, log, planned.minutes, redactor.lines().line, stall=planned.stall, watch=watch)
        ran = replace_run(ran, ended=outcome.ended, exit_code=outcome.exit_code, seconds=outcome.seconds)
    except BlockedError as error:
        ran = replace_run(ran, trouble=error.message)
    directory.mkdir(parents=True, exist_ok=True)  # a script may delete what it finds
    try:
        result = judge_script(planned, ran)
    finally:
        clear_metrics(directory, redactor)
    notes += [SAME.format(path) for path, was in earlier.items() if was and path and fresh(path, started) and content(path) == was]
    if planned.known is not None:
        notes += copy_outputs(planned.known.output, directory / "script", redactor, started)[1]
    result = replace(result, notes=(*result.notes, *place.notes, *notes))
    result = ScriptResult.model_validate(redactor.value(result.model_dump(mode="json")))  # reasons quote what was read
    write_json(directory / "checks.json", [check.model_dump(mode="json") for check in result.checks])
    write_json(directory / "result.json", result)
    return result
