"""Tests and a probe that run before the levels: one process and one deliverable each.

- Exit code and junit.xml (tests) or probe.json (the probe) must agree. A Pass needs at least one test or rung that passed.
- Anything that is no verdict (a deadline, a crash, a usage error, a torn file) is Blocked.
- A probe that fails runs once more on worktrees of the base: what fails there in the same way is not the change's doing.
"""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_json, read_text, write_bytes, write_text
from seatrial.core.guarded import BadValue, parse_xml
from seatrial.core.loop import Context, SideTests
from seatrial.core.records import SideResult, replace
from seatrial.core.specs import Signature
from seatrial.core.text import failure_identity
from seatrial.core.verdict import Boundary, Verdict, exit_code
from seatrial.evidence.redact import Redactor
from seatrial.report.outcomes import PROBE
from seatrial.runtime.process import Outcome, ProcessSpec, Tick, run_stoppable
from seatrial.triage.log import read_log
from seatrial.triage.signatures import GENERAL, load_signatures
from seatrial.trial.base_worktrees import same_files, unchanged
from seatrial.trial.level import RunContext, set_aside
from seatrial.trial.preflight import child_environment
from seatrial.trial.progress import SideRunning

JUNIT = "junit.xml"
LOG = "run.log"
LACKING = (
    *("no-space", "no-accelerator", "accelerator-broken", "shared-library", "shared-memory", "too-many-open-files"),
    *("attention-package-missing", "package-missing", "dns", "network", "hub-rate-limit", "hub-offline", "hub-access"),
)
"""Known failures that are the machine's: a test that fails with one of them says nothing about the change."""
STARTED = re.compile(r"collected [1-9]\d* items?\b|\bworkers? \[[1-9]\d* items?\]|\[ *\d+%\]$", re.MULTILINE)
"""What pytest prints once it has found tests."""
CUT = re.compile(r"^!{4,} ((?:_pytest\.outcomes\.Exit|KeyboardInterrupt|Interrupted|stopping after|xdist\.).*?) !{4,}$", re.MULTILINE)
"""What pytest prints when it stops before its last test; `pytest.exit` may do that with exit code 0."""
WHOLE = ("--verbosity=0", "--maxfail=0")
"""Undoes `-q`, with which a test that hangs cannot be told from a pytest that never found one, and `-x`, which leaves it
unsaid which of the other tests fail."""
STAGES = re.compile(r"collection failure|failed on (setup|teardown) with")
HEAD = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b")
NO_TESTS, USAGE = 5, 4
_NAMED = 3
_LONGEST = 600
"""Letters of a message that are kept: a reason is read by people, and whole messages are in log and junit.xml."""


@dataclass(frozen=True, slots=True)
class JUnitCase:
    name: str
    outcome: Literal["passed", "failed", "error", "skipped"]
    message: str = ""
    """The exception, on one line."""


def side_directory(run_dir: Path, key: str) -> Path:
    """Where the tests of one repository leave their log and junit.xml."""
    return run_dir / "sides" / key


def not_run(tests: SideTests, verdict: Verdict, reason: str) -> SideResult:
    return SideResult(
        key=tests.key,
        name=tests.name,
        verdict=verdict,
        reason=reason,
        files=tests.files,
        notes=tests.notes,
        kind=tests.kind,
        gate=tests.gate,
    )


def run_side(bench: RunContext, tests: SideTests) -> SideResult:
    """Run the tests of one repository and judge them. What an earlier attempt left is kept beside."""
    if tests.skip or not tests.files:
        return not_run(tests, Verdict.SKIPPED, tests.skip or "none of its test files exists")
    directory = side_directory(bench.context.run_dir, tests.key)
    set_aside(directory)
    command = (*tests.argv, "--junitxml", str(directory / JUNIT), *WHOLE, *tests.files)
    try:
        outcome = _run(bench, tests, directory, command)
    except BlockedError as error:
        return not_run(tests, Verdict.BLOCKED, error.message)
    cases = cleaned_cases(directory / JUNIT, bench.redactor)
    verdict, reason = judge_side(outcome, cases, said_in(directory / LOG), _own_packages(bench.context))
    counts = [case.outcome for case in cases or ()]
    return replace(
        not_run(tests, verdict, reason),  # of a log and a junit.xml that have no secret in them
        command=tuple(bench.redactor.value(command)),
        passed=counts.count("passed"),
        failed=counts.count("failed"),
        errors=counts.count("error"),
        skipped=counts.count("skipped"),
        directory=str(directory.relative_to(bench.context.run_dir)),
        seconds=round(outcome.seconds, 2),
    )


