"""Running functional scripts one after another, each to its verdict.

- One directory per script: command.sh (runs as it stands), run.log, metrics.json, checks.json, result.json, `script/` (what the script
  wrote itself) and `before/` (what it was about to delete).
- Whatever happens to a script, nothing of it is left running; deadline and stall end the whole process tree, and its container.
- functional.json, summary.md and junit.xml are written after every script: a run that is killed has a report of what ended.
- After an interrupt the scripts that were not begun are Skipped, and the report says so.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from seatrial import __version__
from seatrial.evidence.redact import Redactor
from seatrial.files import write_json, write_text
from seatrial.launch.interrupt import stop_requested
from seatrial.launch.process import Outcome, ProcessSpec, run
from seatrial.model.errors import BlockedError
from seatrial.model.verdict import Verdict, worst
from seatrial.regress.functional.collect import clear_metrics, content, fresh, take
from seatrial.regress.functional.judge import Ran, judge
from seatrial.regress.functional.plan import Planned
from seatrial.regress.functional.record import Ended, FunctionalRun, ScriptResult
from seatrial.regress.functional.report import junit_xml, summary_md
from seatrial.regress.hermetic.place import Place
from seatrial.trial.level import stopped_too
from seatrial.trial.rundir import now

GRACE_S = 10.0
SAME = "{} holds the same bytes as before this run: a run that repeats itself looks like that, and so does an old file with a new time"


def run_all(
    scripts: Sequence[Planned], out: Path, place: Place, tell: Callable[[str], None], done: Callable[[ScriptResult], None]
) -> FunctionalRun:
    """Run every script at `place` (here, a container or a fresh environment); reports go to `out`, which exists."""
    redactor, results, created = Redactor(os.environ), list[ScriptResult](), now()
    whole = FunctionalRun(id=out.name, created=created, seatrial=__version__, verdict=Verdict.SKIPPED, results=())
    for planned in scripts:
        if stop_requested():
            result = _not_begun(planned)
        else:
            tell(f"{planned.name}: {shlex.join(redactor.value(planned.argv))}")
            result = run_one(planned, out / planned.name, place, redactor)
        results.append(result)
        done(result)
        owed = [Verdict.SKIPPED] if len(results) < len(scripts) else []
        whole = whole.model_copy(update={"verdict": worst([*(one.verdict for one in results), *owed]), "results": tuple(results)})
        _write(out, whole)
    return whole


def _write(out: Path, whole: FunctionalRun) -> None:
    write_json(out / "functional.json", whole)
    write_text(out / "summary.md", summary_md(whole))
    write_text(out / "junit.xml", junit_xml(whole))


def _not_begun(planned: Planned) -> ScriptResult:
    reason = "not begun: Seatrial was interrupted before"
    return ScriptResult(
        name=planned.name, script=str(planned.script), verdict=Verdict.SKIPPED, reason=reason, ended="not started", gpus=planned.gpus
    )


def run_one(planned: Planned, directory: Path, place: Place, redactor: Redactor) -> ScriptResult:
    """Run one script and judge it."""
    directory.mkdir(parents=True)
    notes: list[str] = []
    if planned.known is not None:
        before = take(planned.known.output, directory / "before", redactor)
        notes += [f"results of an earlier run were kept in {directory.name}/before"] if before.files else []
    argv, env = place.command(planned.argv, planned.cwd)
    command = directory / "command.sh"
    write_text(command, _command_text(argv, redactor.value(argv), planned))
    command.chmod(0o755)
    earlier = {one.metrics: content(one.metrics) for one in planned.asserted}
    # The time of a file that was just written: what a file system says of the script's files is by the same clock.
    started, log = command.stat().st_mtime, directory / "run.log"
    ended, code, seconds, trouble = _follow(planned, argv, env, log, place, redactor)
    directory.mkdir(parents=True, exist_ok=True)  # a script may delete what it finds
    try:
        result = judge(
            planned,
            Ran(directory=directory, log=log, started=started, ended=ended, exit_code=code, seconds=seconds, trouble=trouble),
        )
    finally:
        clear_metrics(directory, redactor)
    notes += [SAME.format(path) for path, was in earlier.items() if was and path and fresh(path, started) and content(path) == was]
    if planned.known is not None:
        kept = take(planned.known.output, directory / "script", redactor, started)
        notes += kept.notes
    result = result.model_copy(update={"notes": (*result.notes, *place.notes, *notes)})
    result = ScriptResult.model_validate(redactor.value(result.model_dump(mode="json")))  # reasons quote what was read
    write_json(directory / "checks.json", [check.model_dump(mode="json") for check in result.checks])
    write_json(directory / "result.json", result)
    return result


def _command_text(argv: tuple[str, ...], shown: tuple[str, ...], planned: Planned) -> str:
    told = "# Secrets are left out: put them in before you run this.\n" if shown != argv else ""
    return f"#!/bin/bash\n{told}cd {shlex.quote(str(planned.cwd))} || exit\nexec {shlex.join(shown)}\n"


def _follow(
    planned: Planned, argv: tuple[str, ...], env: dict[str, str], log: Path, place: Place, redactor: Redactor
) -> tuple[Ended, int | None, float, str]:
    spec = ProcessSpec(
        argv=argv,
        env=env,
        cwd=planned.cwd,
        log=log,
        run_id=f"functional-{planned.name}-{time.time_ns()}",
        deadline_s=60 * planned.minutes,
        stall_s=60 * planned.stall,
        watch=(planned.known.output,) if planned.known else (),
        grace_s=GRACE_S,
        line_filter=redactor.lines().line,
    )
    outcome = Outcome(None, None, "interrupted", 0.0)
    try:
        outcome = run(spec)
    except BlockedError as error:
        return "not started", None, 0.0, error.message
    finally:
        place.end()
    cut = outcome.ended == "exited" and outcome.exit_code != 0 and stopped_too(outcome.signal)
    return ("interrupted" if cut else outcome.ended), (None if cut else outcome.exit_code), outcome.seconds, ""
