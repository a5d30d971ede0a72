"""Where results come from: commit, branch, uncommitted changes and the name of the project.

- Nothing that the checkout configures runs (see `seatrial.evidence.git`).
- Files that git does not know count as changes (a conftest.py among them changes what is measured), but for what our own plugins
  write there.
- No git, no repository, no commit yet: None, which is no error. A git that fails or hangs is a note.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from seatrial.evidence.git import command_line, environment
from seatrial.evidence.secret_shapes import tokens
from seatrial.evidence.worktree import gitlinks, is_checkout, read_status
from seatrial.model.errors import UserError

GIT_S = 20
OURS = re.compile(r"\? (?:.*/)?(?:unit_results(?:\.json|/)|\.seatrial-select)")
"""What the plugins leave, as git lists it."""


class Origin(NamedTuple):
    """What was tested."""

    project: str
    commit: str | None = None
    branch: str | None = None
    dirty: bool | None = None
    notes: tuple[str, ...] = ()


def read_origin(root: Path) -> Origin:
    """Of the checkout that holds `root`."""
    options = ("--porcelain=v2", "--branch", "--untracked-files=normal", "--ignore-submodules=dirty")
    call, name = command_line(root, "status", *options), project(root)
    try:
        env = environment(root)
        done = subprocess.run(
            call, env=env, capture_output=True, text=True, errors="replace", check=False, timeout=GIT_S, stdin=subprocess.DEVNULL
        )
        inside = _dirty_submodules(root)
    except FileNotFoundError:
        return Origin(name)
    except (OSError, subprocess.TimeoutExpired, UserError) as error:
        return Origin(name, notes=(f"the commit is not known: {error}",))
    if done.returncode:
        absent = "not a git repository" in done.stderr
        return Origin(name, notes=() if absent else (f"the commit is not known: {done.stderr.strip()[:300]}",))
    lines = done.stdout.splitlines()
    head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    commit, branch = head.get("branch.oid"), tokens(head.get("branch.head", "")) or None
    dirty = inside or any(not line.startswith("#") and not OURS.match(line) for line in lines)
    return Origin(name, None if commit == "(initial)" else commit, None if branch == "(detached)" else branch, dirty)


def _dirty_submodules(root: Path) -> bool:
    """Whether something is changed inside a submodule; git is not left to look there by itself."""
    top = next((above for above in (root, *root.parents) if (above / ".git").exists()), None)
    if top is None or not (top / ".gitmodules").is_file():
        return False
    return any(is_checkout(top, link.path) and read_status(top / link.path).dirty for link in gitlinks(top))


def project(root: Path) -> str:
    """The name in the nearest pyproject.toml of the checkout, else that of its directory."""
    for directory in (root, *root.parents):
        name = _named(directory / "pyproject.toml")
        if name:
            return name
        if (directory / ".git").exists():
            return directory.name
    return root.name


def _named(file: Path) -> str | None:
    """The name in a pyproject.toml; None where there is none, and of a damaged one, which is for its own tools to tell."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    from seatrial.model.guarded import parse_toml

    try:
        name = parse_toml(text).get("project", {}).get("name")
    except (ValueError, AttributeError):
        return None
    return name if isinstance(name, str) else None
