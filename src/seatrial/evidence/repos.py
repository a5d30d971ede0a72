"""The repositories under test: their exact state, and how to restore it.

- `repo_state` reads; it writes nothing into the repository, not even a refreshed index.
- `write_repos` leaves `repos.json` and one `<name>.patch` per dirty repository in the evidence directory.
- Names are unique, because they name files. Names of files and branches, and URLs, are redacted before anything is stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from seatrial.evidence.git import commit_of, git, line, printable, top_level
from seatrial.evidence.packages import provided
from seatrial.evidence.patch import make_patch
from seatrial.evidence.redact import Redactor
from seatrial.evidence.worktree import gitlinks, is_checkout, read_status
from seatrial.files import write_bytes, write_json
from seatrial.model.errors import UserError
from seatrial.model.guarded import read_file
from seatrial.model.record import RepoState, SubmoduleState

REPOS_FILE = "repos.json"
_SHAPES = Redactor({})
_LATER = {"patch": None, "changed": (), "base": None, "companion": False, "synced": None}
"""Fields that are not read from the checkout alone, as `repo_state` has them."""


def repo_state(path: Path, name: str | None = None) -> RepoState:
    """The exact state of the checkout that `path` lies in."""
    root = top_level(path)
    if printable(str(root)) != str(root):
        raise UserError(f"{printable(str(root))}: the path is not valid UTF-8", "rename the directory")
    status, clear = read_status(root), Redactor(os.environ).text
    if _SHAPES.tokens(str(root)) != str(root):
        raise UserError(f"{clear(str(root))}: the path holds a secret", "rename the directory: its name is stored and shown")
    import_root, packages = provided(root)
    return RepoState(
        name=_file_name(name or root.name),
        path=str(root),
        commit=status.commit,
        branch=status.branch and clear(status.branch),
        dirty=tuple(clear(printable(path)) for path in status.dirty),
        submodules=tuple(item.model_copy(update={"path": clear(item.path)}) for item in _submodules(root, "")),
        packages=packages,
        import_root=import_root,
        origin=origin_url(root),
    )


def repo_states(paths: Sequence[Path]) -> tuple[RepoState, ...]:
    """The states of several checkouts; those with the same directory name get distinct names."""
    states: list[RepoState] = []
    for path in paths:
        state = repo_state(path)
        if any(other.path == state.path for other in states):
            raise UserError(f"{path}: the repository {state.path} is given twice", "name each repository of the change once")
        taken = {other.name.casefold() for other in states}
        number, name = 2, state.name
        while name.casefold() in taken:
            name = f"{state.name}-{number}"
            number += 1
        states.append(state.model_copy(update={"name": name}))
    return tuple(states)


def write_repos(states: Sequence[RepoState], evidence_dir: Path, redactor: Redactor) -> tuple[RepoState, ...]:
    """Write repos.json and the patches; returns the states with the name of their patch.

    Each repository is read again: if it moved since its state was taken, the evidence would not be of what runs.
    """
    names = [state.name.casefold() for state in states]
    if len(set(names)) != len(names):
        raise UserError(f"two repositories of the change have the same name: {', '.join(sorted(names))}", "give them distinct names")
    written = []
    for state in states:
        root = Path(state.path)
        patch = make_patch(root, redactor) if state.dirty else None
        if repo_state(root, state.name) != state.model_copy(update=dict(_LATER)):
            raise UserError(f"{root}: the repository changed while its state was recorded", "leave it alone and start again")
        if patch is not None:
            write_bytes(evidence_dir / f"{state.name}.patch", patch)
        written.append(state.model_copy(update={"patch": None if patch is None else f"{state.name}.patch"}))
    write_json(evidence_dir / REPOS_FILE, redactor.value([state.model_dump(mode="json") for state in written]))
    return tuple(written)


def differs(recorded: RepoState, evidence_dir: Path, redactor: Redactor) -> str | None:
    """How the checkout differs now from what `write_repos` recorded; None when it is the same to the byte."""
    root = Path(recorded.path)
    state = repo_state(root, recorded.name)
    for what in ("commit", "submodules", "dirty"):
        if getattr(state, what) != getattr(recorded, what):
            return f"another {what}" if what == "commit" else f"other {what} files" if what == "dirty" else f"other {what}"
    if recorded.patch and make_patch(root, redactor) != read_file(evidence_dir / recorded.patch):
        return "other contents of changed files"
    return None


def _submodules(root: Path, prefix: str) -> Iterator[SubmoduleState]:
    """Every submodule with the commit that is checked out (the recorded one when it is not initialised)."""
    for link in gitlinks(root):
        directory = root / link.path
        head = commit_of(directory, "HEAD") if is_checkout(root, link.path) else None
        state: Literal["clean", "uninitialised", "other-commit", "conflict"]
        if link.conflict:
            state = "conflict"
        elif head is None:
            state = "uninitialised"
        else:
            state = "clean" if head == link.commit else "other-commit"
        yield SubmoduleState(path=printable(prefix + link.path), commit=head or link.commit, state=state)
        if head is not None:
            yield from _submodules(directory, f"{prefix}{link.path}/")


def origin_url(root: Path) -> str | None:
    """The URL of origin without credentials."""
    url = without_credentials(line(git(root, "config", "--get", "remote.origin.url", ok=(0, 1))))
    return Redactor(os.environ).text(url) or None


def without_credentials(url: str) -> str:
    """A URL that can be stored; `ssh://git@host` keeps its user, which is no secret."""
    stripped = re.sub(r"^(ssh://[^/@:]+):[^/@]*@", r"\1@", url)
    return re.sub(r"^((?!ssh)[a-z][a-z0-9+.-]*://)[^/]*@", r"\1", stripped)


def _file_name(name: str) -> str:
    """A name that is safe as a file name on any machine."""
    return re.sub(r"[^\w.-]+", "_", name).strip(".") or "repository"
