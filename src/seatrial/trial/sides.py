"""Tests of the change and of the loop that go before the levels: each one pytest process, and one deliverable.

- Exit code and junit.xml must agree. A Pass has exit code 0, at least one test that passed, and none that did not.
- Nothing collected, every test skipped, or nothing but what the machine lacks (a package, a GPU, the network) is Blocked:
  it says nothing about the change. Tests that failed, hung or crashed are a Fail.
- The tests run as their repository runs them, from its root; what stands before it on the import path is the change.
"""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from seatrial.evidence.redact import Redactor
from seatrial.files import read_text, write_bytes, write_text
from seatrial.launch.process import Outcome, ProcessSpec, Tick, run
from seatrial.model.errors import BlockedError
from seatrial.model.guarded import BadValue, parse_xml
from seatrial.model.knowledge import Signature
from seatrial.model.loop import Context, SideTests
from seatrial.model.record import SideResult
from seatrial.model.verdict import Verdict
from seatrial.triage.log import read_log
from seatrial.triage.signatures import GENERAL, load_signatures
from seatrial.trial.level import Bench, set_aside, stopped_too
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
class Case:
    """One test, or one file that could not be collected."""

    name: str
    outcome: Literal["passed", "failed", "error", "skipped"]
    message: str = ""
    """The exception, on one line."""


def side_directory(run_dir: Path, key: str) -> Path:
    """Where the tests of one repository leave their log and junit.xml."""
    return run_dir / "sides" / key


def not_run(tests: SideTests, verdict: Verdict, reason: str) -> SideResult:
    """The result of tests of which no process ran."""
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


def run_side(bench: Bench, tests: SideTests) -> SideResult:
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
    return SideResult(
        key=tests.key,
        name=tests.name,
        verdict=verdict,
        reason=reason,  # of a log and a junit.xml that have no secret in them
        command=tuple(bench.redactor.value(command)),
        files=tests.files,
        notes=tests.notes,
        gate=tests.gate,
        passed=counts.count("passed"),
        failed=counts.count("failed"),
        errors=counts.count("error"),
        skipped=counts.count("skipped"),
        directory=str(directory.relative_to(bench.context.run_dir)),
        seconds=round(outcome.seconds, 2),
    )


def _run(bench: Bench, tests: SideTests, directory: Path, command: tuple[str, ...]) -> Outcome:
    changes = [repo.import_root for repo in bench.context.changes if repo.import_root and not repo.companion]
    environment = child_environment(bench.environ, (*changes, *bench.loop.import_path(bench.context)), {})
    # Test suites import their own helpers from the directory that pytest is started in.
    del environment["PYTHONSAFEPATH"]
    return run_process(bench, tests, directory / LOG, command, environment, 60 * tests.minutes)


def run_process(
    bench: Bench, tests: SideTests, log: Path, command: tuple[str, ...], environment: Mapping[str, str], deadline_s: float
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

    outcome = run(spec, tick)
    if outcome.ended == "exited" and outcome.exit_code != 0 and stopped_too(outcome.signal):
        return Outcome(None, outcome.signal, "interrupted", outcome.seconds)
    return outcome


def _own_packages(context: Context) -> tuple[str, ...]:
    """What the checkouts provide: that one of these cannot be imported is never the machine's fault."""
    return tuple(package for repo in context.changes for package in repo.packages)


def judge_side(outcome: Outcome, cases: Sequence[Case] | None, log: str, packages: Sequence[str]) -> tuple[Verdict, str]:
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


def _lacking(case: Case, packages: Sequence[str]) -> bool:
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


def _named(cases: Sequence[Case]) -> str:
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
    """The last line that says something; notes of ours stand behind it."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("[seatrial]")]
    return _clipped(lines[-1]) if lines else "its log is empty"


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def cleaned_cases(path: Path, redactor: Redactor) -> tuple[Case, ...] | None:
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


def read_cases(path: Path) -> tuple[Case, ...]:
    """Every test of a junit.xml that can be parsed; pytest leaves one without a name where it was ended within a test."""
    return tuple(_case(element) for element in parse_xml(path).iter("testcase") if element.get("name") or len(element))


def _case(element: ET.Element) -> Case:
    name = "::".join(part for part in (element.get("classname"), element.get("name")) if part)
    tags: dict[str, Literal["failed", "error", "skipped"]] = {"error": "error", "failure": "failed", "skipped": "skipped"}
    for tag, outcome in tags.items():
        found = element.find(tag)
        if found is not None:
            return Case(name, outcome, _exception(found))
    return Case(name, "passed")


def _exception(element: ET.Element) -> str:
    """The exception that ended a test, on one line. Where pytest says only in which stage that was, its marked lines say more."""
    message = " ".join((element.get("message") or "").split())
    if not STAGES.match(message):
        return _clipped(message)
    marked = [line[1:].strip() for line in (element.text or "").splitlines() if line.startswith("E ")]
    heads = [line for line in marked if HEAD.match(line)]
    return _clipped((heads or marked or [message])[-1])
