"""Places to run a command in: here, in a container (docker, podman, enroot), or in a fresh environment that sees nothing of the caller's.

`--with` requirements are checked before anything is built. What a killed Seatrial left running is ended.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from seatrial.bisect.bisect_records import EnvironmentPlan
from seatrial.bisect.environment_cache import FAILED, BisectEnvironments, ReadyEnvironment
from seatrial.bisect.lockfile import BuildFailed, is_local
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_text, write_text
from seatrial.core.guarded import BadValue, parse_toml
from seatrial.core.text import one_line
from seatrial.core.verdict import Boundary
from seatrial.evidence.redact import Redactor
from seatrial.history.auto_import import OFF, VARIABLE
from seatrial.runtime.command import Answer, NoAnswerError, run_command
from seatrial.runtime.environments import delete
from seatrial.runtime.process import LineFilter, Outcome, ProcessSpec, end_leftovers, run_stoppable
from seatrial.runtime.venvs import find_uv

GRACE_S = 10.0


class ExecutionPlace:
    """The caller's own environment; other places differ from it."""

    notes: tuple[str, ...] = ()
    """What a report must say of it."""

    def __enter__(self) -> Self:
        self.prepare()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def command(self, argv: tuple[str, ...], cwd: Path) -> tuple[tuple[str, ...], dict[str, str]]:
        """The words and the whole environment with which `argv` runs there."""
        return argv, {**os.environ, "PWD": str(cwd)}

    def shown(self, argv: tuple[str, ...], cwd: Path) -> list[str]:
        """The lines that would run, secrets by name only."""
        return [f"cd {shlex.quote(str(cwd))}", shlex.join(argv)]

    def prepare(self) -> None:
        """Make what is needed; a BlockedError when that cannot be done."""

    def refuse(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        """A BlockedError when the command that `command` gave cannot be found there; by default that is seen when it starts."""

    def run(
        self,
        words: tuple[str, ...],
        env: dict[str, str],
        cwd: Path,
        log: Path,
        minutes: float,
        line_filter: LineFilter,
        *,
        stall: float | None = None,
        watch: tuple[Path, ...] = (),
    ) -> Outcome:
        """Run what `command` gave; nothing of it is left when this returns. A BlockedError when it cannot be started."""
        self.refuse(words, env)
        spec = ProcessSpec(
            argv=words,
            env=env,
            cwd=cwd,
            log=log,
            run_id=f"{log.parent.name}-{time.time_ns()}",
            deadline_s=60 * minutes,
            stall_s=60 * (stall or minutes),
            watch=watch,
            grace_s=GRACE_S,
            line_filter=line_filter,
        )
        try:
            return run_stoppable(spec)
        finally:
            self.end()

    def end(self) -> None:
        """Make sure that nothing of the last command is left."""

    def remove(self) -> None:
        """Remove what was made."""


def run_in(place: ExecutionPlace, argv: tuple[str, ...], cwd: Path, log: Path, minutes: float, line: Callable[[str], None]) -> Outcome:
    """Run the command in a place that was entered; nothing of it is left when this returns. A BlockedError when it cannot be started."""
    clear = Redactor(os.environ).lines().line

    def passed_on(text: str) -> str:
        shown = clear(text)
        line(shown)
        return shown

    return place.run(*place.command(argv, cwd), cwd, log, minutes, passed_on)


def end_earlier(pid_files: Iterable[Path], tell: Callable[[str], None]) -> None:
    """End what the runs of these files left, and say so."""
    for file in sorted(pid_files):
        try:
            if file.is_symlink() or file.stat().st_uid != os.getuid():
                continue
            count = end_leftovers(file)
        except (OSError, UserError):
            continue  # gone meanwhile, no such file of ours, or its Seatrial is at work
        except BlockedError as error:
            tell(error.message)
            continue
        if count:
            tell(f"{file.parent}: ended {count} process{'' if count == 1 else 'es'} that a killed Seatrial had left running")


Engine = Literal["docker", "podman", "enroot"]
ENGINES: tuple[Engine, ...] = ("docker", "podman", "enroot")
_CHANGE = 'cd "$1" && shift && exec "$@"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A directory or file of this machine in the container."""

    source: Path
    target: str
    read_only: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.target}" + (":ro" if self.read_only else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What a container is made of."""

    engine: Engine
    image: str
    mounts: tuple[Mount, ...]
    env: tuple[str, ...] = ()
    """Names."""
    gpus: bool = False
    user: tuple[int, int] = (0, 0)


