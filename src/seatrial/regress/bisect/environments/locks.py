"""What the lock of a commit asks for: what decides the environment, and what pip or uv is to be given.

- `identity` is equal exactly where the same environment would be built: comments, the settings of other tools and the project's own
  version do not count; included files and wheels that lie in the tree do.
- Requirements are read as pip reads them, with what `-r` and `-c` include. What cannot be followed (an address, a missing file) is refused.
- An environment is shared by commits, so nothing of a tree may be installed into it. A lock that asks for it (`-e .`, `./x`, `file:`)
  is refused, unless a build command installs that for each commit; local packages of uv are left out, and found by the import path.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial import files
from seatrial.model.errors import UserError
from seatrial.model.guarded import BadValue, exists, is_file, parse_toml, real_path
from seatrial.regress.bisect.record import EnvironmentPlan

_COMMENT = re.compile(r"(^|\s+)#.*$")
_OPTION = re.compile(r"(?:--(?P<long>requirement|constraint|editable|find-links)(?:=|\s+)|-(?P<short>[rcef])\s*)(?P<value>.+)")
_SECOND = re.compile(r"\s(?:--(?:requirement|constraint|editable|find-links)\b|-[rcef]\s)")
_LONG = {"r": "requirement", "c": "constraint", "e": "editable", "f": "find-links"}
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_NAMED = re.compile(r"[A-Za-z0-9][\w.-]*\s*(?:\[[^]]*\])?\s*@\s*(.+)")
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_UV_LOCAL = ("editable", "directory", "virtual")
_UV_TABLES = ("project", "dependency-groups", "build-system")


class BuildFailed(Exception):
    """An environment or a tree cannot be built."""

    def __init__(self, message: str, transient: bool = False, by_command: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.transient = transient
        """The machine failed, not the commit."""
        self.by_command = by_command
        """The user's own command of --build failed."""


@dataclass(slots=True)
class Wanted:
    """What a lock asks for."""

    identity: list[str] = field(default_factory=list)
    requirements: list[str] = field(default_factory=list)
    """Lines for pip, without includes and without what is in the tree."""
    constraints: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Names of uv's local packages."""
    roots: list[Path] = field(default_factory=list)
    """Where uv's local packages are."""


def read_wanted(tree: Path, plan: EnvironmentPlan) -> Wanted:
    """Read the lock that the plan names; what is wrong with it is a BuildFailed."""
    lock, wanted = tree / plan.lock, Wanted()
    if not lock.is_file():
        raise BuildFailed(f"{plan.lock} does not exist at this commit")
    if plan.kind == "uv":
        try:
            _read_uv(tree, lock, wanted)
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise BuildFailed(
                f"{plan.lock}, or pyproject.toml beside it, is not as uv writes it: {type(error).__name__}: {error}"
            ) from error
    else:
        _Requirements(tree, wanted, bool(plan.build)).read(lock, ())
    return wanted


@dataclass(frozen=True, slots=True)
class _Requirements:
    tree: Path
    wanted: Wanted
    builds: bool

    def read(self, path: Path, through: tuple[Path, ...], constraint: bool = False) -> None:
        where = _shown(path, self.tree)
        if path in through:
            raise BuildFailed(f"{where} includes itself")
        for line in _logical(_text(path, self.tree)):
            option = _OPTION.fullmatch(line)
            if line.startswith("-") and _SECOND.search(line):
                raise BuildFailed(f"{where}: two options in one line: `{line}`; write one per line (--edit)")
            kind = (option["long"] or _LONG[option["short"]]) if option else ""
            value = _word(option["value"], where) if option else line
            if kind in ("requirement", "constraint"):
                if _SCHEME.match(value):
                    raise BuildFailed(f"{where}: `{line}` is not part of the commit; include a file of the repository instead")
                self.read(real_path(path.parent / value), (*through, path), constraint or kind == "constraint")
            elif kind == "find-links":
                self._links(path, value)
            elif kind == "editable" or not line.startswith("-"):
                self._package(line, value, where, constraint)
            else:
                self._take(line, line, constraint)

    def _package(self, line: str, value: str, where: str, constraint: bool) -> None:
        if not is_local(value):
            self._take(line, line, constraint)
        elif not self.builds:
            message = f"{where}: `{line}` installs from a path, and an environment is shared by commits"
            raise BuildFailed(f"{message}; install it for each commit instead: --build 'pip install --no-deps -e .'")

    def _links(self, path: Path, value: str) -> None:
        place = next((found for found in (path.parent / value, self.tree / value) if exists(found)), None)
        if _SCHEME.match(value) or place is None:
            self._take(f"--find-links {shlex.quote(value)}", value, False)
            return
        self._take(f"--find-links {shlex.quote(str(real_path(place)))}", f"--find-links {_content(place, self.tree)}", False)

    def _take(self, line: str, identity: str, constraint: bool) -> None:
        (self.wanted.constraints if constraint else self.wanted.requirements).append(line)
        self.wanted.identity.append(f"-c {identity}" if constraint else identity)


