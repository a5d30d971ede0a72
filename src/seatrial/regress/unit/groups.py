"""Groups of tests that run only when asked for, as the configuration declares them.

- `[groups.NAME]` and `[tests]` of seatrial.toml, or `[tool.seatrial.groups.NAME]` and `[tool.seatrial.tests]` of pyproject.toml: of the
  nearest folder at or above pytest's rootdir that has either, not above the top of a git checkout. The same thing in both is an error.
- Strict: an unknown key or a wrong value is a `pytest.UsageError` that names the file, the key and the fix.
- mode include: off by default, the option adds them. mode only: off by default, the option leaves nothing else.
- Named tuples and no compiled pattern: this is imported by every pytest of the environment.
- A test runs when all of its groups were asked for; `place` is a pure function of its groups and the options given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from seatrial.regress.unit import needs

FILE = "seatrial.toml"
PROJECT = "pyproject.toml"
OURS = ("groups", "tests")
SECTIONS = (*OURS, "run", "change", "environment", "limits", "options", "known_issues", "slurm", "history")
"""All sections of seatrial.toml; a list of its own, because the schema in config.py is slow to import. A test holds them together."""
GROUP_KEYS = ("option", "mode", "marker", "reason", "needs")
TESTS_KEYS = ("gpu_hours",)
TAKEN = ("needs", "gpu_hours", "skip", "skipif", "xfail", "parametrize", "usefixtures", "filterwarnings", "tryfirst", "trylast")
"""Markers with a meaning of their own, of ours and of pytest: as a group's they would leave out tests that do not belong to it."""
OPTION = r"--[a-z0-9][a-z0-9-]*"


class Mode(StrEnum):
    """What the option of a group does."""

    INCLUDE = "include"
    ONLY = "only"


class Group(NamedTuple):
    """Tests with one marker."""

    name: str
    option: str
    mode: Mode
    marker: str
    reason: str
    needs: needs.Needs
    origin: str
    """File and key, for errors."""
    folder: Path
    """Where relative files of `needs` are looked for."""

    @property
    def dest(self) -> str:
        """Where the parsed option is kept; ours alone, so that no other plugin's can be meant."""
        return f"seatrial_group_{self.name}"

    def why(self) -> str:
        """Why a test of it is left out."""
        return f"group {self.name}: " + (f"{self.reason}; " if self.reason else "") + f"give {self.option}"


class Settings(NamedTuple):
    """All that the configuration says about tests."""

    groups: tuple[Group, ...] = ()
    gpu_hours: float | None = None
    gpu_hours_origin: str = ""


class Left(NamedTuple):
    """A test that is left out: the reason it is Skipped with and its short form, which is counted."""

    reason: str
    label: str


class Out:
    """A test that does not belong to the `only` group that was asked for."""


def place(belongs: Sequence[Group], asked: Sequence[Group]) -> Left | Out | None:
    """Where a test of these groups stands; None: it runs."""
    only = [group for group in asked if group.mode is Mode.ONLY]
    if only and only[0] not in belongs:
        return Out()
    missing = [group for group in belongs if group not in asked]
    if not missing:
        return None
    names = " + ".join(group.name for group in missing)
    exclusive = [group for group in belongs if group.mode is Mode.ONLY]
    if len(exclusive) > 1:  # their options exclude each other, so naming them would not help
        both = " and ".join(group.name for group in exclusive)
        markers = " and ".join(group.marker for group in exclusive)
        return Left(f"seatrial: groups {both} exclude each other; give -m '{markers}'", f"{names} (give -m '{markers}')")
    return Left("seatrial: " + "; ".join(map(Group.why, missing)), f"{names} (give {' '.join(group.option for group in missing)})")


def read(root: Path) -> Settings:
    """The settings that hold for this rootdir; none when nothing is declared."""
    for folder in (root, *root.parents):
        own = _load(folder / FILE)
        project = _load(folder / PROJECT, "seatrial")
        tool = project.get("tool", {}) if project else {}
        mine = tool.get("seatrial") if isinstance(tool, dict) else None
        if own is not None or mine is not None:
            return _settings(folder, own or {}, {} if mine is None else mine)
        if (folder / ".git").exists():
            break
    return Settings()


def _load(file: Path, word: str = "") -> dict[str, Any] | None:
    """The content of a file; None where there is none, or none with that word, which is then not ours to parse."""
    if not file.is_file():
        return None
    try:
        data = file.read_bytes()
        if word.encode() not in data:
            return None
        from seatrial.model.guarded import parse_toml  # here, because most projects say nothing to us

        return parse_toml(data.decode())
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no TOML
        raise pytest.UsageError(f"{file}: {error}; correct the file") from error


