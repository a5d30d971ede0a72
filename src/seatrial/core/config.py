"""Configuration: seatrial.toml, `--set section.key=value`, and flags, in this order; each value knows its origin.

- Unknown sections and keys are errors that name the file, the key and the nearest known one.
- `[slurm.NAME]` holds a profile; its tables (containers, environment) are merged entry by entry.
- `[options]` holds options of the loop: text, which names there are and what they may hold is the loop's business. So are
  the ids of `[known_issues]`: upstream issues by the failure that they explain.
- `[groups.NAME]` and `[tests]` are the pytest plugin's (`pytest_seatrial/suite_groups.py`), which reads them from the file alone: they may
  stand there and are shown, and `--set` does not reach them.
- A key is a path of names; errors and `seatrial config` show it with dots between them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from seatrial.core.errors import UserError
from seatrial.core.guarded import BadValue, parse_toml, read_file
from seatrial.core.jobs import Profile

FILE = "seatrial.toml"
PROFILES = "slurm"
OPTIONS = "options"
KNOWN_ISSUES = "known_issues"
TABLES = {OPTIONS: "option of the loop", KNOWN_ISSUES: "upstream issue behind a known failure"}
"""Sections with names that are not ours, and what an entry is."""
PYTEST = {"groups": "group of tests; read by the pytest plugin", "tests": "read by the pytest plugin"}
"""Sections of the pytest plugin, and what an entry is."""
PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

Key = tuple[str, ...]
NotEmpty = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base of the sections: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """What to run."""

    loop: str = Field(default="trl", description="the loop")
    levels: str | None = Field(default=None, description="levels, such as 0,1,6; none takes the loop's defaults")
    model: str | None = Field(default=None, description="a local model directory; none takes the loop's own tiny model")
    arguments: list[str] = Field(default_factory=list, description="loop arguments, passed on verbatim")
    trials: str = Field(default="trials", description="where run directories are made")


class ChangeSection(Section):
    """What is under test."""

    paths: list[str] = Field(default_factory=list, description="checkouts under test")
    base: str | None = Field(default=None, description="revision before the change; none finds the merge base with the main branch")
    run_base: bool = Field(default=True, description="run the base beside the change, and compare")


class EnvironmentSection(Section):
    """Where the loop runs."""

    python: str | None = Field(default=None, description="interpreter of your own environment; none takes the one that Seatrial builds")


class LimitsSection(Section):
    """How long a level may take."""

    deadline_minutes: float | None = Field(default=None, gt=0, description="end a process after this time; none takes the level's own")
    stall_minutes: float | None = Field(default=None, gt=0, description="end a process that writes nothing for this time")


class HistorySection(Section):
    """Where metrics of runs are kept, and which may be baselines."""

    store: NotEmpty | None = Field(default=None, description="file of the history; none takes the one of the user's account")
    trusted: list[NotEmpty] = Field(default=["main", "master", "release/*"], description="branches whose runs may be baselines")


def _as_text(value: Any) -> Any:
    """Numbers and switches of a file as text; anything else is left to be refused."""
    return json.dumps(value) if isinstance(value, bool) else str(value) if isinstance(value, int | float) else value


Text = Annotated[str, BeforeValidator(_as_text)]


class Config(Section):
    """All of seatrial.toml."""

    run: RunSection = RunSection()
    change: ChangeSection = ChangeSection()
    environment: EnvironmentSection = EnvironmentSection()
    limits: LimitsSection = LimitsSection()
    history: HistorySection = HistorySection()
    options: dict[str, Text] = Field(default_factory=dict, description="options of the loop")
    known_issues: dict[str, str] = Field(default_factory=dict, description="upstream issues, by the id of the signature")
    slurm: dict[str, Profile] = Field(default_factory=dict, description="profiles of clusters, by name")
    groups: dict[str, Any] = Field(default_factory=dict, description="groups of tests, by name")
    tests: dict[str, Any] = Field(default_factory=dict, description="limits of a suite")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and where each value came from."""

    config: Config
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str, str]]:
        """Key, value, origin and meaning of every setting; one row per entry of a table."""
        for key, value, meaning in _settings(self.config):
            entries = {(*key, name): entry for name, entry in value.items()} if isinstance(value, dict) else {}
            for place, entry in (entries or {key: value}).items():
                name = ".".join(place)
                yield name, entry, self.origins.get(name, "default"), meaning


