"""Configuration: seatrial.toml, `--set section.key=value`, and flags, in this order; each value knows its origin.

Unknown sections and keys are errors that name the file, the key and the nearest known one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seatrial.model.errors import UserError

FILE = "seatrial.toml"


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
    base: str | None = Field(default=None, description="revision that the change is compared with")


class EnvironmentSection(Section):
    """Where the loop runs."""

    python: str | None = Field(default=None, description="interpreter of your own environment; none takes the one that Seatrial builds")


class LimitsSection(Section):
    """How long a level may take."""

    deadline_minutes: float | None = Field(default=None, gt=0, description="end a process after this time; none takes the level's own")
    stall_minutes: float | None = Field(default=None, gt=0, description="end a process that writes nothing for this time")


class Config(Section):
    """All of seatrial.toml."""

    run: RunSection = RunSection()
    change: ChangeSection = ChangeSection()
    environment: EnvironmentSection = EnvironmentSection()
    limits: LimitsSection = LimitsSection()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and where each value came from."""

    config: Config
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str, str]]:
        """Key, value, origin and meaning of every setting."""
        for section, kind in Config.model_fields.items():
            values = getattr(self.config, section)
            assert isinstance(kind.annotation, type)
            for key, info in kind.annotation.model_fields.items():
                name = f"{section}.{key}"
                yield name, getattr(values, key), self.origins.get(name, "default"), info.description or ""


def known_keys() -> dict[str, Any]:
    """All dotted keys with their field descriptions."""
    return {name: meaning for name, _, _, meaning in Loaded(Config(), {}).rows()}


def find_file(start: Path) -> Path | None:
    """The nearest seatrial.toml in this directory or above."""
    for folder in (start.absolute(), *start.absolute().parents):
        if (folder / FILE).is_file():
            return folder / FILE
    return None


def load(file: Path | None, settings: Sequence[str] = (), flags: Mapping[str, Any] | None = None) -> Loaded:
    """Merge the sources; later ones win. A flag that is None was not given."""
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, str] = {}
    if file is not None:
        for name, value in _from_file(file):
            _put(values, origins, name, value, str(file))
    for text in settings:
        name, separator, raw = text.partition("=")
        if not separator:
            raise UserError(f"--set {text!r}: no '=' in it", "write --set section.key=value, for example --set run.levels=0,1")
        _require_known(name.strip(), "--set")
        _put(values, origins, name.strip(), _parse(name.strip(), raw), "--set")
    for name, value in (flags or {}).items():
        if value is not None:
            _put(values, origins, name, value, "command line")
    try:
        return Loaded(Config.model_validate(values), origins)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][:2])
        raise UserError(
            f"{origins.get(name, 'configuration')}: {name}: {first['msg']} (got {first['input']!r})", f"correct {name}"
        ) from error


def _from_file(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{file}: {error}", "correct the file") from error
    for section, content in data.items():
        if not isinstance(content, dict):
            raise UserError(f"{file}: {section}: values stand in sections", f"write [run], then {section} = … below it")
        if section not in Config.model_fields:
            close = difflib.get_close_matches(section, Config.model_fields, n=1)
            fix = f"did you mean [{close[0]}]?" if close else f"known sections: {', '.join(Config.model_fields)}"
            raise UserError(f"{file}: unknown section [{section}]", fix)
        for key, value in content.items():
            _require_known(f"{section}.{key}", str(file))
            yield f"{section}.{key}", value


def _require_known(name: str, origin: str) -> None:
    known = known_keys()
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    fix = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
    raise UserError(f"{origin}: unknown key {name!r}", fix)


def _parse(name: str, raw: str) -> Any:
    """A value of `--set`: a list for list keys (TOML, or words), text otherwise; pydantic turns text into numbers."""
    section, _, key = name.partition(".")
    default = getattr(getattr(Config(), section), key)
    if not isinstance(default, list):
        return raw
    if not raw.lstrip().startswith("["):
        return raw.split()
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--set {name}: {error}", f'write --set {name}=["one", "two"]') from error


def _put(values: dict[str, dict[str, Any]], origins: dict[str, str], name: str, value: Any, origin: str) -> None:
    section, _, key = name.partition(".")
    values.setdefault(section, {})[key] = value
    origins[name] = origin
