"""Marks of runs: no innocent commit is bad, no guilty one is good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seatrial.bisect import judge_run as module
from seatrial.bisect.bisect_records import Failure, Mark, SkipKind
from seatrial.bisect.judge_run import observe
from seatrial.core.errors import UserError
from seatrial.core.files import write_json
from seatrial.core.records import CheckResult, Diagnosis, LevelResult, Trial
from seatrial.core.records import Plan as TrialPlan
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops.nightly_scripts import Nightly
from tests.bisect.ended import ASSERTION, CHECK, LIMIT, TESTS, Runs, plan, text


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_exit_codes(runs: Runs) -> None:
    end = runs.failure(1, ASSERTION)
    assert runs.see(0, "fine\n", end).mark is Mark.GOOD
    assert runs.see(125, ASSERTION, end).skip is SkipKind.COMMAND
    again = runs.see(1, ASSERTION, end)
    assert (again.mark, again.exit_code, again.abort) == (Mark.BAD, 1, "")
    for code in (126, 127):
        for known in (end, None):
            missing = runs.see(code, "run.sh: line 3: frobnicate: command not found\n", known)
            assert (missing.mark, missing.skip, missing.transient) == (Mark.SKIP, SkipKind.MISSING, False)
            assert "frobnicate" in missing.reason


@pytest.mark.parametrize(("code", "says"), [(128, "128"), (130, "SIGINT"), (139, "--failure"), (143, "SIGTERM"), (255, "255")])
def test_128_and_up_end_the_bisect(runs: Runs, code: int, says: str) -> None:
    seen = runs.see(code, ASSERTION, runs.failure(1, ASSERTION))
    assert seen.mark is Mark.SKIP
    assert says in seen.abort


def test_memory_and_the_cluster_are_not_the_commits_doing(runs: Runs) -> None:
    end = runs.failure(1, ASSERTION)
    ended_so = [
        runs.see(137, "step 1\n", end),
        runs.see(143, "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***\n", end),
        observe(plan(), runs.facts(1, ASSERTION, scheduler="NODE_FAIL"), end),
        observe(plan(), runs.facts(None, ASSERTION), end),
    ]
    for seen in ended_so:
        assert (seen.mark, seen.skip, seen.transient, seen.abort) == (Mark.SKIP, SkipKind.ENVIRONMENT, True, "")


@pytest.mark.parametrize("name", ["hub_429.log", "disk_full.log"])
@pytest.mark.parametrize("any_failure", [True, False])
def test_what_the_machine_failed_is_never_bad(runs: Runs, name: str, any_failure: bool) -> None:
    for end in (None, runs.failure(1, ASSERTION), Failure(kind="exit", exit_code=1)):
        seen = runs.see(1, text(name), end, any_failure=any_failure)
        assert (seen.mark, seen.skip, seen.transient) == (Mark.SKIP, SkipKind.ENVIRONMENT, True)


def test_an_import_error_is_the_commits_own(runs: Runs) -> None:
    log = text("pytest_collection.log")
    assert runs.see(2, log, runs.failure(2, log)).mark is Mark.BAD


@pytest.mark.parametrize("other", ["pytest_collection.log", "cuda_oom.log", "assertion.log"])
def test_another_failure_is_a_skip(runs: Runs, other: str) -> None:
    end = runs.failure(1, TESTS)
    seen = runs.see(1, text(other), end)
    assert (seen.mark, seen.skip, seen.transient) == (Mark.SKIP, SkipKind.OTHER_FAILURE, False)
    assert "another way" in seen.reason
    assert runs.see(1, text(other), end, any_failure=True).mark is Mark.BAD


def test_a_limit_on_the_way_makes_a_bad_run_doubtful(runs: Runs) -> None:
    clean, both = runs.failure(1, ASSERTION), LIMIT + ASSERTION
    seen = runs.see(1, both, clean)
    assert (seen.mark, seen.skip, seen.transient) == (Mark.SKIP, SkipKind.ENVIRONMENT, True)
    # Where the bad end meets it just so, it is part of every run.
    assert runs.see(1, both, runs.failure(1, both)).mark is Mark.BAD
    # A run that failed otherwise may do better without it.
    other = runs.see(1, LIMIT + text("cuda_oom.log"), clean)
    assert (other.skip, other.transient) == (SkipKind.OTHER_FAILURE, True)


def test_a_silent_exit_is_compared_by_its_code(runs: Runs) -> None:
    first = runs.see(1, "step 1\n")
    assert "only exit codes" in first.reason
    assert runs.see(1, "step 2\n", first.failure).mark is Mark.BAD
    assert runs.see(2, "step 1\n", first.failure).skip is SkipKind.OTHER_FAILURE
    assert runs.see(1, ASSERTION, first.failure).skip is SkipKind.OTHER_FAILURE


def test_tests_that_did_not_run_are_not_good(runs: Runs) -> None:
    for end in (None, runs.failure(1, TESTS)):
        seen = runs.see(0, "=== 3 skipped in 0.01s ===\n", end)
        assert (seen.mark, seen.skip) == (Mark.SKIP, SkipKind.COMMAND)
    assert runs.see(0, "=== 1 passed, 3 skipped in 0.01s ===\n", runs.failure(1, TESTS)).mark is Mark.GOOD


def test_a_pipe_that_hides_the_exit_code_does_not_make_it_good(runs: Runs) -> None:
    seen = runs.see(0, ASSERTION, runs.failure(1, ASSERTION))
    assert (seen.mark, seen.skip) == (Mark.SKIP, SkipKind.OTHER_FAILURE)
    assert runs.see(0, text("cuda_oom.log"), runs.failure(1, ASSERTION)).mark is Mark.GOOD  # survived, and not what is looked for
    counted = runs.failure(1, "mismatches: 3\n")
    assert runs.see(0, "mismatches: 0\n", counted).mark is Mark.GOOD


RAISE = f"{sys.executable} -I -S -c 'assert 0, 7'"


@pytest.mark.parametrize(
    ("script", "end", "mark", "skip"),
    [
        (RAISE, RAISE, Mark.BAD, None),
        (f"{RAISE} || true", RAISE, Mark.SKIP, SkipKind.OTHER_FAILURE),
        (f"{RAISE} 2>&1 | cat", RAISE, Mark.SKIP, SkipKind.OTHER_FAILURE),
        (f"frobnicate\n{RAISE}", RAISE, Mark.SKIP, SkipKind.MISSING),
        ("cat no-such-file", RAISE, Mark.SKIP, SkipKind.OTHER_FAILURE),
        ("cat no-such-file", "cat no-such-file", Mark.BAD, None),
        ("cat no-such-file", "cat another-file", Mark.SKIP, SkipKind.OTHER_FAILURE),
        ("false", RAISE, Mark.SKIP, SkipKind.OTHER_FAILURE),
        ("echo fine", RAISE, Mark.GOOD, None),
        ("kill -9 $$", RAISE, Mark.SKIP, SkipKind.ENVIRONMENT),
    ],
)
def test_scripts_that_stop_at_the_first_error(runs: Runs, script: str, end: str, mark: Mark, skip: SkipKind | None) -> None:
    def run(text: str) -> tuple[int, str]:
        ended = subprocess.run(["bash", "-e"], input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        return ended.returncode if ended.returncode >= 0 else 128 - ended.returncode, ended.stdout

    seen = runs.see(*run(script), runs.failure(*run(end)))
    assert (seen.mark, seen.skip) == (mark, skip), seen.reason


def test_a_pattern_replaces_the_comparison(runs: Runs) -> None:
    end = runs.failure(1, ASSERTION, failure="loss is nan")
    assert end.kind == "pattern"
    assert runs.see(2, LIMIT + "loss is nan\n", end, failure="loss is nan").mark is Mark.BAD  # whatever triage says
    assert runs.see(139, "loss is nan\nSegmentation fault\n", end, failure="loss is nan").mark is Mark.BAD
    assert runs.see(143, "loss is nan\n", end, failure="loss is nan").abort
    assert runs.see(1, TESTS, end, failure="loss is nan").skip is SkipKind.OTHER_FAILURE
    assert runs.see(1, TESTS, None, failure="loss is nan").skip is SkipKind.OTHER_FAILURE
    assert runs.see(1, LIMIT, end, failure="loss is nan").skip is SkipKind.ENVIRONMENT
    assert runs.see(0, "loss is nan\n", end, failure="loss is nan").skip is SkipKind.OTHER_FAILURE
    with pytest.raises(UserError, match="--failure"):
        runs.see(1, TESTS, end, failure="(")


def test_a_deadline(runs: Runs) -> None:
    late = runs.facts(None, "step 1\n", ended="deadline")
    first = observe(plan(), late, None)
    assert first.mark is Mark.BAD
    assert first.failure is not None
    assert first.failure.kind == "timeout"
    assert observe(plan(), late, first.failure).mark is Mark.BAD
    assert observe(plan(), late, Failure(kind="exit", exit_code=1)).skip is SkipKind.OTHER_FAILURE
    assert observe(plan(failure="nan"), late, None).skip is SkipKind.OTHER_FAILURE
    assert runs.see(1, "step 1\n", first.failure).skip is SkipKind.OTHER_FAILURE
    waits = runs.facts(None, "pip: Temporary failure in name resolution\n", ended="deadline")
    assert observe(plan(), waits, first.failure).skip is SkipKind.ENVIRONMENT
    assert observe(plan(), runs.facts(None, "", ended="interrupted"), None).abort


def trial(runs: Runs, verdict: Verdict | None, **level: Any) -> None:
    result = LevelResult(number=0, name="smoke", title="Smoke", verdict=verdict or Verdict.PASS, reason="because", **level)
    stored = Trial(
        id="t",
        seatrial="0",
        created="",
        plan=TrialPlan(loop="trl", levels=(), model="m"),
        command=("seatrial",),
        status="done" if verdict else "running",
        verdict=verdict,
        levels=(result,),
    )
    write_json(runs.root / "trial" / "trial.json", stored)


def test_a_trial_by_its_verdict(runs: Runs) -> None:
    trial(runs, Verdict.PASS)
    assert runs.see(0, trial=True).mark is Mark.GOOD
    assert runs.see(1, trial=True).skip is SkipKind.TRIAL  # its exit code says otherwise
    missed = (CheckResult(name="loss < 1", passed=False),)
    trial(runs, Verdict.FAIL, checks=missed, boundary=Boundary.OPTIMIZER)
    end = runs.failure(1, trial=True)
    assert (end.kind, end.boundary) == ("trial", Boundary.OPTIMIZER)
    assert "loss < 1" in end.cause
    assert runs.see(1, end=end, trial=True).mark is Mark.BAD
    trial(runs, Verdict.FAIL, checks=missed, boundary=Boundary.REFIT)
    assert runs.see(1, end=end, trial=True).skip is SkipKind.OTHER_FAILURE
    trial(runs, Verdict.BLOCKED, diagnosis=Diagnosis(signature="hub-rate-limit"))
    blocked = runs.see(99, end=end, trial=True)
    assert (blocked.skip, blocked.transient) == (SkipKind.TRIAL, True)
    trial(runs, Verdict.SKIPPED)
    skipped = runs.see(77, end=end, trial=True)
    assert (skipped.skip, skipped.transient) == (SkipKind.TRIAL, False)


def test_a_trial_without_a_verdict_is_never_good(runs: Runs) -> None:
    end = Failure(kind="trial", cause="x", exit_code=1)
    for _ in range(2):
        for code in (0, 1, 2, 77, 99):
            assert runs.see(code, end=end, trial=True).skip is SkipKind.TRIAL
        assert runs.see(2, trial=True).abort
        assert runs.see(3, end=end, trial=True).abort
        assert runs.see(130, end=end, trial=True).abort
        trial(runs, None)
    (runs.root / "trial" / "trial.json").write_text('{"id": 1', encoding="utf-8")
    assert runs.see(0, end=end, trial=True).skip is SkipKind.TRIAL


class _Unfinished(Nightly):
    """A nightly that says what the log says."""

    def incomplete(self, tree: Path, log: Path) -> str | None:
        said = log.read_text(encoding="utf-8")
        return "no metric table" if "table" not in said else None


def test_a_nightly_that_did_not_come_to_its_end_is_not_good(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Unfinished(script="n.sh", nodes=1, gpus_per_node=8, minutes=1, steps=2, metrics="m", variables={})
    monkeypatch.setattr(module, "describe_nightly", lambda script, text: asked if (script, text) == ("n.sh", "#!/bin/bash\n") else None)
    (runs.root / "tree" / "n.sh").write_text("#!/bin/bash\n", encoding="utf-8")
    end = runs.failure(1, ASSERTION, nightly="n.sh")
    assert runs.see(0, "table\n", end, nightly="n.sh").mark is Mark.GOOD
    assert runs.see(0, "step 1\n", end, nightly="n.sh").skip is SkipKind.OTHER_FAILURE
    assert runs.see(0, LIMIT, end, nightly="n.sh").skip is SkipKind.ENVIRONMENT
    unfinished = runs.failure(0, "step 1\n", nightly="n.sh")
    assert unfinished.cause == "incomplete: no metric table"
    assert runs.see(0, "step 2\n", unfinished, nightly="n.sh").mark is Mark.BAD
    runs.metrics([3.0, 2.0, 0.5])
    assert runs.see(0, "step 2\n", end, nightly="n.sh", check=CHECK).skip is SkipKind.OTHER_FAILURE


@pytest.mark.parametrize("block", ["MAX_STEPS=$STEPS", ""])
def test_a_nightly_whose_block_cannot_be_read_here_is_a_skip(runs: Runs, block: str) -> None:
    script = f"# ===== BEGIN CONFIG =====\nNUM_NODES=1\n{block}\n# ===== END CONFIG =====\n" if block else "true\n"
    (runs.root / "tree" / "n.sh").write_text(script, encoding="utf-8")
    end = runs.failure(1, ASSERTION, nightly="n.sh")
    seen = runs.see(0, "", end, nightly="n.sh", variables={"A": "b"})
    assert (seen.mark, seen.skip, seen.abort) == (Mark.SKIP, SkipKind.MISSING, "")
    assert "n.sh" in seen.reason
    if not block:  # no loop knows the script, at the bad end either
        assert runs.see(0, "", end, nightly="n.sh").mark is Mark.GOOD
