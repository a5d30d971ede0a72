"""Git fails in the user's words."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from seatrial.core.errors import UserError
from seatrial.evidence import git as module
from seatrial.evidence.git import commit_of, fields, git, printable, text, top_level
from seatrial.evidence.repos import repo_state
from seatrial.runtime.command import Answer, NoAnswerError
from tests.evidence.conftest import MakeRepo, run_git


def test_not_a_repository(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a git repository") as error:
        top_level(tmp_path)
    assert str(tmp_path) in error.value.message
    assert "init" in error.value.fix


def test_no_such_directory_and_no_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        top_level(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not a directory"):
        top_level(tmp_path / "file")


def test_no_commits_yet(tmp_path: Path) -> None:
    run_git(tmp_path, "init", "-q")
    with pytest.raises(UserError, match="no commits yet") as error:
        repo_state(tmp_path)
    assert "commit" in error.value.fix


def test_a_bare_repository(tmp_path: Path) -> None:
    run_git(tmp_path, "init", "-q", "--bare")
    with pytest.raises(UserError, match="without a work tree"):
        top_level(tmp_path)


def test_git_is_missing(make_repo: MakeRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_repo()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="git is not installed"):
        top_level(root)


def test_git_hangs(make_repo: MakeRepo) -> None:
    root = make_repo()
    with (
        patch.object(module, "run_command", side_effect=NoAnswerError("late", late=True)),
        pytest.raises(UserError, match="did not finish"),
    ):
        git(root, "status")


@pytest.mark.parametrize(
    ("stderr", "message", "fix"),
    [
        (
            "fatal: detected dubious ownership in repository at '/x y'\nTo add an exception for this directory, call:\n\n"
            "\tgit config --global --add safe.directory '/x y'",
            "another user owns",
            "git config --global --add safe.directory '/x y'",
        ),
        ('error: open("a"): Permission denied', "cannot read", "ls -la"),
        ("something else", "something else", "run it by hand"),
        ("", "no message", "run it by hand"),
    ],
)
def test_failures_name_the_repository_and_the_fix(make_repo: MakeRepo, stderr: str, message: str, fix: str) -> None:
    root = make_repo()
    with (
        patch.object(module, "run_command", return_value=Answer(128, b"", stderr.encode())),
        pytest.raises(UserError, match=message) as error,
    ):
        git(root, "status")
    assert str(root) in error.value.message
    assert fix in error.value.fix


def test_a_foreign_checkout_is_refused_with_the_fix(make_repo: MakeRepo) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    root = make_repo()
    os.chown(root, 12345, 12345)
    os.chown(root / ".git", 12345, 12345)
    with pytest.raises(UserError, match="another user owns") as error:
        repo_state(root)
    assert error.value.fix == f"git config --global --add safe.directory {root}"


def test_a_torn_list_is_an_error() -> None:
    assert fields(b"") == []
    assert fields(b"a\0b c\0") == ["a", "b c"]
    with pytest.raises(UserError, match="torn"):
        fields(b"a\0b")


def test_undecodable_bytes_survive() -> None:
    assert text(b"\xe9").encode("utf-8", "surrogateescape") == b"\xe9"
    assert printable(text(b"a\xe9")) == "a\\xe9"


def test_commits_are_found_by_name(make_repo: MakeRepo) -> None:
    root = make_repo()
    assert commit_of(root, "main") == run_git(root, "rev-parse", "HEAD")
    assert commit_of(root, "nowhere") is None
    assert commit_of(root, "--help") is None
    assert commit_of(root, "HEAD:a.txt") is None


def test_the_environment_is_safe(make_repo: MakeRepo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "rm")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "0")
    environment = module.environment(make_repo(), Path("/i"))
    assert "GIT_EXTERNAL_DIFF" not in environment
    assert environment["GIT_CONFIG_COUNT"] == "0"
    assert (environment["GIT_OPTIONAL_LOCKS"], environment["LC_ALL"], environment["GIT_INDEX_FILE"]) == ("0", "C", "/i")
