"""What a commit's lock file asks for, and its installation with pip, uv or the build command.

- pip runs from outside the environment; uv is told the project, the place, and what not to install.
- Indexes, credentials, caches and proxies of the caller are passed on; settings that change what is installed are not.
- A failure is transient when the log shows a known network, disk or memory error: it costs a retry, and never marks a commit.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial.bisect.bisect_records import EnvironmentPlan
from seatrial.core import files
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import BadValue, exists, is_file, parse_toml, real_path
from seatrial.core.verdict import Boundary
from seatrial.runtime.process import LineFilter
from seatrial.runtime.venvs import StepFailed, VenvBuilder, clean_env, find_uv, interpreter, read_installed, uv_env
from seatrial.triage.log import read_log
from seatrial.triage.signatures import GENERAL, Hit, first_match, load_signatures

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

    def __init__(
        self, message: str, transient: bool = False, by_command: bool = False, *, beside: bool = False, without_log: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.transient = transient
        """The machine failed, not the commit."""
        self.by_command = by_command
        """The user's own command of --build failed."""
        self.beside = beside
        """It was about further packages (--with), not about the lock."""
        self.without_log = without_log or message
        """The message without the place of the log."""


@dataclass(slots=True)
class LockRequest:
    identity: list[str] = field(default_factory=list)
    requirements: list[str] = field(default_factory=list)
    """Lines for pip, without includes and without what is in the tree."""
    constraints: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Names of uv's local packages."""
    roots: list[Path] = field(default_factory=list)
    """Where uv's local packages are."""


def read_wanted(tree: Path, plan: EnvironmentPlan) -> LockRequest:
    """Read the lock that the plan names; what is wrong with it is a BuildFailed."""
    lock, wanted = tree / plan.lock, LockRequest()
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
    wanted: LockRequest
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
            value = option["value"] if option else line
            try:
                value = next(iter(shlex.split(value)), "") if option else value
            except ValueError as error:
                raise BuildFailed(f"{where}: `{value}`: {error}") from error
            if kind in ("requirement", "constraint"):
                if _SCHEME.match(value):
                    raise BuildFailed(f"{where}: `{line}` is not part of the commit; include a file of the repository instead")
                self.read(real_path(path.parent / value), (*through, path), constraint or kind == "constraint")
            elif kind == "find-links":
                self._links(path, value)
            elif (kind != "editable" and line.startswith("-")) or not is_local(value):
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


def _read_uv(tree: Path, lock: Path, wanted: LockRequest) -> None:
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


MACHINE = (
    *("no-space", "dns", "network", "connection-refused", "hub-rate-limit"),
    *("host-memory", "process-limit", "too-many-open-files", "shared-memory"),
)
"""Known failures that no commit causes in a build. A missing compiler or a file that may not be read can be the commit's doing."""

_INDEX = re.compile(
    r"ReadTimeoutError|ConnectTimeoutError|NewConnectionError|ConnectionResetError|IncompleteRead|Max retries exceeded|SSLError"
    r"|Connection (reset|aborted|broken|timed out)|(Read|[Oo]peration) timed out|error sending request|connection closed"
    r"|\b(429|50[0234]) (Client |Server )?Error|HTTP status (server error|client error \(429)"
)
"""How pip and uv say that an index could not be reached; no loop does, so these are not among the general signatures."""

_NOT_FOR_OTHERS = ("-e", "--editable", "--require-hashes")
"""Options of a lock that are not about where packages come from."""


@contextmanager
def failing_build(log: Path, *, by_command: bool = False, beside: bool = False) -> Iterator[None]:
    """A step that fails inside is a BuildFailed; `beside`: it installs further packages."""
    try:
        yield
    except StepFailed as error:
        transient = error.started and by_machine(log)
        raise BuildFailed(str(error), transient=transient, by_command=by_command, beside=beside) from error


