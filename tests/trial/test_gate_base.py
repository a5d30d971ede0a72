"""A gate that failed, beside the state before the change: only what is new ends the trial, and nothing becomes a Pass."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.evidence.repos import repo_state
from seatrial.model.loop import SideTests
from seatrial.model.record import SideResult, Trial
from seatrial.model.verdict import Verdict
from seatrial.trial.gate_base import excuse, failures

from .conftest import Bench, commit, git

SCRIPT = """
import json, os, shutil, sys
words = sys.argv
tree, place = words[words.index('--change') + 1].partition('=')[2], words[words.index('--out') + 1]
os.makedirs(place)
shutil.copy(os.path.join(tree, 'probe.json'), place)
sys.exit({'Pass': 0, 'Fail': 1, 'Blocked': 99}[json.load(open(os.path.join(tree, 'probe.json')))['judged']['verdict']])
"""
"""A stand-in for `seatrial probe bridge` that finds what the checkout itself says."""


def rung(name: str, *missed: str, verdict: str = "Fail", reason: str = "r") -> dict[str, Any]:
    checks = [{"name": one, "passed": False} for one in missed] + [{"name": "met", "passed": True}]
    return {"rung": name, "verdict": verdict, "reason": reason, "checks": checks}


def probe(*rungs: dict[str, Any], verdict: str = "Fail", reason: str = "because") -> dict[str, Any]:
    families = [{"model": "qwen2", "rungs": list(rungs)}] if rungs else []
    return {"judged": {"verdict": verdict, "reason": reason, "families": families}}


GOOD, BAD = probe(rung("build", verdict="Pass"), verdict="Pass"), probe(rung("tp", "a"))


@pytest.mark.parametrize(
    ("now", "before", "excused"),
    [
        (probe(rung("tp", "a")), probe(rung("tp", "a")), True),
        (probe(rung("tp", "a")), probe(rung("tp", "a", "b"), rung("sp", "c")), True),
        (probe(rung("tp", "a", "b")), probe(rung("tp", "a")), False),
        (probe(rung("tp", "a"), rung("sp", "a")), probe(rung("tp", "a")), False),
        (probe(rung("tp", reason="raised: X")), probe(rung("tp", reason="raised: X")), True),
        (probe(rung("tp", reason="raised: Y")), probe(rung("tp", reason="raised: X")), False),
        (probe(reason="cannot be imported: X"), probe(reason="cannot be imported: X"), True),
        (probe(reason="cannot be imported: Y"), probe(reason="cannot be imported: X"), False),
        (probe(rung("tp", "a")), probe(reason="cannot be imported: X"), False),
        (probe(reason="cannot be imported: X"), probe(rung("tp", "a")), False),
    ],
)
def test_only_what_failed_before_is_excused(now: dict[str, Any], before: dict[str, Any], excused: bool) -> None:
    assert (failures(now) <= failures(before)) is excused


def side(repo: Path, base: str) -> SideTests:
    argv = (sys.executable, "-S", "-c", SCRIPT, "--change", f"bridge={repo}")
    bases = ((repo_state(repo, "bridge"), base),)
    return SideTests("conformance", "Bridge conformance", argv, repo, minutes=1, kind="probe", gate=True, bases=bases)


def trial_of(bench: Bench, repo: Path, before: dict[str, Any], now: dict[str, Any]) -> tuple[Trial, SideResult]:
    """A trial of a checkout that says one thing before the change and another after it."""
    tests = side(repo, commit(repo, {"probe.json": json.dumps(before)}))
    commit(repo, {"probe.json": json.dumps(now), "change": "x"})
    bench.changes, bench.sides = (repo,), lambda _: (tests,)
    trial = bench.start(0)
    return trial, trial.sides[0]


def test_what_fails_without_the_change_is_blocked_and_the_levels_run(bench: Bench, repo: Path) -> None:
    trial, found = trial_of(bench, repo, BAD, BAD)
    assert (trial.verdict, found.verdict, found.boundary) == (Verdict.BLOCKED, Verdict.BLOCKED, None)
    assert found.reason.startswith("the state before the change (bridge ")
    assert found.reason.endswith(") fails in the same way: because")
    assert list(bench.out.glob("levels/0-*/run.log"))
    assert (bench.out / "sides/conformance/before/probe/probe.json").is_file()
    assert len(git(repo, "worktree", "list").splitlines()) == 1  # what was made is gone


def test_what_is_new_ends_the_trial(bench: Bench, repo: Path) -> None:
    trial, found = trial_of(bench, repo, GOOD, BAD)
    assert (trial.verdict, found.verdict, found.boundary) == (Verdict.FAIL, Verdict.FAIL, "provider")
    assert "this is new" in found.notes[-1]
    assert not list(bench.out.glob("levels/0-*/run.log"))


def test_the_command_is_the_same_on_another_tree(repo: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, ...]] = []
    tests = side(repo, git(repo, "rev-parse", "HEAD"))
    why, note = excuse(tests, BAD, tmp_path / "trees", seen.append)
    assert (why, "this is new" in note) == ("", True)  # a base that gave no Fail
    assert seen == [(*tests.argv[:-1], f"bridge={tmp_path / 'trees' / 'bridge'}")]


def test_a_base_that_cannot_be_had_excuses_nothing_and_is_named(repo: Path, tmp_path: Path) -> None:
    for tests in (side(repo, "f" * 40), replace(side(repo, ""), bases=())):
        why, note = excuse(tests, BAD, tmp_path / "trees", lambda _: BAD)
        assert (why, note.startswith("not compared with the state before the change")) == ("", True)
