"""Which way the environments of a bisect are made.

- As asked, or by the lock that the commit has: `uv.lock` where uv is installed, else `requirements.lock`, else `requirements.txt`.
- A commit without any is run in the caller's environment. A `uv.lock` without uv is an error: what it pins must not be passed over.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from seatrial.evidence.git import git
from seatrial.model.errors import UserError
from seatrial.regress.bisect.environments.builds import find_uv
from seatrial.regress.bisect.record import EnvironmentPlan

_PIP_LOCKS = ("requirements.lock", "requirements.txt")
_UV_LOCK = "uv.lock"


def detect(git_dir: Path, commit: str, asked: str | None) -> EnvironmentPlan:
    """How environments are made: as asked (`none`, `pip:PATH`, `uv`, `uv:PATH`), or by the lock that the commit has."""
    kind, _, lock = (asked or "").partition(":")
    if asked is None:
        return _by_lock(git_dir, commit)
    if asked == "none":
        return EnvironmentPlan(kind="none")
    if kind == "uv":
        find_uv()
        return EnvironmentPlan(kind="uv", lock=_existing(git_dir, commit, lock or _UV_LOCK))
    if kind == "pip" and lock:
        return EnvironmentPlan(kind="pip", lock=_existing(git_dir, commit, lock))
    raise UserError(f"--env: unknown way `{asked}`", "use none, pip:PATH (a requirements file of the repository), uv or uv:PATH")


def _by_lock(git_dir: Path, commit: str) -> EnvironmentPlan:
    found = [name for name in (_UV_LOCK, *_PIP_LOCKS) if _has(git_dir, commit, name)]
    if _UV_LOCK in found and shutil.which("uv"):
        return EnvironmentPlan(kind="uv", lock=_UV_LOCK)
    if pip := [name for name in found if name != _UV_LOCK]:
        return EnvironmentPlan(kind="pip", lock=pip[0])
    if found:
        fix = "install it (pip install uv), or use the present environment for all commits: --env none"
        raise UserError(f"{commit[:12]} has a {_UV_LOCK}, and uv is not on PATH", fix)
    return EnvironmentPlan(kind="none")


def _existing(git_dir: Path, commit: str, lock: str) -> str:
    if not _has(git_dir, commit, lock):
        raise UserError(f"--env: {lock} does not exist at {commit[:12]}", "name a lock of the repository, by its path from the top")
    return lock


def _has(git_dir: Path, commit: str, path: str) -> bool:
    """Whether the commit has this file (a link counts)."""
    return b" blob " in git(git_dir, "ls-tree", "-z", "--full-tree", commit, "--", path)