def _settings(folder: Path, own: dict[str, Any], mine: Any) -> Settings:
    file, project = folder / FILE, folder / PROJECT
    if not isinstance(mine, dict):
        _refuse(f"{project}: tool.seatrial", "must be a table", "write [tool.seatrial.groups.NAME]")
    for section in own:
        _check_section(file, section)
    for section in mine:
        if section not in OURS:
            _refuse(f"{project}: tool.seatrial.{section}", "unknown key", needs.nearest(section, OURS))
    tables: dict[str, tuple[str, dict[str, Any]]] = {}
    for place_, prefix, data in ((file, "", own), (project, "tool.seatrial.", mine)):
        for section in OURS:
            if section in data:
                _collect(tables, f"{place_}: {prefix}", section, data[section])
    groups = tuple(_group(name[1:], origin, table, folder) for name, (origin, table) in tables.items() if name != "tests")
    _check_apart(groups)
    origin, tests = tables.get("tests", ("", {}))
    return Settings(groups, _hours(origin, tests), f"{origin}.gpu_hours")


def _collect(tables: dict[str, tuple[str, dict[str, Any]]], prefix: str, section: str, content: Any) -> None:
    """Enter the tables of one section: `tests`, and each group under a slash and its name."""
    whole = isinstance(content, dict) and {"tests": content}
    found = whole if section == "tests" else isinstance(content, dict) and {f"/{name}": table for name, table in content.items()}
    if not isinstance(found, dict):
        _refuse(f"{prefix}{section}", "must be a table", f"write [{section}{'' if section == 'tests' else '.NAME'}]")
    for key, table in found.items():
        origin = f"{prefix}{section}" + (f".{key[1:]}" if key != "tests" else "")
        if not isinstance(table, dict):
            _refuse(origin, f"must be a table (got {table!r})", "a group has a name: write [groups.NAME], then its keys below it")
        if key in tables:
            _refuse(origin, f"is in {tables[key][0]} already", "keep one of the two")
        tables[key] = (origin, table)


def _check_section(file: Path, section: str) -> None:
    """A section that nobody knows may be a slip for ours, which would turn the guards off without a word."""
    if section not in SECTIONS:
        _refuse(f"{file}: [{section}]", "unknown section", needs.nearest(section, SECTIONS))


def _group(name: str, origin: str, table: Mapping[str, Any], folder: Path) -> Group:
    _check_keys(origin, table, GROUP_KEYS)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        _refuse(origin, "no name for a group", "use letters, digits, - and _")
    mode = table.get("mode", Mode.INCLUDE.value)
    if mode not in list(Mode):
        _refuse(f"{origin}.mode", f"must be include or only (got {mode!r})", f'write mode = "{Mode.INCLUDE}" or mode = "{Mode.ONLY}"')
    dashed = name.lower().replace("_", "-")
    option = _text(origin, table, "option", f"--{dashed}-only" if mode == Mode.ONLY else f"--{dashed}")
    if not re.fullmatch(OPTION, option):
        _refuse(f"{origin}.option", f"no option (got {option!r})", f'write option = "--{dashed}": small letters, digits and -')
    marker = _text(origin, table, "marker", name)
    if not marker.isidentifier() or marker.startswith("_"):
        _refuse(f"{origin}.marker", f"no name for a marker (got {marker!r})", f'write marker = "{re.sub(r"[^a-z0-9]", "_", dashed)}"')
    if marker in TAKEN:
        _refuse(f"{origin}.marker", f"{marker} has a meaning of its own", f'write marker = "{marker}_tests", and mark the tests with it')
    if not isinstance(needed := table.get("needs", {}), dict):
        _refuse(f"{origin}.needs", f"must be a table (got {needed!r})", 'write needs = { env = ["NAME"] }')
    try:
        wanted = needs.parse(needed)
    except ValueError as error:
        raise pytest.UsageError(f"{origin}.needs: {error}") from error
    reason = _text(origin, table, "reason", "")
    return Group(name=name, option=option, mode=Mode(mode), marker=marker, reason=reason, needs=wanted, origin=origin, folder=folder)


def _check_apart(groups: Sequence[Group]) -> None:
    """No two groups may share what tells them apart."""
    for index, group in enumerate(groups):
        for other in groups[:index]:
            for key in ("option", "marker", "dest"):
                if getattr(group, key) == getattr(other, key):
                    _refuse(f"{group.origin}.{key}", f"{getattr(group, key)} is that of {other.origin} too", f"give it its own {key}")


def _hours(origin: str, table: Mapping[str, Any]) -> float | None:
    _check_keys(origin, table, TESTS_KEYS)
    if "gpu_hours" not in table:
        return None
    value = table["gpu_hours"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        _refuse(f"{origin}.gpu_hours", f"must be a number of hours, not below 0 (got {value!r})", "write gpu_hours = 8")
    return float(value)


def _check_keys(origin: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            _refuse(f"{origin}.{key}", "unknown key", needs.nearest(key, known))


def _text(origin: str, table: Mapping[str, Any], key: str, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or (key in table and not value.strip()):
        _refuse(f"{origin}.{key}", f"must be a text (got {value!r})", f'write {key} = "…"')
    return str(value)


def _refuse(where: str, what: str, fix: str) -> NoReturn:
    raise pytest.UsageError(f"{where}: {what}; {fix}")