def _run(bench: RunContext, tests: SideTests, directory: Path, command: tuple[str, ...]) -> Outcome:
    changes = [repo.import_root for repo in bench.context.changes if repo.import_root and not repo.companion]
    environment = child_environment(bench.environ, (*changes, *bench.loop.import_path(bench.context)), {})
    # Test suites import their own helpers from the directory that pytest is started in.
    del environment["PYTHONSAFEPATH"]
    return run_process(bench, tests, directory / LOG, command, environment, 60 * tests.minutes)


def run_process(
    bench: RunContext, tests: SideTests, log: Path, command: tuple[str, ...], environment: Mapping[str, str], deadline_s: float
) -> Outcome:
    """One process that goes before the levels, to its end; one that a signal to us ended, too, was interrupted."""
    spec = ProcessSpec(
        argv=command,
        env={**environment, **tests.env},
        cwd=tests.cwd,
        log=log,
        run_id=f"{bench.context.run_dir.name}-{tests.key}-{time.time_ns()}",
        deadline_s=deadline_s,
        stall_s=deadline_s,
        line_filter=bench.redactor.lines().line,
    )

    def tick(beat: Tick) -> None:
        bench.listener(SideRunning(tests.name, beat.seconds, beat.last_line))

    return run_stoppable(spec, tick)


def _own_packages(context: Context) -> tuple[str, ...]:
    """What the checkouts provide: that one of these cannot be imported is never the machine's fault."""
    return tuple(package for repo in context.changes for package in repo.packages)


def judge_side(outcome: Outcome, cases: Sequence[JUnitCase] | None, log: str, packages: Sequence[str]) -> tuple[Verdict, str]:
    """The verdict on one pytest process, by the first rule that applies; `cases` is None without a whole junit.xml."""
    code = outcome.exit_code
    started = STARTED.search(log) is not None
    if outcome.ended == "interrupted":
        return Verdict.BLOCKED, f"interrupted by a signal after {outcome.seconds:.0f} s"
    if outcome.ended != "exited":
        late = f"did not end before its deadline ({outcome.seconds:.0f} s)"
        return (Verdict.FAIL, late) if started else (Verdict.BLOCKED, f"{late}, and no test had started")
    if cases is None:
        how = f"exit code {code}, and no whole {JUNIT} was left: {_last_line(log)}"
        return (Verdict.FAIL, how) if started or _killed(outcome) else (Verdict.BLOCKED, f"no test ran: {how}")
    bad = [case for case in cases if case.outcome in ("failed", "error")]
    ours = [case for case in bad if not _lacking(case, packages)]
    passed = sum(case.outcome == "passed" for case in cases)
    if ours:  # whatever the exit code: a conftest may set it
        return Verdict.FAIL, f"{len(bad)} of {len(cases)} tests failed: {_named(ours)}"
    if code in (NO_TESTS, USAGE) or not cases:
        return Verdict.BLOCKED, f"nothing was collected (exit code {code}): {_last_line(log)}"
    if bad:
        return Verdict.BLOCKED, f"the environment lacks what {len(bad)} of {len(cases)} tests need: {_named(bad)}"
    if not passed:
        return Verdict.BLOCKED, f"vacuous: all {len(cases)} tests were skipped"
    if code != 0:
        return Verdict.FAIL, f"exit code {code}, although no test failed: {_last_line(log)}"
    cut = CUT.search(log)
    if cut is not None:
        return Verdict.FAIL, f"it stopped before its last test, with exit code 0: {_clipped(cut[1])}"
    skipped = len(cases) - passed
    return Verdict.PASS, f"{passed} tests passed" + (f", {skipped} skipped" if skipped else "")


def _killed(outcome: Outcome) -> bool:
    """Whether a signal ended pytest; a wrapper such as `uv run` turns it into an exit code."""
    return outcome.signal is not None or 128 < (outcome.exit_code or 0) <= 192


def _lacking(case: JUnitCase, packages: Sequence[str]) -> bool:
    """Whether a test failed by something that the machine lacks and none of the checkouts provides."""
    # What two values of an assertion hold was not said by the machine.
    text = re.split(r"\bassert ", case.message, maxsplit=1)[0]
    # A name that a package which is there does not have may be a mistake of the change.
    if "cannot import name" in text or not any(re.search(signature.pattern, text) for signature in _machine()):
        return False
    return not any(re.search(rf"(?<![\w.]){re.escape(package)}(?!\w)", text) for package in packages)


