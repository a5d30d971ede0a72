"""A gate that failed, beside the state before the change: only what is new ends the trial, and nothing becomes a Pass."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.loop import SideTests
from seatrial.core.records import SideResult, Trial
from seatrial.core.verdict import Verdict
from seatrial.evidence.repos import repo_state
from seatrial.trial.pre_tests import excuse, failures, fresh
from tests.trial.conftest import Bench, commit, git

pytestmark = pytest.mark.slow

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
    assert (fresh(now, before) is None) is excused


def missed(value: object, threshold: str = "<= 1.0e-05", message: str = "") -> dict[str, Any]:
    """A probe with one missed check."""
    check = {"name": "logits", "passed": False, "value": value, "threshold": threshold, "message": message}
    return probe({"rung": "parity", "verdict": "Fail", "reason": "r", "checks": [check]})


@pytest.mark.parametrize(
    ("now", "before", "excused"),
    [
        (missed("9.9e-03"), missed("1.0e-03"), True),
        (missed("1.1e-02"), missed("1.0e-03"), False),
        (missed(2.5), missed(0.5), True),
        (missed(5.5), missed(0.5), False),
        (missed("1.0e-06"), missed("1.0e-03"), True),
        (missed("0.02 of 0.1", "<= 16 x noise"), missed("0.001 of 0.1", "<= 16 x noise"), False),
        (missed("9.7e-01", ">= 0.99"), missed("9.8e-01", ">= 0.99"), True),
        (missed("8.2e-01", ">= 0.99"), missed("9.8e-01", ">= 0.99"), False),
        (missed("2", "0"), missed("2", "0"), True),
        (missed("3", "0"), missed("2", "0"), False),  # the third tensor may be the change's
        (missed("13/26 equal", "all"), missed("13/26 equal", "all"), True),
        (missed("14/26 equal", "all"), missed("13/26 equal", "all"), True),
        (missed("12/26 equal", "all"), missed("13/26 equal", "all"), False),
        (missed("12 of 26 equal", "all"), missed("13 of 26 equal", "all"), False),
        (missed("NaN"), missed("NaN"), True),
        (missed("NaN"), missed("1.0e-03"), False),
        (missed("1.0e-03"), missed("NaN"), False),
        (missed("Infinity"), missed("1.0e-03"), False),
        (missed("no facts", "all"), missed("13/26 equal", "all"), False),
        (missed(None), missed(None), True),
    ],
)
def test_the_same_check_may_not_be_much_worse(now: dict[str, Any], before: dict[str, Any], excused: bool) -> None:
    assert (fresh(now, before) is None) is excused


@pytest.mark.parametrize(
    ("now", "before", "excused"),
    [
        ("first at layers.0.q_proj: differs by 5.0e-03", "first at layers.0.q_proj: differs by 4.1e-03", True),
        ("first at layers.1.q_proj: differs by 5.0e-03", "first at layers.0.q_proj: differs by 5.0e-03", False),
        ("layers.0.k_proj.bias", "layers.0.q_proj.bias", False),
        ("cannot load /new/tree/x after 4 attempts", "cannot load /old/y after 4 attempts", True),
    ],
)
def test_another_tensor_is_new_and_another_path_is_not(now: str, before: str, excused: bool) -> None:
    assert (fresh(missed("1", message=now), missed("1", message=before)) is None) is excused
    assert (fresh(probe(rung("tp", reason=now)), probe(rung("tp", reason=before))) is None) is excused
    assert (fresh(probe(reason=now), probe(reason=before)) is None) is excused


def test_a_probe_that_did_not_fail_before_excuses_nothing() -> None:
    assert fresh(BAD, None) == failures(BAD)[0]


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
    assert "this is new: qwen2: tp: a" in found.notes[-1]
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


@pytest.mark.parametrize("found", [probe(rung("tp", reason="raised: ImportError: x")), probe(reason="cannot be imported: x")])
def test_what_was_not_measured_and_not_compared_is_not_held_against_the_change(repo: Path, tmp_path: Path, found: dict[str, Any]) -> None:
    for tests in (side(repo, "f" * 40), replace(side(repo, ""), bases=())):
        why, note = excuse(tests, found, tmp_path / "trees", lambda _: found)
        assert (why.startswith("nothing that failed was measured, and nothing was compared"), note) == (True, "")
    both = probe(rung("tp", "a"), rung("sp", reason="raised"))
    assert excuse(replace(side(repo, ""), bases=()), both, tmp_path / "trees", lambda _: None)[0] == ""


def test_a_checkout_that_is_its_base_has_no_change_to_blame(repo: Path, tmp_path: Path) -> None:
    head = git(repo, "rev-parse", "HEAD")
    same = repo_state(repo, "bridge").model_copy(update={"base": head})
    why, _ = excuse(replace(side(repo, head), bases=((same, head),)), BAD, tmp_path / "trees", lambda _: None)
    assert why.startswith("nothing differs from the base")


def test_nothing_is_new_beside_a_base_that_is_blocked(bench: Bench, repo: Path) -> None:
    trial, found = trial_of(bench, repo, probe(verdict="Blocked"), BAD)
    assert (trial.verdict, found.verdict) == (Verdict.FAIL, Verdict.FAIL)
    assert "not compared with the state before the change" in found.notes[-1]
    assert "this is new" not in found.notes[-1]
