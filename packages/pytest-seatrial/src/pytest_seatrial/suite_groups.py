"""Groups of tests that run only when asked for, as the configuration declares them, and what they need of the machine."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from pytest_seatrial.guarded_text import parse_toml

LISTS = ("env", "modules", "programs", "files")
KEYS = (*LISTS, "gpus")


class Needs(NamedTuple):
    env: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    gpus: int = 0

    def absent(self, folder: Path) -> list[str]:
        """What is not here, in words; relative files are looked for in `folder`."""
        found = [f"variable {name}" for name in self.env if not os.environ.get(name)]
        found += [f"module {name}{why}" for name in self.modules if (why := _no_module(name)) is not None]
        found += [f"program {name}" for name in self.programs if shutil.which(name) is None]
        found += [f"file {name}" for name in self.files if not (folder / Path(name).expanduser()).exists()]
        here, why = gpus_here() if self.gpus else (0, "")
        return found if here >= self.gpus else [*found, f"{self.gpus} GPU{'' if self.gpus == 1 else 's'} ({here} here{why})"]


def parse(values: Mapping[str, object]) -> Needs:
    """Needs from a table of the configuration or the arguments of a marker."""
    lists: dict[str, tuple[str, ...]] = {}
    for key, value in values.items():
        if key not in KEYS:
            raise ValueError(f"unknown key {key!r}; {nearest(key, KEYS)}")
        if key == "gpus":
            continue
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise ValueError(f'{key}: must be a list of texts, such as ["one"] (got {value!r})')
        for item in value:
            if not isinstance(item, str) or not item.strip():
                raise ValueError(f"{key}: must be a list of texts (got {item!r} in it)")
        lists[key] = tuple(value)
    return Needs(**lists, gpus=gpu_number(values["gpus"]) if "gpus" in values else 0)


def gpu_number(value: object) -> int:
    """A number of GPUs; a switch is none, though Python counts it as a number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"gpus: must be a whole number of at least 1 (got {value!r})")
    return value