@cache
def _machine() -> tuple[Signature, ...]:
    return tuple(signature for signature in load_signatures(GENERAL) if signature.id in LACKING)


def _named(cases: Sequence[JUnitCase]) -> str:
    more = f"; and {len(cases) - _NAMED} more" if len(cases) > _NAMED else ""
    return "; ".join(f"{case.name}: {case.message}" for case in cases[:_NAMED]) + more


def said_in(path: Path) -> str:
    """Of a log, however long: that tests were found, that they were cut, and the last line that says something."""
    found, cut, last = "", "", ""
    for line in read_log(path) if path.is_file() else ():
        found = found or (line.body if STARTED.search(line.body) else "")
        cut = cut or (line.body if CUT.search(line.body) else "")
        last = line.body if line.body.strip() and not line.body.startswith("[seatrial]") else last
    return f"{found}\n{cut}\n{last}"


def _last_line(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("[seatrial]")]
    return _clipped(lines[-1]) if lines else "its log is empty"


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def cleaned_cases(path: Path, redactor: Redactor) -> tuple[JUnitCase, ...] | None:
    """The tests of a junit.xml, which has no secret in it afterwards."""
    if not path.is_file():
        return None
    try:
        root = parse_xml(path)
    except BadValue:
        write_text(path, redactor.text(read_text(path)))
        return None
    for element in root.iter():
        element.text = element.text and redactor.text(element.text)
        element.attrib.update({name: redactor.text(value) for name, value in element.attrib.items()})
    write_bytes(path, ET.tostring(root, encoding="utf-8", xml_declaration=True))
    return read_cases(path)


def read_cases(path: Path) -> tuple[JUnitCase, ...]:
    """Every test of a junit.xml that can be parsed; pytest leaves one without a name where it was ended within a test."""
    return tuple(_case(element) for element in parse_xml(path).iter("testcase") if element.get("name") or len(element))


def _case(element: ET.Element) -> JUnitCase:
    name = "::".join(part for part in (element.get("classname"), element.get("name")) if part)
    tags: dict[str, Literal["failed", "error", "skipped"]] = {"error": "error", "failure": "failed", "skipped": "skipped"}
    for tag, outcome in tags.items():
        found = element.find(tag)
        if found is not None:
            return JUnitCase(name, outcome, _exception(found))
    return JUnitCase(name, "passed")


def _exception(element: ET.Element) -> str:
    """The exception that ended a test, on one line. Where pytest says only in which stage that was, its marked lines say more."""
    message = " ".join((element.get("message") or "").split())
    if not STAGES.match(message):
        return _clipped(message)
    marked = [line[1:].strip() for line in (element.text or "").splitlines() if line.startswith("E ")]
    heads = [line for line in marked if HEAD.match(line)]
    return _clipped((heads or marked or [message])[-1])


WORSE = 10.0
"""A measured value may be this many times as bad as before. Chosen, not measured."""
_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_MEASURED = re.compile(rf"({_NUMBER})(?:(?:/| of )({_NUMBER}))?(?![\w.])")
Run = Callable[[tuple[str, ...]], dict[str, Any] | None]
"""Runs the command of a probe; gives its probe.json when that is a Fail, None for a Pass. Anything else is a BlockedError."""


@dataclass(frozen=True, slots=True)
class ProbeFailure:
    """A check that was missed; or why a rung or a whole probe failed, where there is none."""

    model: str
    rung: str
    check: str
    message: str
    """Without numbers and paths."""
    value: str = ""
    threshold: str = ""

    def as_before(self, old: ProbeFailure) -> bool:
        mine, its = ((one.model, one.rung, one.check, one.message) for one in (self, old))
        return mine == its and _no_worse(self, old)


def excuse(tests: SideTests, found: dict[str, Any], trees: Path, run: Run) -> tuple[str, str]:
    """Why the failures of a gate are not the change's, or nothing; and a note on what was compared."""
    commits = ", ".join(f"{repo.name} {commit[:12]}" for repo, commit in tests.bases)
    if not tests.bases:
        return uncompared(found, "the state before the change is not known: name --base")
    if same_files([repo for repo, _ in tests.bases]):
        return f"nothing differs from the base ({commits}), so there is no change to hold this against", ""
    try:
        with unchanged(tests.bases, trees) as states:
            there = {f"={repo.path}": f"={state.path}" for (repo, _), state in zip(tests.bases, states, strict=True)}
            before = run(tuple(_moved(tests.argv, there)))
    except (BlockedError, UserError) as error:
        return uncompared(found, f"the state before the change cannot be run: {error.message}")
    new = fresh(found, before)
    if new is not None:
        what = ": ".join(part for part in (new.model, new.rung, new.check) if part)
        return "", f"compared with the state before the change ({commits}): this is new{f': {what}' if what else ''}"
    return f"the state before the change ({commits}) fails in the same way", ""