def _variables(box: Box) -> list[str]:
    own = () if VARIABLE in box.env else (f"{VARIABLE}={OFF}",)
    return [word for variable in (*box.env, *own) for word in ("--env", variable)]


def run_words(box: Box, name: str, argv: tuple[str, ...], workdir: Path) -> tuple[str, ...]:
    """The command that runs `argv` in a container called `name`."""
    if box.engine == "enroot":
        return _enroot_start(box, name, argv, workdir)
    words = [box.engine, "run", "--rm", "--init", "--name", name, "--user", f"{box.user[0]}:{box.user[1]}", "--workdir", str(workdir)]
    if box.engine == "podman" and box.user[0] != 0:
        words += ["--userns", "keep-id"]  # else the caller's files belong to root in there
    if box.gpus:
        words += ["--gpus", "all"] if box.engine == "docker" else ["--device", "nvidia.com/gpu=all"]
    for mount in box.mounts:
        words += ["--volume", str(mount)]
    words += _variables(box)
    return (*words, box.image, *argv)


def _enroot_start(box: Box, name: str, argv: tuple[str, ...], workdir: Path) -> tuple[str, ...]:
    words = ["enroot", "start", "--rw"]
    for mount in box.mounts:
        words += ["--mount", f"{mount.source}:{mount.target}" + (":ro,x-create=auto" if mount.read_only else "")]
    words += _variables(box)
    if box.gpus:
        words += ["--env", "NVIDIA_VISIBLE_DEVICES"]
    return (*words, name, "/bin/sh", "-c", _CHANGE, "sh", str(workdir), *argv)


def before_words(box: Box, name: str, scratch: Path) -> list[tuple[str, ...]]:
    """What must run before: enroot unpacks an image first, and fetches one that is not a file."""
    if box.engine != "enroot":
        return []
    image, made = box.image, []
    if not image.endswith((".sqsh", ".squashfs")):
        image = str(scratch / f"{name}.sqsh")
        address = box.image if "://" in box.image else f"docker://{box.image}"
        made.append(("enroot", "import", "--output", image, address))
    return [*made, ("enroot", "create", "--name", name, image)]


def after_words(box: Box, name: str) -> tuple[str, ...]:
    """What removes the container, running or not."""
    return ("enroot", "remove", "--force", name) if box.engine == "enroot" else (box.engine, "rm", "--force", name)


def left_words(box: Box, name: str) -> tuple[str, ...]:
    """What prints a line when the container is still there."""
    return ("enroot", "list") if box.engine == "enroot" else (box.engine, "ps", "--all", "--quiet", "--filter", f"name=^{name}$")


ANSWER_S, IMPORT_S, REMOVE_S = 60.0, 3600.0, 120.0
_NAME = re.compile(r"[A-Za-z_]\w*")
ANSWERS: dict[Engine, tuple[str, ...]] = {
    "docker": ("docker", "version", "--format", "{{.Server.Version}}"),
    "podman": ("podman", "info", "--format", "{{.Host.Arch}}"),
    "enroot": ("enroot", "version"),
}
"""What succeeds when the engine can be used: a client without its daemon is no engine."""
_FIXES = {
    "docker": "start its daemon (sudo systemctl start docker) or join the group that may use it; or choose --engine podman",
    "podman": "run `podman info` to see why; or choose another --engine",
    "enroot": "run `enroot version` to see why; or choose another --engine",
}


def environment_names(names: list[str]) -> tuple[str, ...]:
    """The names of `--env`, each of a variable that is set; values are not taken, they would stand in a command line."""
    for name in names:
        if "=" in name:
            shown = name.partition("=")[0]
            raise UserError(
                f"--env {shown}=…: give the name alone, no value may stand in a command line", f"{shown}=… seatrial … --env {shown}"
            )
        if not _NAME.fullmatch(name):
            raise UserError(f"--env {name}: not the name of a variable", "give names such as HF_TOKEN")
        if name not in os.environ:
            raise UserError(f"--env {name}: not set here", f"export {name}, or leave it out")
    return tuple(dict.fromkeys(names))


