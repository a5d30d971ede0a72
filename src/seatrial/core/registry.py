"""Extensions that other distributions install: their entry points, by group and name.

- Metadata of installed distributions is read once, and only when a name is asked for that is not built in. Listing imports no module.
- A name that two distributions claim, and an entry whose object cannot be loaded, are UserErrors, raised when that entry is asked for.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from seatrial.core.errors import UserError

LOOPS, SIGNATURES, VERIFIERS = "seatrial.loops", "seatrial.signatures", "seatrial.verifiers"
GROUPS = (LOOPS, SIGNATURES, VERIFIERS)


@dataclass(frozen=True, slots=True)
class Extension:
    """One entry point, and the distribution that installed it."""

    group: str
    name: str
    value: str
    """`module:object`; for signatures `module:PATH`."""
    distribution: str
    """Name and version."""

    def __str__(self) -> str:
        return f"{self.distribution}: entry point {self.name} = {self.value} of {self.group}"

    def load(self) -> Any:
        """The object. Whatever the module raises is a UserError."""
        module, colon, attributes = self.value.partition(":")
        if not (module and colon and attributes):
            raise self.error("is not of the form module:object")
        try:
            found: Any = importlib.import_module(module)
            for attribute in attributes.split("."):
                found = getattr(found, attribute)
        except (Exception, SystemExit) as error:  # whatever the module of another distribution raises
            raise self.error(f"cannot be loaded: {type(error).__name__}: {error}") from error
        return found

    def file(self) -> Path:
        """The file that `module:PATH` names: it stands beside the module, and in a package below it. The module's package is imported."""
        module, colon, path = self.value.partition(":")
        if not (module and colon and path):
            raise self.error("is not of the form module:PATH")
        try:
            spec = importlib.util.find_spec(module)
        except (Exception, SystemExit) as error:  # whatever the package of another distribution raises
            raise self.error(f"cannot be found: {type(error).__name__}: {error}") from error
        origin = spec.origin if spec is not None and spec.has_location else None
        if origin is None:
            raise self.error(f"cannot be found: no module {module}")
        file = Path(origin).parent / path
        if not file.is_file():
            raise self.error(f"{file} does not exist")
        return file

    def error(self, what: str) -> UserError:
        """A defect of this entry, with the fix."""
        name = self.distribution.partition(" ")[0]
        return UserError(
            f"{self} {what}", f"correct the entry in the pyproject.toml of {name} and install it again, or: pip uninstall {name}"
        )


@functools.cache
def extensions(group: str) -> tuple[Extension, ...]:
    """All entries of a group, in the order of the import path."""
    return tuple(extension for extension in _scan() if extension.group == group)


def names(group: str) -> tuple[str, ...]:
    """The names in a group, sorted, each once."""
    return tuple(sorted({extension.name for extension in extensions(group)}))


def find(group: str, name: str) -> Extension | None:
    """The entry of this name, or None; two of one name are a UserError that names both."""
    found = [extension for extension in extensions(group) if extension.name == name]
    if len(found) > 1:
        raise UserError(
            f"two installed distributions have the same name: {found[0]}; {found[1]}", "uninstall one of them, or rename its entry"
        )
    return found[0] if found else None


def forget() -> None:
    """Read the metadata again when next asked."""
    _scan.cache_clear()
    extensions.cache_clear()


@functools.cache
def _scan() -> tuple[Extension, ...]:
    """The entries of all groups. Like an import, the first distribution of a name on the path hides the others."""
    found: dict[str, tuple[Extension, ...]] = {}
    for distribution in metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt") or ""
        except (OSError, UnicodeDecodeError):
            continue  # pip cannot read it either; other commands of this distribution do not work
        if any(f"[{group}]" in text for group in GROUPS):  # of the others not even the name is read, which takes longest
            name = str(distribution.metadata["Name"])
            called = f"{name} {distribution.version}"
            entries = tuple(Extension(*entry, called) for entry in _entries(text))
            found.setdefault(name.lower().replace("_", "-").replace(".", "-"), entries)
    return tuple(entry for entries in found.values() for entry in entries)


def _entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Group, name and value of each line in a group of ours. A line without a value is an entry that cannot be loaded."""
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            group = line.strip("[] ")
        elif group in GROUPS and line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield group, name.strip(), value.partition("[")[0].strip()
