"""The base of a change beside it, with real training: identical where the change computes the same, and the first difference where not."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.core.files import read_text
from seatrial.core.verdict import ExitCode, Verdict
from tests.real.conftest import git
from tests.real.drive import PLAIN, run
from tests.real.test_change import BASELINE, INIT, TRAINER, UTILS, checkout, edit, prepend

pytestmark = pytest.mark.real


def test_the_base_runs_once_and_shows_what_a_change_does(upstream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comment is identical; a factor of 1.001 on the advantages is a Fail, and differs from step 1 on."""
    monkeypatch.setenv("SEATRIAL_BASE_CACHE", str(tmp_path / "cache"))
    root = checkout(upstream, tmp_path)
    prepend(root, UTILS, "# A harmless edit.")
    same = run(tmp_path, "trl", "--level", "0", "--change", root, "--expect", "identical", *PLAIN, name="same")
    assert same.code == ExitCode.PASS, same.output
    beside = same.trial.baseline
    assert beside is not None
    assert (beside.origin, [one.outcome for one in beside.bits], beside.reused) == ("base", ["identical"], ())
    assert beside.bits[0].compared > 100
    assert "base: level 0: identical to the base" in same.output
    edit(root, TRAINER, BASELINE, "            advantages = (rewards - mean_grouped_rewards) * 1.001\n")
    other = run(tmp_path, "trl", "--level", "0", "--change", root, "--expect", "identical", *PLAIN, name="other")
    assert other.code == ExitCode.FAIL, other.output
    found, result = other.trial.baseline, other.level(0)
    assert found is not None
    assert (found.bits[0].outcome, found.reused) == ("differs", (0,))
    assert found.bits[0].difference is not None
    assert found.bits[0].difference.step == 1
    assert (result.verdict, result.own) == (Verdict.FAIL, None)
    assert result.reason.startswith("missed: step proof: advantage"), "a thousandth on the advantages is seen without the base, too"
    assert "first differs at step 1" in read_text(other.directory / "summary.md")
    assert "first differs at step 1" in read_text(other.directory / "report.html")
    assert git(root, "worktree", "list").count("\n") == 1


def test_a_release_that_never_worked_is_not_held_against_a_change(upstream: Path, tmp_path: Path) -> None:
    """The base cannot be imported, and neither can the change: Blocked; nor can a clean clone of it without a base."""
    root = checkout(upstream, tmp_path)
    prepend(root, INIT, "from torch import no_such_name")
    git(root, "commit", "--quiet", "--all", "--message", "a release for another torch")
    git(root, "remote", "remove", "origin")
    clean = run(tmp_path, "trl", "--level", "0", "--change", root, name="clean")
    assert (clean.code, clean.level(0).verdict) == (ExitCode.BLOCKED, Verdict.BLOCKED), clean.output
    assert "no base is known" in clean.level(0).reason
    assert "--base REV" in read_text(clean.directory / "summary.md")
    prepend(root, UTILS, "# A harmless edit.")
    both = run(tmp_path, "trl", "--level", "0", "--change", root, name="both")
    assert (both.code, both.level(0).verdict) == (ExitCode.BLOCKED, Verdict.BLOCKED), both.output
    assert "fails in the same way" in both.level(0).reason
