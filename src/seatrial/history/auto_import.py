"""Where the store is, which branches are trusted, and the automatic import at the end of a command.

- Store: `--store`, `$SEATRIAL_HISTORY`, `[history] store` of the nearest seatrial.toml, then `$XDG_DATA_HOME/seatrial/history.sqlite`.
- `auto_import` never raises and never changes a verdict: an error becomes the line that it returns. `SEATRIAL_HISTORY=off` disables it.
- Light at import, because every run and every tracked test session ends here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import is_file

VARIABLE, OFF = "SEATRIAL_HISTORY", "off"


def is_off(environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get(VARIABLE, "").lower() == OFF


TRUSTED = ("main", "master", "release/*")


class HistorySettings(NamedTuple):
    """`[history]` of the nearest seatrial.toml."""

    store: Path | None = None
    trusted: tuple[str, ...] = TRUSTED


def history_settings(start: Path) -> HistorySettings:
    """The section that holds for `start`; defaults where there is none."""
    file = next(
        (folder / "seatrial.toml" for folder in (start.absolute(), *start.absolute().parents) if is_file(folder / "seatrial.toml")), None
    )
    if file is None:
        return HistorySettings()
    from seatrial.core.config import load

    section = load(file).config.history
    return HistorySettings(file.parent / Path(section.store).expanduser() if section.store else None, tuple(section.trusted))


def store_path(asked: Path | None, found: HistorySettings, environment: Mapping[str, str] = os.environ) -> Path:
    if asked is not None:
        return asked
    named = environment.get(VARIABLE, "")
    if named and named.lower() != OFF:
        return Path(named).expanduser()
    if found.store is not None:
        return found.store
    if named:
        raise UserError(f"{VARIABLE}={named} turns the history off", f"name a store with --store, or unset {VARIABLE}")
    data = Path(environment.get("XDG_DATA_HOME", ""))
    return (data if data.is_absolute() else Path.home() / ".local" / "share") / "seatrial" / "history.sqlite"


@dataclass(frozen=True, slots=True)
class CheckoutState:
    """The state of a checkout before something ran on it: what the run writes there must not make it look changed."""

    repo: Path
    commit: str | None = None
    branch: str | None = None
    clean: bool | None = None


def checkout_state(repo: Path) -> CheckoutState:
    """The state of now, as far as it can be read; nothing is read when history is off. Never raises."""
    if is_off():
        return CheckoutState(repo)
    from seatrial.evidence.repos import repo_state

    try:
        state = repo_state(repo)
    except (UserError, BlockedError, OSError):
        return CheckoutState(repo)
    return CheckoutState(repo, state.commit, state.branch, not state.dirty)


def auto_import(
    path: Path, *, project: str | None = None, name: str | None = None, looked: CheckoutState | None = None, passed: bool | None = None
) -> str:
    """Import the runs at `path`; the quiet line, empty when history is off. `looked` is the checkout that the run ran on, and `passed` its
    outcome, for files that name none."""
    if is_off():
        return ""
    try:
        return _keep(path, project, name, looked, passed)
    except (UserError, BlockedError) as error:
        return f"history: run not recorded: {error.message}; {error.fix}"
    except Exception as error:  # noqa: BLE001 - a defect here is told as well, and must not become the exit code of a trial
        return f"history: run not recorded: {type(error).__name__}: {error}"


def import_unit_results(path: Path, repo: Path | None = None) -> str:
    """Import unit_results.json at the end of a test session; the quiet line, or empty. The file says all by itself, but it may lie in
    another repository: `repo` is where the session ran, whose branches and configuration count."""
    return auto_import(path, looked=CheckoutState(repo) if repo is not None else None)


def _keep(path: Path, project: str | None, name: str | None, looked: CheckoutState | None, passed: bool | None) -> str:
    from seatrial.history.importing import Stated, add
    from seatrial.history.store import Store

    found = history_settings(looked.repo if looked is not None else path if path.is_dir() else path.parent)
    if found.store is None:
        found = history_settings(Path.cwd())
    stated = Stated(project=project, name=name, passed=passed, here=True)
    if looked is not None:
        stated = replace(stated, commit=looked.commit, branch=looked.branch, clean=looked.clean, repo=looked.repo)
    with Store(store_path(None, found), write=True) as store:
        done = list(add(store, path, stated, found.trusted))
        errors = [one for one in done if one.error]
        runs = [one.run for one in done if one.run]
        said = f"{len(runs)} runs kept"
        if len(runs) == 1:
            said = f"kept as run {runs[0].id}" + ("" if runs[0].trusted else f" (no baseline: {runs[0].why_untrusted})")
        text = f"history: {said} in {store.path}"
        return text if not errors else f"{text}; {errors[0].line()}"
