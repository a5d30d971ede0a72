"""Automatic imports: what a command does with the run that it just ended.

- Never raises, and never changes a verdict: whatever goes wrong becomes the line that is said.
- `SEATRIAL_HISTORY=off` says nothing and keeps nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.model.errors import BlockedError, UserError
from seatrial.regress.history import place
from seatrial.regress.history.record import Run

if TYPE_CHECKING:
    from seatrial.regress.history.adding import Stated


def keep(path: Path, *, project: str | None = None, name: str | None = None, repo: Path | None = None, passed: bool | None = None) -> str:
    """Import the runs at `path`; the quiet line, empty when history is off.

    `repo` is the checkout that the run ran on, in its state of now: right for a run that ended this moment, and only there.
    `passed` is the outcome, for files that name none.
    """
    if place.is_off():
        return ""
    try:
        return _keep(path, project, name, repo, passed)
    except (UserError, BlockedError) as error:
        return f"history: not kept: {error.message}"
    except Exception as error:  # noqa: BLE001 - a defect here is told as well, and must not become the exit code of a trial
        return f"history: not kept: {type(error).__name__}: {error}"


def keep_results(path: Path) -> str:
    """Import unit_results.json at the end of a test session, which says all by itself; the quiet line, or empty."""
    return keep(path)


def _keep(path: Path, project: str | None, name: str | None, repo: Path | None, passed: bool | None) -> str:
    from seatrial.regress.history.adding import Stated, add
    from seatrial.regress.history.store import Store

    found = place.settings(path if path.is_dir() else path.parent)
    if found.store is None:
        found = place.settings(Path.cwd())
    stated = _state(repo, Stated(project=project, name=name, passed=passed, repo=repo))
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


def _state(repo: Path | None, stated: Stated) -> Stated:
    """With the state of the checkout, as far as it can be read."""
    from dataclasses import replace

    from seatrial.evidence.repos import repo_state

    if repo is None:
        return stated
    try:
        state = repo_state(repo)
    except UserError:
        return stated
    return replace(stated, commit=state.commit, branch=state.branch, clean=not state.dirty)