def _settings(config: Config) -> Iterator[tuple[Key, Any, str]]:
    """Key, value and meaning of every field of every section and profile, and of every option."""
    yield from (
        ((table, name), value, meaning) for table, meaning in (TABLES | PYTEST).items() for name, value in getattr(config, table).items()
    )
    named = [name for name in Config.model_fields if name not in (PROFILES, *TABLES, *PYTEST)]
    sections: dict[Key, BaseModel] = {(name,): getattr(config, name) for name in named}
    sections |= {(PROFILES, name): profile for name, profile in config.slurm.items()}
    for place, values in sections.items():
        for key, info in type(values).model_fields.items():
            yield (*place, key), getattr(values, key), info.description or ""


def known_keys() -> dict[str, str]:
    """All dotted keys of the sections that are always there, with their meaning."""
    return {name: meaning for name, _, _, meaning in Loaded(Config(), {}).rows()}


def find_file(start: Path) -> Path | None:
    """The nearest seatrial.toml in this directory or above."""
    for folder in (start.absolute(), *start.absolute().parents):
        if (folder / FILE).is_file():
            return folder / FILE
    return None


def load(file: Path | None, settings: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> Loaded:
    """Merge the sources; later ones win. A flag that is None was not given."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if file is not None:
        for key, value in _from_file(file, values):
            _put(values, origins, key, value, str(file))
    profiles = tuple(values.get(PROFILES, ()))
    for text in settings:
        name, separator, raw = text.partition("=")
        if not separator:
            raise UserError(f"--set {text!r}: no '=' in it", "write --set section.key=value, for example --set run.levels=0,1")
        key = _key(name.strip())
        _require_known(key, "--set", profiles)
        _put(values, origins, key, _parse(key, raw), "--set")
    for name, value in (flags or {}).items():
        if value is not None:
            _put(values, origins, _key(name), value, "command line")
    try:
        return Loaded(Config.model_validate(values), origins)
    except ValidationError as error:
        first = error.errors()[0]
        name, origin = _where([str(part) for part in first["loc"]], origins)
        # A whole table may hold what should not be printed, and says little.
        got = "" if isinstance(first["input"], dict) else f" (got {first['input']!r})"
        message = f"{origin}: {name}: {first['msg'].removeprefix('Value error, ')}{got}"
        raise UserError(message, f"correct {name}; `seatrial config show` says what it means") from error


def _where(loc: Sequence[str], origins: Mapping[str, str]) -> tuple[str, str]:
    """The key that a mistake belongs to, and its origin: the longest one that was given, or what was given below it."""
    for length in range(len(loc), 1, -1):
        name = ".".join(loc[:length])
        if name in origins:
            return name, origins[name]
        below = [origin for key, origin in origins.items() if key.startswith(f"{name}.")]
        if below:
            return name, below[-1]
    return ".".join(loc), "configuration"


def _from_file(file: Path, values: dict[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Keys and values of a file; profiles are entered into `values` even when they are empty."""
    try:
        data = parse_toml(read_file(file).decode("utf-8"))
    except (OSError, UnicodeDecodeError, BadValue) as error:
        raise UserError(f"{file}: {error}", "correct the file") from error
    for section, content in data.items():
        if not isinstance(content, dict):
            raise UserError(f"{file}: {section}: values stand in sections", f"write [run], then {section} = … below it")
        if section not in Config.model_fields:
            close = difflib.get_close_matches(section, Config.model_fields, n=1)
            fix = f"did you mean [{close[0]}]?" if close else f"known sections: {', '.join(Config.model_fields)}"
            raise UserError(f"{file}: unknown section [{section}]", fix)
        if section != PROFILES:
            yield from _entries(file, (section,), content)
            continue
        values[PROFILES] = {name: {} for name in content}
        for name, profile in content.items():
            if not isinstance(profile, dict):
                raise UserError(f"{file}: {PROFILES}.{name}: a profile has a name", f"write [{PROFILES}.NAME], then {name} = … below it")
            _require_profile_name(name, str(file))
            yield from _entries(file, (section, name), profile)


def _entries(file: Path, place: Key, content: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Keys and values of a section or a profile; the entries of a table one by one."""
    for name, value in content.items():
        key = (*place, name)
        if place[0] not in PYTEST:
            _require_known(key, str(file))
        table = isinstance(value, dict) and (place[0] in PYTEST or (len(key) == 3 and _is_table(name)))
        yield from (((*key, entry), item) for entry, item in value.items()) if table else ((key, value),)


def _is_table(key: str) -> bool:
    """Whether a key of a profile holds a table."""
    return isinstance(getattr(Profile(), key), dict)


def _key(name: str) -> Key:
    """The path of a dotted key; the name of a table's entry may hold dots itself."""
    return tuple(name.split(".", 3 if name.startswith(f"{PROFILES}.") else 1))


def _require_known(key: Key, origin: str, profiles: Sequence[str] = ()) -> None:
    """Refuse a key that does not exist. Where the file has `profiles`, the name of another one is a slip; options are
    the loop's business."""
    if key[0] in TABLES and len(key) == 2:
        return
    if key[0] in PYTEST:
        raise UserError(f"{origin}: {'.'.join(key)}: read by the pytest plugin, from the file alone", f"write it into {FILE}")
    known = list(known_keys())
    if key[0] == PROFILES and len(key) > 1:
        _require_profile_name(key[1], origin)
        known = [f"{PROFILES}.{name}.{field}" for name in profiles or (key[1],) for field in Profile.model_fields]
    if ".".join(key[:3]) in known and (len(key) < 4 or _is_table(key[2])):
        return
    name = ".".join(key)
    # The common beginning of the keys of a profile makes any two of them look alike.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75 if key[0] == PROFILES else 0.5)
    fix = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
    raise UserError(f"{origin}: unknown key {name!r}", fix)


def _require_profile_name(name: str, origin: str) -> None:
    if not PROFILE_NAME.fullmatch(name):
        raise UserError(f"{origin}: {PROFILES}.{name}: no name for a profile", "use letters, digits, - and _")


def _parse(key: Key, raw: str) -> Any:
    """A value of `--set`: a list (TOML; words for one of a section, one item for one of a profile), text otherwise;
    pydantic turns text into numbers."""
    if key[0] in TABLES:
        return raw
    in_profile = key[0] == PROFILES
    default = "" if len(key) > 3 else getattr(Profile() if in_profile else getattr(Config(), key[0]), key[-1])
    name = ".".join(key)
    if isinstance(default, dict):
        raise UserError(f"--set {name}: is a table", f"set its entries one by one: --set {name}.NAME=value")
    if not isinstance(default, (list, tuple)):
        return raw
    if not raw.lstrip().startswith("["):
        return [raw] if in_profile else raw.split()
    try:
        return parse_toml(f"value = {raw}")["value"]
    except BadValue as error:
        raise UserError(f"--set {name}: {error}", f'write --set {name}=["one", "two"]') from error


def _put(values: dict[str, Any], origins: dict[str, str], key: Key, value: Any, origin: str) -> None:
    table = values
    for part in key[:-1]:
        table = table.setdefault(part, {})
    table[key[-1]] = value
    origins[".".join(key)] = origin
