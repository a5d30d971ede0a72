"""What is advised when an end does not hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.bisect.bisect_records import BisectPlan, BisectRun, EnvironmentPlan, Failure, Mark, Repo, SkipKind
from seatrial.bisect.search_loop import for_failing_good, for_skip
from tests.bisect.prepared import plan_of
from tests.bisect.repos import Commit, build


def row(reason: str, **more: Any) -> BisectRun:
    return BisectRun(number=1, stage="ends", round=0, point="p", commit="c" * 40, reason=reason, **more)


def skip(kind: SkipKind, reason: str, name: str = "good", **more: Any) -> tuple[str, str]:
    return for_skip(plan_of("true", **more), row(reason, mark=Mark.SKIP, skip=kind), name)


@pytest.mark.parametrize(
    ("kind", "reason", "fix"),
    [
        (SkipKind.BUILD_COMMAND, "make: no rule: no rule", "correct --build, or name another commit with --good"),
        (SkipKind.BUILD, "requirements.txt: installing failed: nothing found", "with --env, or another version with --python"),
        (SkipKind.UNEDITED, "run.sh, which is to be edited, does not exist at this commit", "correct the file of --edit"),
        (SkipKind.ABSENT, "run.sh does not exist at this commit", "bring it with --patch"),
        (SkipKind.COMMAND, "exit 125", "name another commit with --good, or correct the command"),
    ],
)
def test_skips_have_a_fix_of_their_own(kind: SkipKind, reason: str, fix: str) -> None:
    why, said = skip(kind, reason)
    assert why == reason
    assert fix in said


def test_reason_that_says_what_helps_is_not_said_twice() -> None:
    why, fix = skip(SkipKind.BUILD, "pytest is not there; add it with --with pytest, or --env none")
    assert why == "pytest is not there"
    assert fix == "add it with --with pytest, or --env none; or name another commit with --good"


def test_pattern_that_matches_nothing() -> None:
    _, fix = skip(SkipKind.OTHER_FAILURE, "exit 1: KeyError; its log does not hold 'x'", "bad", failure="x")
    assert fix.startswith("correct --failure")
    assert fix.endswith("--bad")


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Repo:
    path = tmp_path_factory.mktemp("advice") / "loop"
    ids = build(path, [Commit({"a.py": "1\n"}), Commit({"a.py": "2\n"})])
    (path / "new_test.py").write_text("")
    return Repo(name="loop", path=str(path), good=ids[0], bad=ids[1])


def failing(
    repo: Repo,
    tmp_path: Path,
    log: str,
    kind: Any = "exit",
    cause: str = "x",
    env: str = "pip",
    command: str = "true",
    *,
    missed: bool = False,
) -> str:
    environment = EnvironmentPlan.model_validate({"kind": env, "lock": "requirements.txt"})
    plan: BisectPlan = plan_of(*command.split()).model_copy(update={"repos": (repo,), "environment": environment})
    (tmp_path / "run.log").write_text(log)
    failed = Failure(kind=kind, missed=missed, cause=cause, exit_code=1, shown=cause)
    return for_failing_good(plan, row("exit 1", mark=Mark.BAD, failure=failed), tmp_path / "run.log")


def test_good_end_that_fails(repo: Repo, tmp_path: Path) -> None:
    assert "--minutes (now 60)" in failing(repo, tmp_path, "", kind="timeout")
    assert "threshold" in failing(repo, tmp_path, "", kind="check", missed=True, cause="the check is missed")
    assert "--with pytest" in failing(repo, tmp_path, "/venv/bin/python: No module named pytest\n")
    assert "--with yaml" in failing(repo, tmp_path, "ModuleNotFoundError: No module named 'yaml.x'\n")
    assert "install yaml where you call from" in failing(repo, tmp_path, "No module named 'yaml'\n", env="none")
    plain = failing(repo, tmp_path, "ValueError: no\n")
    assert "name an older commit with --good" in plain
    assert "python -I" not in plain


def test_file_that_is_not_committed(repo: Repo, tmp_path: Path) -> None:
    said = failing(repo, tmp_path, "file or directory not found: new_test.py::test_it\n", command="pytest new_test.py::test_it")
    assert said.startswith("new_test.py is not committed")
    # What the log does not speak of, or what is committed, is not blamed.
    assert "not committed" not in failing(repo, tmp_path, "ValueError\n", command="pytest new_test.py")
    assert "not committed" not in failing(repo, tmp_path, "a.py: ValueError\n", command="python a.py")
