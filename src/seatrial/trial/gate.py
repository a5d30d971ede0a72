"""A probe of ours that goes before the levels: one process, and one deliverable.

- Exit code and probe.json must agree. A Pass has at least one rung that passed, and none that counts and did not.
- Anything else that is no verdict (a deadline, a crash, a usage error, a torn probe.json) is Blocked: it says nothing about
  the change, and it is no Pass.
- A gate that failed runs once more without the change (see `gate_base`): what failed before is Blocked, and shuts nothing.
- It runs in our own interpreter and environment, not in the loop's: the checkouts are named, not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.files import read_json
from seatrial.launch.process import Outcome
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.loop import SideTests
from seatrial.model.record import SideResult
from seatrial.model.verdict import Boundary, Verdict, exit_code
from seatrial.report.deliverables import PROBE
from seatrial.trial.gate_base import excuse
from seatrial.trial.level import Bench, set_aside
from seatrial.trial.sides import LOG, not_run, run_process, side_directory

CODES = {int(exit_code(verdict)): verdict for verdict in Verdict}
BEFORE = "before"
"""Where the probe without the change leaves its log and probe.json."""
SPARE_MINUTES = 1
"""How much later than the probe itself we give up on it: it says more about a deadline than we can."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a probe came to."""

    verdict: Verdict
    reason: str
    rungs: tuple[str, ...] = ()
    """The verdict of each rung that counts."""


def run_probe(bench: Bench, tests: SideTests) -> SideResult:
    """Run a probe to its end and judge it. What an earlier attempt left is kept beside."""
    if tests.blocked or tests.skip:
        return not_run(tests, Verdict.BLOCKED if tests.blocked else Verdict.SKIPPED, tests.blocked or tests.skip or "")
    directory = side_directory(bench.context.run_dir, tests.key)
    set_aside(directory)
    place = directory / PROBE
    command = _command(tests, tests.argv, directory)
    try:
        outcome = _run(bench, tests, directory, command)
    except BlockedError as error:
        return not_run(tests, Verdict.BLOCKED, error.message)
    said = judge_probe(outcome, place)
    notes = tests.notes
    if tests.gate and said.verdict is Verdict.FAIL:
        said, note = _without_change(bench, tests, directory, said)
        notes = (*notes, bench.redactor.text(note)) if note else notes
    return not_run(tests, said.verdict, bench.redactor.text(said.reason)).model_copy(
        update={
            "command": tuple(bench.redactor.value(command)),
            "notes": notes,
            # Which rung it was is in the reason; in a trial all of them stand for what the loop is given to build on.
            "boundary": Boundary.PROVIDER if said.verdict is Verdict.FAIL else None,
            "passed": said.rungs.count(Verdict.PASS),
            "failed": said.rungs.count(Verdict.FAIL),
            "errors": said.rungs.count(Verdict.BLOCKED),
            "skipped": said.rungs.count(Verdict.SKIPPED),
            "directory": str(directory.relative_to(bench.context.run_dir)),
            "seconds": round(outcome.seconds, 2),
        }
    )


def _command(tests: SideTests, argv: tuple[str, ...], directory: Path) -> tuple[str, ...]:
    return (*argv, "--deadline", f"{tests.minutes:g}", "--out", str((directory / PROBE).parent))


def _without_change(bench: Bench, tests: SideTests, directory: Path, failed: Said) -> tuple[Said, str]:
    """A Fail beside the same probe without the change, and a note about that."""
    place = directory / BEFORE
    ended: list[Outcome] = []

    def probe(argv: tuple[str, ...]) -> dict[str, Any] | None:
        ended.append(_run(bench, tests, place, _command(tests, argv, place)))
        before = judge_probe(ended[0], place / PROBE)
        if before.verdict in (Verdict.BLOCKED, Verdict.SKIPPED):  # it tells nothing about what is new
            raise BlockedError(Boundary.ENVIRONMENT, f"it is {before.verdict}: {before.reason}", "")
        return dict(read_json(place / PROBE)) if before.verdict is Verdict.FAIL else None

    # Not in the directory itself: what a Seatrial that was killed left there is moved, and git would lose the worktree.
    why, note = excuse(tests, read_json(directory / PROBE), directory.with_name(f"{directory.name}-{BEFORE}"), probe)
    if ended and ended[0].ended == "interrupted":
        return Said(
            Verdict.BLOCKED, f"interrupted before it was compared with the state before the change: {failed.reason}", failed.rungs
        ), ""
    return (Said(Verdict.BLOCKED, f"{why}: {failed.reason}", failed.rungs) if why else failed), note


def _run(bench: Bench, tests: SideTests, directory: Path, command: tuple[str, ...]) -> Outcome:
    return run_process(bench, tests, directory / LOG, command, bench.environ, 60 * (tests.minutes + SPARE_MINUTES))


def shut(results: Sequence[SideResult]) -> SideResult | None:
    """The gate that failed: nothing is run behind it."""
    return next((side for side in results if side.gate and side.verdict is Verdict.FAIL), None)


def behind(failed: SideResult) -> str:
    """Why something was not run."""
    return f"not run: {failed.name} failed{f' at {failed.boundary}' if failed.boundary else ''}"


def judge_probe(outcome: Outcome, path: Path) -> Said:
    """The verdict on a probe that left its probe.json at `path`."""
    if outcome.ended != "exited":
        how = "interrupted by a signal after" if outcome.ended == "interrupted" else "did not end before its deadline:"
        return Said(Verdict.BLOCKED, f"{how} {outcome.seconds:.0f} s")
    code = outcome.exit_code
    verdict = CODES.get(code) if code is not None else None
    if verdict is None:
        return Said(Verdict.BLOCKED, f"the probe itself failed (exit code {code}): see its log")
    try:
        stated, reason, rungs = _read(path)
    except UserError as error:
        return Said(Verdict.BLOCKED, f"exit code {code}, and no whole {path.name}: {error.message}")
    if stated != verdict:
        return Said(Verdict.BLOCKED, f"exit code {code} says {verdict}, but {path.name} says {stated}: {reason}", rungs)
    if verdict is Verdict.PASS and Verdict.PASS not in rungs:
        return Said(Verdict.BLOCKED, f"vacuous: {path.name} says Pass, and no rung passed", rungs)
    if verdict is Verdict.PASS and set(rungs) != {Verdict.PASS}:
        return Said(Verdict.BLOCKED, f"{path.name} says Pass, but not every rung passed", rungs)
    return Said(verdict, reason, rungs)


def _read(path: Path) -> tuple[str, str, tuple[str, ...]]:
    """Verdict, reason, and the verdicts of rungs that count; a file of another shape is an error."""
    found = read_json(path)
    try:
        judged = found["judged"]
        return str(judged["verdict"]), str(judged["reason"]), tuple(_rungs(judged))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: {type(error).__name__}: {error}", "it was written by another version: run the probe again") from error


def _rungs(judged: dict[str, Any]) -> Iterator[str]:
    for family in judged.get("families", ()):
        counted = family["rungs"] if family.get("counted", True) else ()
        yield from (str(rung["verdict"]) for rung in counted if rung.get("counted", True))
