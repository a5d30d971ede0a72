"""`seatrial bisect --trial`: each commit under a real trial, and the commit that breaks it found by the trial's verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.real.conftest import git
from tests.real.drive import PLAIN, call, hashes
from tests.real.test_change import TRAINER, UTILS, checkout, prepend

pytestmark = pytest.mark.real


def commit(root: Path, subject: str) -> str:
    """Everything as it lies there, as a commit."""
    git(root, "commit", "--quiet", "--all", "--message", subject)
    return git(root, "rev-parse", "HEAD").strip()


def test_commit_that_breaks_the_loop_is_found_by_trials(upstream: Path, tmp_path: Path) -> None:
    """Every commit touches a module that is loaded, so that none of the trials is vacuous; the second one breaks the trainer."""
    root = checkout(upstream, tmp_path)
    made = []
    for subject, path, line in [
        ("Harmless", UTILS, "# A harmless edit."),
        ("Break it", TRAINER, "raise RuntimeError('broken by the change')"),
        ("Harmless again", UTILS, "# Another harmless edit."),
    ]:
        prepend(root, path, line)
        made.append(commit(root, subject))
    before = hashes(root)

    out = tmp_path / "bisect"
    done = call(root, "bisect", "--good", made[0], "--out", out, "--trial", "--", "trl", "--level", "0", *PLAIN)

    assert done.returncode == 0, done.stdout
    rows = [json.loads(line) for line in (out / "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["commit"]: row["mark"] for row in rows} == {made[0]: "good", made[1]: "bad", made[2]: "bad"}
    (suspect,) = json.loads((out / "report.json").read_text(encoding="utf-8"))["answer"]["suspects"]
    assert suspect["commit"] == made[1]
    assert [row["failure"]["kind"] for row in rows if row["mark"] == "bad"] == ["trial", "trial"]
    assert all((out / row["directory"] / "trial" / "trial.json").is_file() for row in rows)
    assert hashes(root) == before
