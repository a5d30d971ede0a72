"""Where results come from: commit, branch, uncommitted changes and the name of the project.

- One `git` process. Files that git does not know count as changes (a conftest.py among them changes what is measured), but for what our
  own plugins write there.
- No git, no repository, no commit yet: None, which is no error. A git that fails or hangs is a note.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

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
    call = ["git", "-C", str(root), "status", "--porcelain=v2", "--branch", "--untracked-files=normal"]
    name = project(root)
    try:
        done = subprocess.run(call, capture_output=True, text=True, errors="replace", check=False, timeout=GIT_S, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return Origin(name)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Origin(name, notes=(f"the commit is not known: {error}",))
    if done.returncode:
        absent = "not a git repository" in done.stderr
        return Origin(name, notes=() if absent else (f"the commit is not known: {done.stderr.strip()[:300]}",))
    lines = done.stdout.splitlines()
    head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    commit, branch = head.get("branch.oid"), head.get("branch.head")
    dirty = any(not line.startswith("#") and not OURS.match(line) for line in lines)
    return Origin(name, None if commit == "(initial)" else commit, None if branch == "(detached)" else branch, dirty)


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
    import tomllib

    try:
        name = tomllib.loads(text).get("project", {}).get("name")
    except (ValueError, AttributeError):
        return None
    return name if isinstance(name, str) else None