def parse_mount(text: str) -> Mount:
    """`SRC:DST` or `SRC:DST:ro`."""
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(parts) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise UserError(f"--mount {text}: not SRC:DST or SRC:DST:ro", "give two paths, as /data:/data:ro")
    source = Path(parts[0]).expanduser().absolute()
    if not source.exists():
        raise UserError(f"--mount {text}: {source} does not exist", "make it, or correct the path")
    if not parts[1].startswith("/"):
        raise UserError(f"--mount {text}: {parts[1]} is not absolute", "give the whole path in the container")
    return Mount(source=source, target=parts[1], read_only=parts[2:] == ["ro"])


def own_mounts(*places: Path) -> tuple[Mount, ...]:
    whole = sorted({place.absolute() for place in places})
    return tuple(
        Mount(source=one, target=str(one)) for one in whole if not any(one != other and one.is_relative_to(other) for other in whole)
    )


def choose_engine(asked: str | None) -> Engine:
    """The engine that was asked for, or the first that answers; a BlockedError when none does."""
    if asked is not None and asked not in ENGINES:
        raise UserError(f"--engine {asked}: unknown", f"use {', '.join(ENGINES)}")
    tried = []
    for engine in ENGINES:
        if asked not in (None, engine):
            continue
        why = unusable(engine)
        if why is None:
            return engine
        tried.append((engine, why))
    message = "; ".join(f"{engine}: {why}" for engine, why in tried)
    fix = _FIXES[tried[0][0]] if asked and shutil.which(asked) else f"install one of {', '.join(ENGINES)}, or leave --image out"
    raise BlockedError(Boundary.ENVIRONMENT, f"no container can be started here: {message}", fix)


def unusable(engine: Engine) -> str | None:
    """Why the engine cannot be used, or None."""
    if shutil.which(engine) is None:
        return "not on PATH"
    done = _call(ANSWERS[engine], ANSWER_S)
    return None if done.code == 0 else one_line(done.error or done.out)[-300:] or f"exit {done.code}"


class Container(ExecutionPlace):
    """A new container for each command; with enroot one that is unpacked once."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self._name = f"seatrial-{secrets.token_hex(4)}"
        self._count = 0
        self._scratch: Path | None = None
        self.notes = (f"ran in {box.image} ({box.engine})",)

    def prepare(self) -> None:
        """Fetch and unpack: an image that cannot be had is Blocked, not a command that failed."""
        if (engine := self.box.engine) != "enroot":
            image = self.box.image
            if _call((engine, "image", "inspect", image), ANSWER_S).code == 0:
                return
            done = _call((engine, "pull", image), IMPORT_S)
            if done.code != 0:
                message = f"{engine} pull {image}: {one_line(done.error or done.out)[-300:]}"
                fix = "check the name of the image and the access to its registry, or build it"
                raise BlockedError(Boundary.ENVIRONMENT, message, fix)
            return
        self._scratch = Path(tempfile.mkdtemp(prefix="seatrial-enroot-"))
        for words in before_words(self.box, self._name, self._scratch):
            done = _call(words, IMPORT_S)
            if done.code != 0:
                self.remove()
                message = f"{shlex.join(words)}: {one_line(done.error or done.out)[-300:]}"
                raise BlockedError(Boundary.ENVIRONMENT, message, "check the name of the image and the access to its registry")

    def command(self, argv: tuple[str, ...], cwd: Path) -> tuple[tuple[str, ...], dict[str, str]]:
        """A container of its own for each command; the client has the caller's variables, the container those that are named."""
        self._count += 1
        env = dict(os.environ)
        if self.box.engine == "enroot" and self.box.gpus:
            env.setdefault("NVIDIA_VISIBLE_DEVICES", "all")
        return run_words(self.box, self._current(), argv, cwd), env

    def shown(self, argv: tuple[str, ...], cwd: Path) -> list[str]:
        scratch = Path(tempfile.gettempdir())
        lines = [*before_words(self.box, self._name, scratch), run_words(self.box, self._name, argv, cwd)]
        lines += [after_words(self.box, self._name)] if self.box.engine == "enroot" else []
        return [shlex.join(words) for words in lines]

    def end(self) -> None:
        """Remove the container of the last command; a client that was killed leaves it running."""
        if self.box.engine != "enroot":
            self._gone(self._current())

    def remove(self) -> None:
        if self.box.engine == "enroot":
            self._gone(self._name)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _current(self) -> str:
        return self._name if self.box.engine == "enroot" else f"{self._name}-{self._count}"

    def _gone(self, name: str) -> None:
        _call(after_words(self.box, name), REMOVE_S)
        left = _call(left_words(self.box, name), ANSWER_S).out.split()
        if left and (self.box.engine != "enroot" or name in left):
            self.notes = (*self.notes, f"container {name} could not be removed: {shlex.join(after_words(self.box, name))}")


