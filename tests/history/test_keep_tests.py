"""A real test session and a real functional run end in the history by themselves, and say so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.evidence.git import git
from tests.functional.tree import make_tree
from tests.history.histories import history

pytestmark = pytest.mark.slow

TEST = "def test_a(tracker):\n    tracker.track('loss', 0.5)\n"
WHO = ("-c", "user.name=a", "-c", "user.email=a@b.c")


def project(root: Path) -> Path:
    """A clean checkout on main with one tracked test."""
    root.mkdir()
    (root / "test_it.py").write_text(TEST, encoding="utf-8")
    (root / ".gitignore").write_text("*\n!test_it.py\n!.gitignore\n", encoding="utf-8")
    (root / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "test_it.py", ".gitignore")
    git(root, *WHO, "commit", "-q", "-m", "one")
    return root


def session(root: Path, store: str) -> subprocess.CompletedProcess[str]:
    """pytest, as a process."""
    env = {**os.environ, "SEATRIAL_HISTORY": store}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_session_that_tracked_is_kept_and_shown(tmp_path: Path) -> None:
    root, store = project(tmp_path / "p"), tmp_path / "h.sqlite"
    done = session(root, str(store))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "history: kept as run 1 in" in done.stdout
    shown = history("show", "test_it::test_a/loss", store=store, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    line = next(line for line in shown.stdout.splitlines() if " main " in line)
    assert "0.5" in line
    assert line.endswith("trusted")
    assert "unknown machine" not in history("runs", store=store, cwd=tmp_path).stdout


def test_importing_its_files_again_adds_nothing(tmp_path: Path) -> None:
    root, store = project(tmp_path / "p"), tmp_path / "h.sqlite"
    session(root, str(store))
    again = history("import", str(root / "unit_results.json"), str(root / "unit_results"), store=store, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("there already as run 1") == 2


def test_history_that_is_off_says_nothing(tmp_path: Path) -> None:
    done = session(project(tmp_path / "p"), "off")
    assert done.returncode == 0
    assert "history:" not in done.stdout


def test_a_store_that_cannot_be_written_is_said_and_does_not_fail_the_session(tmp_path: Path) -> None:
    broken = tmp_path / "h.sqlite"
    broken.write_text("words " * 1000, encoding="utf-8")
    done = session(project(tmp_path / "p"), str(broken))
    assert done.returncode == 0
    assert "history: run not recorded: " in done.stdout


def test_a_functional_script_is_kept_with_its_outcome(tmp_path: Path) -> None:
    tree = make_tree(tmp_path)
    script = tree.write("plain.sh", """echo '{"loss": {"1": 2.0, "2": 1.0}}' > metrics.json""")
    store = tmp_path / "h.sqlite"
    env = {**os.environ, "SEATRIAL_HISTORY": str(store)}
    command = [sys.executable, "-m", "seatrial.cli.main", "functional", "run", str(script), "--metrics", "metrics.json", "--steps", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], cwd=tree.checkout, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "history: kept as run 1" in done.stderr
    listed = history("runs", store=store, cwd=tmp_path).stdout.splitlines()[1]
    assert "functional plain" in listed
    assert " yes " in listed
