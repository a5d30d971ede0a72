"""Small git repositories to look at."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

Files = Mapping[str, str | bytes]
_SETTINGS = (
    "user.name=Test",
    "user.email=test@example.org",
    "protocol.file.allow=always",
    "init.defaultBranch=main",
    "commit.gpgsign=false",
)


def run_git(repo: Path, *arguments: str) -> str:
    """Run git for a test; fails the test when git fails."""
    settings = [part for setting in _SETTINGS for part in ("-c", setting)]
    done = subprocess.run(["git", *settings, "-C", os.fspath(repo), *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode("utf-8", "surrogateescape").strip()


def put(root: Path, files: Files) -> None:
    """Write files below `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def commit(repo: Path, files: Files, message: str = "change") -> str:
    """Commit files and return the commit."""
    put(repo, files)
    run_git(repo, "add", "-A")
    run_git(repo, "commit", "-q", "--allow-empty", "-m", message)
    return run_git(repo, "rev-parse", "HEAD")


MakeRepo = Callable[..., Path]


@pytest.fixture
def make_repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRepo:
    """Makes repositories with one commit; the machine's own git configuration is kept out."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")

    def make(name: str = "repo", files: Files | None = None) -> Path:
        root = tmp_path / name
        root.mkdir(parents=True)
        run_git(root, "init", "-q")
        commit(root, files if files is not None else {"a.txt": "one\n", "pkg/__init__.py": ""}, "first")
        return root

    return make