def devices_here(devices: Path = Path("/dev")) -> bool:
    """Whether the kernel shows a GPU of NVIDIA, whatever NVML says."""
    return any(path.name[6:].isdigit() for path in devices.glob("nvidia*"))


def make_box(engine: Engine, image: str, mounts: tuple[Mount, ...], env: tuple[str, ...]) -> Box:
    gpus = devices_here()
    if gpus and "CUDA_VISIBLE_DEVICES" in os.environ:
        env = tuple(dict.fromkeys((*env, "CUDA_VISIBLE_DEVICES")))
    return Box(engine=engine, image=image, mounts=mounts, env=env, gpus=gpus, user=(os.getuid(), os.getgid()))


def _call(words: tuple[str, ...], seconds: float) -> Answer:
    """A short command of an engine; one that hangs or cannot be started has failed."""
    try:
        return run_command(words, seconds)
    except NoAnswerError as error:
        return Answer(127, b"", str(error).encode("utf-8", "replace"))


_CLAUSE = r"\s*(?:===\s*[^\s,;)]+|(?:[<>=!~]=|[<>])\s*v?(?:\d+!)?\d[\w.*+-]*)\s*"
_CLAUSES = rf"{_CLAUSE}(?:,{_CLAUSE})*,?\s*"
_MARKER = r"(?:;\s*\S.*)?"
_NAMED = re.compile(
    r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?\s*(?:\[[\w\s,.-]*\])?\s*"
    rf"(?:@\s*\S+(?:\s+{_MARKER})?|(?:\({_CLAUSES}\)|{_CLAUSES})?\s*{_MARKER})",
    re.ASCII,
)
"""The form of PEP 508; what a marker says is left to the installer."""
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+")


def check_requirement(text: str, project: Path) -> None:
    """A UserError unless it has the form of a requirement: a name with versions, an address, or a path that is there."""
    wanted = text.strip()
    if _NAMED.fullmatch(wanted) or _ADDRESS.fullmatch(wanted):
        return
    fix = "name a package, such as pytest or 'pytest<9'"
    if wanted and not wanted.startswith("-") and is_local(wanted):
        path = Path(re.sub(r"\[[^]]*\]$", "", wanted))  # extras may follow a path
        if (project / path).exists():
            return
        raise UserError(f"--with {text}: {project / path} does not exist", f"correct the path, or {fix}")
    raise UserError(f"--with {text}: not a requirement", fix)