def uncompared(found: dict[str, Any], why: str) -> tuple[str, str]:
    if all(not failure.check for failure in failures(found)):
        return f"nothing that failed was measured, and nothing was compared: {why}", ""
    return "", f"not compared with the state before the change: {why}"


def _moved(argv: Sequence[str], places: dict[str, str]) -> Iterator[str]:
    """The command with `NAME=PATH` of each change at its other place."""
    for word in argv:
        end = next((path for path in places if word.endswith(path)), None)
        yield word.removesuffix(end) + places[end] if end else word


def fresh(now: dict[str, Any], before: dict[str, Any] | None) -> ProbeFailure | None:
    """The first failure of a failed probe that the one before does not have, or has much milder; None for one that did not fail."""
    old = failures(before) if before is not None else []
    return next((failure for failure in failures(now) if not any(failure.as_before(one) for one in old)), None)


def failures(probe: dict[str, Any]) -> list[ProbeFailure]:
    """What of a failed probe failed. One that never came to a rung failed as a whole."""
    judged = probe["judged"]
    rungs = [(family["model"], rung) for family in judged["families"] for rung in family["rungs"] if rung["verdict"] == Verdict.FAIL]
    missed = [failure for model, rung in rungs for failure in _missed(model, rung)]
    return missed or [ProbeFailure("", "", "", failure_identity(str(judged.get("reason", ""))))]


def _missed(model: str, rung: dict[str, Any]) -> list[ProbeFailure]:
    missed = [check for check in rung.get("checks", ()) if not check["passed"]]
    if not missed:
        return [ProbeFailure(model, rung["rung"], "", failure_identity(str(rung.get("reason", ""))))]
    words = [(failure_identity(check.get("message", "")), str(check.get("value", "")), check.get("threshold", "")) for check in missed]
    return [ProbeFailure(model, rung["rung"], check["name"], *said) for check, said in zip(missed, words, strict=True)]


def _no_worse(now: ProbeFailure, before: ProbeFailure) -> bool:
    """A count may not grow, since messages name only the first few; a measured value may be up to `WORSE` times as bad."""
    bad, old = _badness(now), _badness(before)
    if bad is None or old is None:
        return now.value == before.value
    counted = bad[1] or old[1]
    return bad[0] <= (old[0] if counted else WORSE * old[0])


def _badness(failure: ProbeFailure) -> tuple[float, bool] | None:
    """How far a value is from what it should be, and whether that is a count; None for what is no number, such as NaN."""
    found = _MEASURED.match(failure.value)
    if found is None:
        return None
    value, whole = float(found[1]), found[2]
    if failure.threshold == "all":  # `13/26 equal`
        return (float(whole) - value, True) if whole is not None else None
    limit = re.match(rf">=? ({_NUMBER})$", failure.threshold)
    if limit is not None:  # a cosine: what it lacks
        return float(limit[1]) - value, False
    return abs(value), failure.value.isdecimal()


