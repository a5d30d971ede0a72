"""Where results come from: commit, branch, uncommitted changes and the name of the project.

- One `git` process. Files that git does not know count as changes (a conftest.py among them changes what is measured), but for what our
  own plugins write there.
- No git, no repository, no commit yet: None, which is no error. A git that fails or hangs is a note.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
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
        try:
            with (directory / "pyproject.toml").open("rb") as stream:
                name = tomllib.load(stream).get("project", {}).get("name")
        except (OSError, ValueError, AttributeError):
            name = None  # a damaged one is for its own tools to tell
        if isinstance(name, str) and name:
            return name
        if (directory / ".git").exists():
            return directory.name
    return root.name