LOCKS = ("requirements.lock", "requirements.txt")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PASSED_ON = (
    *("LANG", "LANGUAGE", "TZ", "TERM", "USER", "LOGNAME", "COLUMNS", "LINES", "NO_COLOR"),
    *(
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
    ),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
)
OWN = ("HOME", "TMPDIR", "PATH", "SHELL", "PWD", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")
BUILD_S = 3600.0
DEPENDENCIES = "dependencies.txt"
LAST_LINES = 15


class Fresh(ExecutionPlace):
    """A fresh environment of a project."""

    def __init__(
        self,
        project: Path,
        env: tuple[str, ...] = (),
        packages: tuple[str, ...] = (),
        *,
        keep: bool = False,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.project, self.env, self.packages, self.keep, self._tell = project.absolute(), env, packages, keep, tell
        if taken := [name for name in env if name in OWN]:
            raise UserError(f"--env {taken[0]}: a fresh environment has one of its own", "leave it out")
        for package in packages:
            check_requirement(package, self.project)
        self.directory: Path | None = None
        self._ready: ReadyEnvironment | None = None

    def prepare(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="seatrial-hermetic-"))
        try:
            plan, note = self._plan(self.directory)
            self._ready = BisectEnvironments(self.directory / "environments").ensure(self.project, plan, self._tell, BUILD_S)
            for name in ("home", "tmp", "bin"):
                (self.directory / name).mkdir()
            if uv := find_uv():
                (self.directory / "bin" / "uv").symlink_to(Path(uv).resolve())
            self.notes = (f"ran in a fresh environment from {note}",)
        except BuildFailed as error:
            blocked = self._blocked(self.directory, error)
            self.remove()
            raise blocked from error
        except BaseException:
            self.remove()
            raise

    def _blocked(self, directory: Path, error: BuildFailed) -> BlockedError:
        """The error of a build that failed. Its log goes with the directory, so the end of it is told and no file there is named."""
        for log in (directory / "environments").glob(f"*{FAILED}"):
            lines = read_text(log).splitlines()[-LAST_LINES:]
            for line in ("the build ended with:", *(f"  {line}" for line in lines)):
                self._tell(line)
        message = error.without_log.replace(str(directory / DEPENDENCIES), "pyproject.toml")
        what = " ".join(f"--with {shlex.quote(one)}" for one in self.packages) if error.beside else "the lock (without one, pyproject.toml)"
        fix = f"correct {what}, or the access to the package index; then run it again"
        return BlockedError(Boundary.ENVIRONMENT, f"the fresh environment cannot be built: {message}", fix)

    def command(self, argv: tuple[str, ...], cwd: Path) -> tuple[tuple[str, ...], dict[str, str]]:
        assert self._ready is not None
        assert self._ready.python is not None
        assert self.directory is not None
        kept = {name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith("LC_") or name in self.env}
        path = os.pathsep.join([str(self._ready.python.parent), str(self.directory / "bin"), SYSTEM_PATH])
        home = self.directory / "home"
        own = {"HOME": str(home), "TMPDIR": str(self.directory / "tmp"), "PATH": path, "SHELL": "/bin/sh", "PWD": str(cwd)}
        own |= {f"XDG_{kind}_HOME": str(home / place) for kind, place in _XDG.items()}
        if VARIABLE not in self.env:
            own[VARIABLE] = OFF
        made = {**kept, **own, **{name: value for name, value in self._ready.variables.items() if name != "PATH"}}
        return argv, made

    def refuse(self, argv: tuple[str, ...], env: dict[str, str]) -> None:
        """The usual mistake is a tool of the caller's, such as pytest, that the project does not name among its dependencies."""
        program = argv[0]
        if "/" in program or shutil.which(program, path=env["PATH"]):
            return
        fix = f"add it with `--with {program}` (or the package that has it), or name it among the project's dependencies"
        raise BlockedError(Boundary.ENVIRONMENT, f"{program} is not in the fresh environment", fix)

    def shown(self, argv: tuple[str, ...], cwd: Path) -> list[str]:
        if self._ready is None:
            with tempfile.TemporaryDirectory(prefix="seatrial-hermetic-") as scratch:
                note = self._plan(Path(scratch))[1]
            return [f"# a fresh environment from {note}", shlex.join(argv)]
        words, _ = self.command(argv, cwd)
        return [f"# in {self.directory}", shlex.join(words)]

    def remove(self) -> None:
        if self.directory is None:
            return
        if self.keep and self._ready is not None:
            self._tell(f"kept: {self.directory}")
        else:
            delete(self.directory)

    def _plan(self, scratch: Path) -> tuple[EnvironmentPlan, str]:
        if (self.project / "uv.lock").is_file() and find_uv():
            return EnvironmentPlan(kind="uv", lock="uv.lock", packages=self.packages), "uv.lock"
        for name in LOCKS:
            if (self.project / name).is_file():
                return EnvironmentPlan(kind="pip", lock=name, packages=self.packages), name
        if (self.project / "uv.lock").is_file():
            raise UserError(f"{self.project}: has a uv.lock, and uv is not on PATH", "install it: pip install uv")
        if (self.project / "pyproject.toml").is_file():
            wanted = scratch / DEPENDENCIES
            write_text(wanted, "".join(f"{line}\n" for line in _dependencies(self.project / "pyproject.toml")))
            note = "the dependencies in pyproject.toml, which no lock pins"
            return EnvironmentPlan(kind="pip", lock=str(wanted), packages=self.packages), note
        looked = ", ".join(("uv.lock", *LOCKS, "pyproject.toml"))
        raise UserError(f"{self.project}: nothing says what a fresh environment must hold", f"add one of {looked}; or give --image")


_XDG = {"CACHE": ".cache", "CONFIG": ".config", "DATA": ".local/share", "STATE": ".local/state"}


def _dependencies(file: Path) -> list[str]:
    try:
        project = parse_toml(read_text(file)).get("project", {})
    except BadValue as error:
        raise UserError(f"{file}: {error}", "correct the file") from error
    found = project.get("dependencies", [])
    if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
        raise UserError(f"{file}: project.dependencies is not a list of texts", "correct the file")
    return found