def is_amount(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value >= 0


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key that was probably meant, else all of them."""
    import difflib  # slow, and for mistakes only

    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def _no_module(name: str) -> str | None:
    """None when the module is there, else why not, where there is more to say than that."""
    if sys.modules.get(name) is not None:
        return None  # also one in no package, such as os.path
    parts = name.split(".")
    places: list[str] | None = None
    try:
        for length in range(1, len(parts) + 1):
            if length > 1 and places is None:
                return f" ({'.'.join(parts[: length - 1])} is no package)"
            found, places = _look(".".join(parts[:length]), places)
            if not found:
                return ""
    except Exception as error:  # noqa: BLE001 - finders are somebody's code: whatever they raise, the module is not usable
        return f" ({type(error).__name__}: {error})"
    return None


def _look(name: str, places: list[str] | None) -> tuple[bool, list[str] | None]:
    """Whether a module is in these places (None: on the import path), and the places of what is in it; None for no package."""
    if name in sys.modules:
        loaded = sys.modules[name]
        inner = getattr(loaded, "__path__", None)
        return loaded is not None, None if inner is None else list(inner)
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, places)
        except KeyError:  # a namespace in a namespace asks for the outer one, which is not imported
            inside = [str(whole) for place in places or () if (whole := Path(place) / name.rpartition(".")[2]).is_dir()]
            return bool(inside), inside
        if spec is not None:
            inner = spec.submodule_search_locations
            return True, None if inner is None else list(inner)
    return False, None


def gpus_here() -> tuple[int, str]:
    """How many GPUs CUDA would show to this process; and why none can be counted, where the driver does not answer."""
    from pytest_seatrial import gpus  # ctypes is slow to import

    try:
        present = len(gpus.names_here())
    except gpus.GpuError as error:
        return 0, f": {error}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present, ""
    seen: list[str] = []  # CUDA stops at the first device that does not exist; one that is listed twice hides all
    for entry in (part.strip() for part in visible.split(",")):
        is_index = entry.isdecimal() and int(entry) < present
        is_name = present > 0 and entry.startswith(("GPU-", "MIG-"))
        if not (is_index or is_name):
            break
        if entry in seen:
            return 0, ""
        seen.append(entry)
    return len(seen), ""


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
    INCLUDE = "include"
    ONLY = "only"


class SuiteGroup(NamedTuple):
    name: str
    option: str
    mode: Mode
    marker: str
    reason: str
    needs: Needs
    origin: str  # file and key, for errors
    folder: Path  # where relative files of `needs` are looked for

    @property
    def dest(self) -> str:
        """Where the parsed option is kept; ours alone, so that no other plugin's can be meant."""
        return f"seatrial_group_{self.name}"

    def why(self) -> str:
        return f"group {self.name}: " + (f"{self.reason}; " if self.reason else "") + f"give {self.option}"


class GroupSettings(NamedTuple):
    groups: tuple[SuiteGroup, ...] = ()
    gpu_hours: float | None = None
    gpu_hours_origin: str = ""


class Left(NamedTuple):
    """A test that is left out: the reason it is Skipped with and its short form, which is counted."""

    reason: str
    label: str


class Out:
    """A test that does not belong to the `only` group that was asked for."""


def place(belongs: Sequence[SuiteGroup], asked: Sequence[SuiteGroup]) -> Left | Out | None:
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
    return Left("seatrial: " + "; ".join(map(SuiteGroup.why, missing)), f"{names} (give {' '.join(group.option for group in missing)})")


def read_groups(root: Path) -> GroupSettings:
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
    return GroupSettings()


def _load(file: Path, word: str = "") -> dict[str, Any] | None:
    """The content of a file; None where there is none, or none with that word, which is then not ours to parse."""
    if not file.is_file():
        return None
    try:
        data = file.read_bytes()
        if word.encode() not in data:
            return None
        return parse_toml(data.decode())
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no TOML
        raise pytest.UsageError(f"{file}: {error}; correct the file") from error


def _settings(folder: Path, own: dict[str, Any], mine: Any) -> GroupSettings:
    file, project = folder / FILE, folder / PROJECT
    if not isinstance(mine, dict):
        _refuse(f"{project}: tool.seatrial", "must be a table", "write [tool.seatrial.groups.NAME]")
    for section in own:  # an unknown one may be a slip for ours, which would turn the guards off without a word
        if section not in SECTIONS:
            _refuse(f"{file}: [{section}]", "unknown section", nearest(section, SECTIONS))
    for section in mine:
        if section not in OURS:
            _refuse(f"{project}: tool.seatrial.{section}", "unknown key", nearest(section, OURS))
    tables: dict[str, tuple[str, dict[str, Any]]] = {}
    for place_, prefix, data in ((file, "", own), (project, "tool.seatrial.", mine)):
        for section in OURS:
            if section in data:
                _collect(tables, f"{place_}: {prefix}", section, data[section])
    groups = tuple(_group(name[1:], origin, table, folder) for name, (origin, table) in tables.items() if name != "tests")
    for index, group in enumerate(groups):
        for other in groups[:index]:
            for key in ("option", "marker", "dest"):
                if getattr(group, key) == getattr(other, key):
                    _refuse(f"{group.origin}.{key}", f"{getattr(group, key)} is that of {other.origin} too", f"give it its own {key}")
    origin, tests = tables.get("tests", ("", {}))
    _check_keys(origin, tests, TESTS_KEYS)
    hours = tests.get("gpu_hours")
    if "gpu_hours" in tests and not is_amount(hours):
        _refuse(f"{origin}.gpu_hours", f"must be a number of hours, not below 0 (got {hours!r})", "write gpu_hours = 8")
    return GroupSettings(groups, None if hours is None else float(hours), f"{origin}.gpu_hours")


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


def _group(name: str, origin: str, table: Mapping[str, Any], folder: Path) -> SuiteGroup:
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
        wanted = parse(needed)
    except ValueError as error:
        raise pytest.UsageError(f"{origin}.needs: {error}") from error
    reason = _text(origin, table, "reason", "")
    return SuiteGroup(name=name, option=option, mode=Mode(mode), marker=marker, reason=reason, needs=wanted, origin=origin, folder=folder)


def _check_keys(origin: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            _refuse(f"{origin}.{key}", "unknown key", nearest(key, known))


def _text(origin: str, table: Mapping[str, Any], key: str, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or (key in table and not value.strip()):
        _refuse(f"{origin}.{key}", f"must be a text (got {value!r})", f'write {key} = "…"')
    return str(value)


def _refuse(where: str, what: str, fix: str) -> NoReturn:
    raise pytest.UsageError(f"{where}: {what}; {fix}")
