"""Tests that go before the levels: what each way to end means, and that a trial is no better than they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from seatrial.core.files import read_model
from seatrial.core.loop import Context, SideTests
from seatrial.core.records import Finding, Report, SideResult, Trial
from seatrial.core.verdict import Verdict
from seatrial.runtime.process import Outcome
from seatrial.triage.signatures import GENERAL, load_signatures
from seatrial.trial.pre_tests import LACKING, JUnitCase, judge_side, read_cases
from seatrial.trial.progress import Event, SideJudged, SideRunning
from tests.trial.conftest import Bench, commit

pytestmark = pytest.mark.slow

PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly")
PASSED, FAILED = JUnitCase("t::a", "passed"), JUnitCase("t::b", "failed", "AssertionError: assert 1 == 2")
NO_TORCH = JUnitCase("t::c", "error", "ModuleNotFoundError: No module named 'torch'")
OWN = JUnitCase("t::d", "error", "ModuleNotFoundError: No module named 'pkg.new'")
FOREIGN_NAME = JUnitCase("t::g", "error", "ImportError: cannot import name 'x' from 'torch' (/e/torch/__init__.py)")
OWN_NAME = JUnitCase("t::e", "error", "ImportError: cannot import name 'x' from 'pkg' (/c/pkg/__init__.py)")
QUOTES = JUnitCase("t::h", "failed", "AssertionError: assert 'No space left on device' in 'ok'")
ASKS = JUnitCase("t::i", "failed", "AssertionError: No GPUs are available assert False")
SKIPPED = JUnitCase("t::f", "skipped", "no GPU")
COLLECTED = "collected 3 items\n"


def ended(code: int | None = 0, how: str = "exited", signal: int | None = None) -> Outcome:
    return Outcome(code, signal, how, 7.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "cases", "log", "verdict", "reason"),
    [
        (ended(), (PASSED,), "", Verdict.PASS, "1 tests passed"),
        (ended(), (PASSED, SKIPPED), "", Verdict.PASS, "1 tests passed, 1 skipped"),
        (ended(), (SKIPPED, SKIPPED), "", Verdict.BLOCKED, "vacuous: all 2 tests were skipped"),
        (ended(), (), "", Verdict.BLOCKED, "nothing was collected (exit code 0): its log is empty"),
        (ended(5), (), "no tests ran in 0.01s\n", Verdict.BLOCKED, "nothing was collected (exit code 5): no tests ran in 0.01s"),
        (ended(4), None, "ERROR: file not found: x\n", Verdict.BLOCKED, "no test ran: exit code 4"),
        (ended(4), (PASSED,), "", Verdict.BLOCKED, "nothing was collected"),
        (ended(1), (PASSED, FAILED), "", Verdict.FAIL, "1 of 2 tests failed: t::b: AssertionError: assert 1 == 2"),
        (ended(0), (PASSED, FAILED), "", Verdict.FAIL, "1 of 2 tests failed"),
        (ended(2), (NO_TORCH,), "", Verdict.BLOCKED, "the environment lacks what 1 of 1 tests need: t::c: ModuleNotFoundError"),
        (ended(1), (PASSED, NO_TORCH, FAILED), "", Verdict.FAIL, "2 of 3 tests failed: t::b"),
        (ended(2), (OWN,), "", Verdict.FAIL, "No module named 'pkg.new'"),
        (ended(2), (FOREIGN_NAME,), "", Verdict.FAIL, "cannot import name 'x' from 'torch'"),
        (ended(2), (OWN_NAME,), "", Verdict.FAIL, "cannot import name 'x' from 'pkg'"),
        (ended(1), (PASSED,), "coverage is too low\n", Verdict.FAIL, "exit code 1, although no test failed: coverage is too low"),
        (ended(None, "deadline"), None, COLLECTED, Verdict.FAIL, "did not end before its deadline (7 s)"),
        (ended(None, "deadline"), None, "downloading\n", Verdict.BLOCKED, "and no test had started"),
        (ended(None, "interrupted"), None, COLLECTED, Verdict.BLOCKED, "interrupted by a signal"),
        (ended(1), None, "error: no such environment\n", Verdict.BLOCKED, "no test ran: exit code 1, and no whole junit.xml"),
        (ended(139, signal=11), None, "", Verdict.FAIL, "exit code 139"),
        (ended(139), None, "", Verdict.FAIL, "exit code 139"),  # a wrapper says so
        (ended(0), None, COLLECTED, Verdict.FAIL, "exit code 0, and no whole junit.xml was left"),
        (ended(None, "deadline"), None, "collected 0 items\n", Verdict.BLOCKED, "and no test had started"),
        (ended(5), (FAILED,), "", Verdict.FAIL, "1 of 1 tests failed"),  # a conftest may set the exit code
        (ended(0), (PASSED,), "!!!!!! _pytest.outcomes.Exit: enough !!!!!!\n", Verdict.FAIL, "exit code 0: _pytest.outcomes.Exit: enough"),
        (ended(255), None, "", Verdict.BLOCKED, "no test ran: exit code 255"),
        (ended(1), (QUOTES,), "", Verdict.FAIL, "No space left on device"),
        (ended(1), (ASKS,), "", Verdict.BLOCKED, "the environment lacks what 1 of 1 tests need"),
        (ended(1), None, "tests/test_a.py ... [ 30%]\nbye\n", Verdict.FAIL, "exit code 1, and no whole junit.xml was left: bye"),
    ],
)
def test_each_way_to_end(outcome: Outcome, cases: tuple[JUnitCase, ...] | None, log: str, verdict: Verdict, reason: str) -> None:
    found, why = judge_side(outcome, cases, log, ("pkg",))
    assert (found, reason in why) == (verdict, True), why


def test_what_a_machine_may_lack_is_a_known_failure() -> None:
    assert set(LACKING) <= {signature.id for signature in load_signatures(GENERAL)}


def test_only_the_first_failures_are_named() -> None:
    _, why = judge_side(ended(1), [JUnitCase(f"t::{n}", "failed", "x") for n in range(5)], "", ())
    assert why == "5 of 5 tests failed: t::0: x; t::1: x; t::2: x; and 2 more"


def test_a_junit_file_is_read_by_what_ended_each_test(tmp_path: Path) -> None:
    text = "ImportError while importing test module\nE   ModuleNotFoundError: No module named 'torch'\nE   hint"
    rows = (
        "<testcase classname='a' name='b'/>",
        "<testcase classname='a' name='c'><failure message='AssertionError: no&#10;way'>E  x</failure></testcase>",
        f"<testcase classname='' name='tests.x'><error message='collection failure'>{text}</error></testcase>",
        "<testcase classname='a' name='d'><error message='failed on setup with &quot;x&quot;'>nothing marked</error></testcase>",
        "<testcase classname='a' name='e'><skipped message='no GPU'/></testcase>",
        "<testcase time='0'/>",
    )
    (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite>{''.join(rows)}</testsuite></testsuites>")
    assert read_cases(tmp_path / "junit.xml") == (
        JUnitCase("a::b", "passed"),
        JUnitCase("a::c", "failed", "AssertionError: no way"),
        JUnitCase("tests.x", "error", "ModuleNotFoundError: No module named 'torch'"),
        JUnitCase("a::d", "error", 'failed on setup with "x"'),
        JUnitCase("a::e", "skipped", "no GPU"),
    )


def side(trial: Trial, key: str) -> SideResult:
    return next(one for one in trial.sides if one.key == key)


def four_sides(root: Path) -> tuple[SideTests, ...]:
    """One repository whose tests pass, one with a failure, one without files, one that is left out."""
    return (
        SideTests("own", "Change-side tests", PYTEST, root, files=("test_good.py",), notes=("test_old.py is missing",), minutes=1),
        SideTests("bad", "Other tests", PYTEST, root, files=("test_good.py", "test_bad.py"), minutes=1),
        SideTests("none", "Missing tests", PYTEST, root, notes=("test_gone.py is missing",)),
        SideTests("left", "Left-out tests", PYTEST, root, files=("test_good.py",), skip="the change has no such tests"),
    )


def test_a_trial_is_no_better_than_the_tests_before_it(bench: Bench, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "pw-Zx81kQ<93hfk2"
    monkeypatch.setenv("PLANTED_PASSWORD", secret)
    good = "import os, pkg\n\ndef test_uses_the_change() -> None:\n    assert pkg.__file__.startswith(os.getcwd())\n"
    bad = "import os\n\ndef test_b() -> None:\n    raise ValueError(os.environ['PLANTED_PASSWORD'])\n"
    commit(repo, {"test_good.py": good, "test_bad.py": bad})
    bench.changes, bench.sides = (repo,), lambda _: four_sides(repo)
    trial = bench.start(0)
    assert [one.verdict for one in trial.sides] == [Verdict.PASS, Verdict.FAIL, Verdict.SKIPPED, Verdict.SKIPPED]
    assert [level.verdict for level in trial.levels] == [Verdict.PASS]  # they keep no level from running
    assert trial.verdict is Verdict.FAIL
    assert trial.reason.startswith("Other tests: 1 of 2 tests failed: test_bad::test_b: ValueError: ")
    own, other = side(trial, "own"), side(trial, "bad")
    assert (own.passed, own.reason, own.directory) == (1, "1 tests passed", "sides/own")
    assert (other.passed, other.failed, other.files) == (1, 1, ("test_good.py", "test_bad.py"))
    assert own.command[-5:-2] == ("--junitxml", str(bench.out / "sides/own/junit.xml"), "--verbosity=0")
    assert own.command[-2:] == ("--maxfail=0", "test_good.py")
    assert side(trial, "none").reason == "none of its test files exists"
    assert side(trial, "left").reason == "the change has no such tests"
    assert not [path for path in bench.out.rglob("*") if path.is_file() and {secret, "Zx81kQ&lt;93"} & {*path.read_text().split()}]
    assert "Zx81kQ" not in (bench.out / "sides/bad/junit.xml").read_text() + (bench.out / "sides/bad/run.log").read_text()
    report = read_model(bench.out / "report.json", Report)
    lines = {line.name: line for line in report.deliverables}
    assert "Change-side checks" not in lines
    assert (lines["Change-side tests"].verdict, lines["Change-side tests"].proof) == (
        Verdict.PASS,
        "1 tests passed; test_old.py is missing",
    )
    assert "Missing tests: run the tests of that repository by hand" in report.follow_ups
    assert [event.result.key for event in bench.events if isinstance(event, SideJudged)] == ["own", "bad", "none", "left"]
    assert any(isinstance(event, SideRunning) and event.name == "Other tests" for event in bench.events)


def python(code: str) -> tuple[str, ...]:
    """A stand-in for pytest that takes no time: JUNIT is where it is to write."""
    return (sys.executable, "-S", "-c", f"import sys; JUNIT = sys.argv[2]\n{code}")


WRITES = "open(JUNIT, 'w').write('<testsuites><testsuite><testcase classname=\"a\" name=\"b\"/></testsuite></testsuites>')"


def stand_in(code: str, root: Path, minutes: float = 1) -> SideTests:
    return SideTests("own", "Own tests", python(code), root, files=("test_x.py",), minutes=minutes)


def test_tests_without_a_verdict_run_again_and_others_are_kept(bench: Bench, tmp_path: Path) -> None:
    bench.sides = lambda _: (stand_in("print('nothing')", tmp_path),)
    first = bench.start(0)
    assert (side(first, "own").verdict, first.verdict) == (Verdict.BLOCKED, Verdict.BLOCKED)
    bench.sides = lambda _: (stand_in(WRITES, tmp_path),)
    second = bench.resume()
    assert (side(second, "own").verdict, second.verdict) == (Verdict.PASS, Verdict.PASS)
    assert (bench.out / "sides/own/attempts/1/run.log").is_file()
    bench.sides = lambda _: (stand_in("raise SystemExit(3)", tmp_path),)
    bench.words = {}
    assert bench.resume().sides == second.sides


def test_a_deadline_ends_the_tests(bench: Bench, tmp_path: Path) -> None:
    hangs = "import time; print('collected 1 item', flush=True); open('there', 'w').close(); time.sleep(60)"
    bench.sides = lambda _: (stand_in(hangs, tmp_path, 0.2 / 60),)
    bench.patient((tmp_path / "there").exists)
    trial = bench.start(0)
    assert side(trial, "own").verdict is Verdict.FAIL
    assert "did not end before its deadline" in trial.reason
    assert not list(bench.out.rglob("*.pids"))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os._exit(0)", "exit code 0, and no whole junit.xml was left: test_token.py ."),
        ("pytest.exit('enough', returncode=0)", "it stopped before its last test, with exit code 0: _pytest.outcomes.Exit: enough"),
    ],
)
def test_a_test_that_ends_pytest_is_a_failure_however_quiet_pytest_was_asked_to_be(
    bench: Bench, repo: Path, code: str, reason: str
) -> None:
    commit(repo, {"test_token.py": f"import os, pytest\n\ndef test_a() -> None: ...\n\ndef test_b() -> None:\n    {code}\n"})
    bench.changes, bench.sides = (repo,), lambda _: (SideTests("own", "Own tests", PYTEST, repo, files=("test_token.py",), minutes=1),)
    found = side(bench.start(0), "own")
    assert (found.verdict, found.reason) == (Verdict.FAIL, reason)


def test_a_message_of_any_length_is_cut(tmp_path: Path) -> None:
    row = f"<testcase classname='a' name='b'><failure message='{'x' * 100_000}'/></testcase>"
    (tmp_path / "junit.xml").write_text(f"<testsuite>{row}</testsuite>")
    (case,) = read_cases(tmp_path / "junit.xml")
    assert case.message == "x" * 600 + "…"
    assert len(judge_side(ended(1), None, "y" * 100_000, ())[1]) < 1000


def test_the_name_of_a_test_is_no_secret(bench: Bench, tmp_path: Path) -> None:
    row = '<testcase classname="test_token" name="test_a"><failure message="boom"/></testcase>'
    bench.sides = lambda _: (stand_in(f"open(JUNIT, 'w').write('<testsuite>{row}</testsuite>')", tmp_path),)
    assert side(bench.start(0), "own").reason == "1 of 1 tests failed: test_token::test_a: boom"


def test_a_program_that_cannot_be_started_blocks(bench: Bench, tmp_path: Path) -> None:
    bench.sides = lambda _: (SideTests("own", "Own tests", ("/no/such/pytest",), tmp_path, files=("test_x.py",)),)
    assert "cannot start /no/such/pytest" in side(bench.start(0), "own").reason


def test_a_torn_junit_file_is_no_pass(bench: Bench, tmp_path: Path) -> None:
    bench.sides = lambda _: (stand_in(WRITES.replace("</testsuites>", ""), tmp_path),)
    found = side(bench.start(0), "own")
    assert (found.verdict, found.passed) == (Verdict.BLOCKED, 0)


def test_a_finding_blocks_the_tests_too(bench: Bench, tmp_path: Path) -> None:
    bench.finding = Finding(name="model", ok=False, message="no such model")
    bench.sides = lambda _: (stand_in(WRITES, tmp_path),)
    found = side(bench.start(0), "own")
    assert (found.verdict, found.reason, found.command) == (Verdict.BLOCKED, "preflight: model: no such model", ())
    assert not (bench.out / "sides").exists()


def test_an_interruption_leaves_the_tests_to_resume(bench: Bench, tmp_path: Path) -> None:
    import os

    def interrupt(event: Event) -> None:
        if isinstance(event, SideRunning):
            os.kill(os.getpid(), 2)

    bench.meddle = interrupt
    bench.sides = lambda _: (stand_in("import time; time.sleep(60)", tmp_path),)
    trial = bench.start(0)
    assert (side(trial, "own").verdict, trial.status) == (Verdict.BLOCKED, "running")
    assert trial.levels[0].reason == "interrupted before this level ran"


def test_a_checkout_that_is_edited_meanwhile_takes_their_pass_away(bench: Bench, repo: Path) -> None:
    bench.changes, bench.words = (repo,), {0: "edit"}
    bench.sides = lambda _: (stand_in(WRITES, repo),)
    found = side(bench.start(0), "own")
    assert found.verdict is Verdict.BLOCKED
    assert "was changed while the trial ran" in found.reason


def test_the_environment_of_the_tests_is_theirs_and_starts_with_the_change(bench: Bench, repo: Path) -> None:
    code = "import os; print(os.environ['PYTHONPATH'], os.environ['MINE'], 'PYTHONSAFEPATH' in os.environ)"

    def tests(context: Context) -> tuple[SideTests, ...]:
        assert context.run_dir == bench.out
        return (SideTests("own", "Own tests", python(code), repo, {"MINE": "yes"}, ("test_x.py",)),)

    bench.changes, bench.sides = (repo,), tests
    bench.start(0)
    assert f"{repo} yes False" in (bench.out / "sides/own/run.log").read_text()
