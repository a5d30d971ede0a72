"""Automatic imports: what a command does with the run that it just ended.

- Never raises, and never changes a verdict: whatever goes wrong becomes the line that is said.
- `SEATRIAL_HISTORY=off` says nothing and keeps nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from seatrial.model.errors import BlockedError, UserError
from seatrial.regress.history import place
from seatrial.regress.history.record import Run
from seatrial.regress.history.switch import is_off


@dataclass(frozen=True, slots=True)
class Looked:
    """The state of a checkout before something ran on it: what the run writes there must not make it look changed."""

    repo: Path
    commit: str | None = None
    branch: str | None = None
    clean: bool | None = None


def look(repo: Path) -> Looked:
    """The state of now, as far as it can be read; nothing is read when history is off. Never raises."""
    if is_off():
        return Looked(repo)
    from seatrial.evidence.repos import repo_state

    try:
        state = repo_state(repo)
    except (UserError, BlockedError, OSError):
        return Looked(repo)
    return Looked(repo, state.commit, state.branch, not state.dirty)


def keep(
    path: Path, *, project: str | None = None, name: str | None = None, looked: Looked | None = None, passed: bool | None = None
) -> str:
    """Import the runs at `path`; the quiet line, empty when history is off.

    `looked` is the checkout that the run ran on, and `passed` its outcome, for files that name none.
    """
    if is_off():
        return ""
    try:
        return _keep(path, project, name, looked, passed)
    except (UserError, BlockedError) as error:
        return f"history: not kept: {error.message}"
    except Exception as error:  # noqa: BLE001 - a defect here is told as well, and must not become the exit code of a trial
        return f"history: not kept: {type(error).__name__}: {error}"


def keep_results(path: Path, repo: Path | None = None) -> str:
    """Import unit_results.json at the end of a test session; the quiet line, or empty.

    The file says all by itself, but it may lie in another repository: `repo` is where the session ran, whose branches and
    configuration count.
    """
    return keep(path, looked=Looked(repo) if repo is not None else None)


def _keep(path: Path, project: str | None, name: str | None, looked: Looked | None, passed: bool | None) -> str:
    from seatrial.regress.history.adding import Stated, add
    from seatrial.regress.history.store import Store

    found = place.settings(looked.repo if looked is not None else path if path.is_dir() else path.parent)
    if found.store is None:
        found = place.settings(Path.cwd())
    stated = Stated(project=project, name=name, passed=passed, here=True)
    if looked is not None:
        stated = replace(stated, commit=looked.commit, branch=looked.branch, clean=looked.clean, repo=looked.repo)
    with Store(place.place(None, found), write=True) as store:
        done = list(add(store, path, stated, found.trusted))
        errors = [one for one in done if one.error]
        runs = [one.run for one in done if one.run]
        text = f"history: {_said(runs)} in {store.path}"
        return text if not errors else f"{text}; {errors[0].line()}"


def _said(runs: list[Run]) -> str:
    if len(runs) == 1:
        why = "" if runs[0].trusted else f" (no baseline: {runs[0].why_untrusted})"
        return f"kept as run {runs[0].id}{why}"
    return f"{len(runs)} runs kept"