def build_with_pip(builder: VenvBuilder, venv: Path, wanted: LockRequest, python: str) -> None:
    """A venv with what the requirements ask for, without pip itself."""
    builder.create(python, venv)
    if not wanted.requirements:
        return
    place, options = venv.parent / "requirements.txt", list[str]()
    files.write_text(place, "".join(f"{line}\n" for line in wanted.requirements))
    if wanted.constraints:
        files.write_text(venv.parent / "constraints.txt", "".join(f"{line}\n" for line in wanted.constraints))
        options = ["-c", str(venv.parent / "constraints.txt")]
    builder.install(f"installing {len(wanted.requirements)} requirements", python, venv, place, *options, uv_too=False)


def build_with_uv(builder: VenvBuilder, venv: Path, wanted: LockRequest, python: str, project: Path) -> None:
    """What `uv sync` makes of the lock, without the packages that are in the tree."""
    leave = [part for name in wanted.left_out for part in ("--no-install-package", name)]
    chosen = ("--python", python) if python else ()
    argv = (require_uv(), "sync", "--frozen", "--no-progress", *chosen, *leave)
    builder.step("syncing", argv, cwd=project, env={**uv_env(), "UV_PROJECT_ENVIRONMENT": str(venv)})


def add_with_pip(builder: VenvBuilder, venv: Path, wanted: LockRequest, packages: Sequence[str], python: str) -> None:
    """Install further packages from where the lock takes its own; what is there keeps its version."""
    options = [line for line in wanted.requirements if line.startswith("-") and not line.startswith(_NOT_FOR_OTHERS)]
    place = venv.parent / "with.txt"
    files.write_text(place, "".join(f"{line}\n" for line in (*options, *packages)))
    builder.install(_beside(packages), python, venv, place, "-c", str(_present(venv, wanted.constraints)), uv_too=False)


def add_with_uv(builder: VenvBuilder, venv: Path, packages: Sequence[str], project: Path) -> None:
    """The same with uv, which reads in the project where packages come from."""
    argv = (require_uv(), "pip", "install", "--no-progress", "--python", str(interpreter(venv)), "--constraint", str(_present(venv)))
    builder.step(_beside(packages), (*argv, *packages), cwd=project, env=uv_env())


def _beside(packages: Sequence[str]) -> str:
    return f"installing {', '.join(packages)} beside it (--with)"


def _present(venv: Path, constraints: Sequence[str] = ()) -> Path:
    """What is installed, as constraints: unlike the lock, this holds versions only, which is all that pip takes here."""
    place, installed = venv.parent / "present.txt", read_installed(interpreter(venv)).packages
    pins = (f"{name}=={versions[0]}" for name, versions in sorted(installed.items()))
    more = (line for line in constraints if "--hash" not in line)  # one hash would demand one of everything
    files.write_text(place, "".join(f"{line}\n" for line in (*pins, *more)))
    return place


def run_build(tree: Path, command: tuple[str, ...], variables: Mapping[str, str], log: Path, minutes: float, redact: LineFilter) -> None:
    """Run a build command in the tree; a BuildFailed when it fails."""
    builder = VenvBuilder(command[0], log, time.monotonic() + 60 * minutes, lambda _: None, redact)
    with failing_build(log, by_command=True):
        builder.step("the build command", command, cwd=tree, env={**clean_env(), **variables})


def require_uv() -> str:
    """Where uv is; a BlockedError when it is not."""
    if found := find_uv():
        return found
    raise BlockedError(Boundary.ENVIRONMENT, "uv is not on PATH", "install it (pip install uv), or choose --env none")


def by_machine(log: Path) -> bool:
    """Whether the log shows a failure that the machine or the network is known for."""
    lines = [Hit(line.number, line.body) for line in read_log(log)]
    known = (signature for signature in load_signatures(GENERAL) if signature.id in MACHINE)
    return any(first_match(signature, lines) for signature in known) or any(_INDEX.search(line.text) for line in lines)