def _logical(text: str) -> Iterator[str]:
    """The lines of a requirements file: continued ones joined, without comments and blank ones."""
    pending = ""
    for line in text.removeprefix("\ufeff").splitlines():
        comment = line.lstrip().startswith("#")
        if line.endswith("\\") and not comment:
            pending += line[:-1]
            continue
        whole, pending = _COMMENT.sub("", f"{pending} {line}" if comment else pending + line).strip(), ""
        if whole:
            yield whole
    if last := _COMMENT.sub("", pending).strip():
        yield last


def is_local(value: str) -> bool:
    """Whether pip would take it for a path."""
    target = value.partition(";")[0].partition(" --")[0].strip()
    named = _NAMED.fullmatch(target)
    target = named[1].strip() if named else target
    if scheme := _SCHEME.match(target):
        return scheme[0].lower().endswith("file:")
    return target.startswith((".", "~")) or "/" in target or target.lower().endswith(_ARCHIVES)


def _word(value: str, where: str) -> str:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise BuildFailed(f"{where}: `{value}`: {error}") from error
    return words[0] if words else ""


def _read_uv(tree: Path, lock: Path, wanted: Wanted) -> None:
    project, locked = lock.parent, _toml(lock, tree)
    for package in locked.get("package", []):
        source = package.get("source", {})
        if kind := next((kind for kind in _UV_LOCAL if kind in source), None):
            wanted.left_out.append(package["name"])
            wanted.roots.append(real_path(project / source[kind]))
            package.pop("version", None)
        place = source.get("path") or source.get("registry") or ""
        if place and not _SCHEME.match(place):
            package["content"] = _content(project / place, tree)
    settings = _toml(project / "pyproject.toml", tree)
    settings.get("project", {}).pop("version", None)
    asked = {table: settings.get(table) for table in _UV_TABLES} | {"uv": settings.get("tool", {}).get("uv")}
    others = [_text(found, tree) if (found := project / name).is_file() else "" for name in (".python-version", "uv.toml")]
    wanted.identity += [json.dumps(locked, sort_keys=True, default=str), json.dumps(asked, sort_keys=True, default=str), *others]


def _toml(path: Path, tree: Path) -> dict[str, Any]:
    try:
        return parse_toml(_text(path, tree))
    except BadValue as error:
        raise BuildFailed(f"{_shown(path, tree)}: not valid TOML: {error}") from error


def _text(path: Path, tree: Path) -> str:
    if not is_file(path):
        raise BuildFailed(f"{_shown(path, tree)} does not exist at this commit")
    try:
        return files.read_text(path)
    except UserError as error:
        raise BuildFailed(error.message) from error


def _shown(path: Path, tree: Path) -> str:
    """The path as the repository has it."""
    whole, root = real_path(path), real_path(tree)
    return str(whole.relative_to(root)) if whole.is_relative_to(root) else str(path)


def _content(place: Path, tree: Path) -> str:
    """What identifies a wheel, or a directory of wheels: its content when it is part of the commit, else its place."""
    if not real_path(place).is_relative_to(real_path(tree)):
        return str(place)
    found = [place] if is_file(place) else sorted(filter(is_file, place.iterdir())) if exists(place) else []
    return json.dumps([(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in found])
