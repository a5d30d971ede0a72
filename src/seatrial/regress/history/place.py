"""Where the store is, and which branches are trusted.

- The place: what was asked for (`--store`), `$SEATRIAL_HISTORY`, `[history] store` of the nearest seatrial.toml, then
  `$XDG_DATA_HOME/seatrial/history.sqlite` (`~/.local/share` where that is not set).
- `SEATRIAL_HISTORY=off` turns automatic imports off; commands then need `--store` or the configuration.
- The file is read here with tomllib alone: the whole configuration would cost a query more time than the query.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from seatrial.model.errors import UserError
from seatrial.regress.history.switch import OFF, VARIABLE

CONFIG, SECTION = "seatrial.toml", "history"
TRUSTED = ("main", "master", "release/*")
_KEYS = ("store", "trusted")


class Settings(NamedTuple):
    """`[history]` of the nearest seatrial.toml."""

    store: Path | None = None
    trusted: tuple[str, ...] = TRUSTED


def settings(start: Path) -> Settings:
    """The section that holds for `start`; defaults where there is none."""
    file = next((folder / CONFIG for folder in (start.absolute(), *start.absolute().parents) if (folder / CONFIG).is_file()), None)
    if file is None:
        return Settings()
    from seatrial.model.guarded import parse_toml

    try:
        section = parse_toml(file.read_text(encoding="utf-8")).get(SECTION, {})
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: {error}", "correct the file") from error
    return _read(file, section)


def _read(file: Path, section: Any) -> Settings:
    if not isinstance(section, dict):
        raise UserError(f"{file}: {SECTION} is not a table", f"write [{SECTION}]")
    for key in section:
        if key not in _KEYS:
            import difflib

            close = difflib.get_close_matches(key, _KEYS, n=1)
            raise UserError(
                f"{file}: unknown key {SECTION}.{key}", f"did you mean {close[0]}?" if close else f"known keys: {', '.join(_KEYS)}"
            )
    store, trusted = section.get("store"), section.get("trusted", list(TRUSTED))
    if store is not None and (not isinstance(store, str) or not store):
        raise UserError(f"{file}: {SECTION}.store: {store!r} is no path", 'write store = "history.sqlite"')
    if not isinstance(trusted, list) or not all(isinstance(one, str) and one for one in trusted):
        raise UserError(f"{file}: {SECTION}.trusted: {trusted!r} is no list of branches", 'write trusted = ["main", "release/*"]')
    return Settings(file.parent / Path(store).expanduser() if store else None, tuple(trusted))


def place(asked: Path | None, found: Settings, environment: Mapping[str, str] = os.environ) -> Path:
    """The file of the store."""
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