CODES = {int(exit_code(verdict)): verdict for verdict in Verdict}
BEFORE = "before"
"""Where the probe without the change leaves its log and probe.json."""
SPARE_MINUTES = 1
"""How much later than the probe itself we give up on it: it says more about a deadline than we can."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    verdict: Verdict
    reason: str
    rungs: tuple[str, ...] = ()
    """The verdict of each rung that counts."""


def run_probe(bench: RunContext, tests: SideTests) -> SideResult:
    """Run a probe to its end and judge it. What an earlier attempt left is kept beside."""
    if tests.blocked or tests.skip:
        return not_run(tests, Verdict.BLOCKED if tests.blocked else Verdict.SKIPPED, tests.blocked or tests.skip or "")
    directory = side_directory(bench.context.run_dir, tests.key)
    set_aside(directory)
    place = directory / PROBE
    command = _command(tests, tests.argv, directory)
    try:
        outcome = _run_gate(bench, tests, directory, command)
    except BlockedError as error:
        return not_run(tests, Verdict.BLOCKED, error.message)
    said = judge_probe(outcome, place)
    notes = tests.notes
    if tests.gate and said.verdict is Verdict.FAIL:
        said, note = _without_change(bench, tests, directory, said)
        notes = (*notes, bench.redactor.text(note)) if note else notes
    return replace(
        not_run(tests, said.verdict, bench.redactor.text(said.reason)),
        command=tuple(bench.redactor.value(command)),
        notes=notes,
        boundary=Boundary.PROVIDER if said.verdict is Verdict.FAIL else None,
        passed=said.rungs.count(Verdict.PASS),
        failed=said.rungs.count(Verdict.FAIL),
        errors=said.rungs.count(Verdict.BLOCKED),
        skipped=said.rungs.count(Verdict.SKIPPED),
        directory=str(directory.relative_to(bench.context.run_dir)),
        seconds=round(outcome.seconds, 2),
    )


def _command(tests: SideTests, argv: tuple[str, ...], directory: Path) -> tuple[str, ...]:
    return (*argv, "--deadline", f"{tests.minutes:g}", "--out", str((directory / PROBE).parent))


def _without_change(bench: RunContext, tests: SideTests, directory: Path, failed: ProbeAnswer) -> tuple[ProbeAnswer, str]:
    """A Fail beside the same probe without the change, and a note about that."""
    place = directory / BEFORE
    ended: list[Outcome] = []

    def probe(argv: tuple[str, ...]) -> dict[str, Any] | None:
        ended.append(_run_gate(bench, tests, place, _command(tests, argv, place)))
        before = judge_probe(ended[0], place / PROBE)
        if before.verdict in (Verdict.BLOCKED, Verdict.SKIPPED):  # it tells nothing about what is new
            raise BlockedError(Boundary.ENVIRONMENT, f"it is {before.verdict}: {before.reason}", "")
        return dict(read_json(place / PROBE)) if before.verdict is Verdict.FAIL else None

    # Not in the directory itself: what a Seatrial that was killed left there is moved, and git would lose the worktree.
    why, note = excuse(tests, read_json(directory / PROBE), directory.with_name(f"{directory.name}-{BEFORE}"), probe)
    if ended and ended[0].ended == "interrupted":
        return ProbeAnswer(
            Verdict.BLOCKED, f"interrupted before it was compared with the state before the change: {failed.reason}", failed.rungs
        ), ""
    return (ProbeAnswer(Verdict.BLOCKED, f"{why}: {failed.reason}", failed.rungs) if why else failed), note


def _run_gate(bench: RunContext, tests: SideTests, directory: Path, command: tuple[str, ...]) -> Outcome:
    return run_process(bench, tests, directory / LOG, command, bench.environ, 60 * (tests.minutes + SPARE_MINUTES))


def shut(results: Sequence[SideResult]) -> SideResult | None:
    """The gate that failed: nothing is run behind it."""
    return next((side for side in results if side.gate and side.verdict is Verdict.FAIL), None)


def behind(failed: SideResult) -> str:
    """Why something was not run."""
    return f"not run: {failed.name} failed{f' at {failed.boundary}' if failed.boundary else ''}"


def judge_probe(outcome: Outcome, path: Path) -> ProbeAnswer:
    """The verdict on a probe that left its probe.json at `path`."""
    if outcome.ended != "exited":
        how = "interrupted by a signal after" if outcome.ended == "interrupted" else "did not end before its deadline:"
        return ProbeAnswer(Verdict.BLOCKED, f"{how} {outcome.seconds:.0f} s")
    code = outcome.exit_code
    verdict = CODES.get(code) if code is not None else None
    if verdict is None:
        return ProbeAnswer(Verdict.BLOCKED, f"the probe itself failed (exit code {code}): see its log")
    try:
        stated, reason, rungs = _read(path)
    except UserError as error:
        return ProbeAnswer(Verdict.BLOCKED, f"exit code {code}, and no whole {path.name}: {error.message}")
    if stated != verdict:
        return ProbeAnswer(Verdict.BLOCKED, f"exit code {code} says {verdict}, but {path.name} says {stated}: {reason}", rungs)
    if verdict is Verdict.PASS and Verdict.PASS not in rungs:
        return ProbeAnswer(Verdict.BLOCKED, f"vacuous: {path.name} says Pass, and no rung passed", rungs)
    if verdict is Verdict.PASS and set(rungs) != {Verdict.PASS}:
        return ProbeAnswer(Verdict.BLOCKED, f"{path.name} says Pass, but not every rung passed", rungs)
    return ProbeAnswer(verdict, reason, rungs)


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
