"""Runs a command in a container: docker, podman or enroot, and their command lines."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.text import one_line
from seatrial.core.verdict import Boundary
from seatrial.functional.hermetic import ExecutionPlace
from seatrial.history.auto_import import OFF, VARIABLE
from seatrial.runtime.command import Answer, NoAnswerError, run_command

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


def caller() -> tuple[int, int]:
    """User and group of this process."""
    return os.getuid(), os.getgid()


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


def answer_words(engine: Engine) -> tuple[str, ...]:
    """What succeeds when the engine can be used: a client without its daemon is no engine."""
    return {
        "docker": ("docker", "version", "--format", "{{.Server.Version}}"),
        "podman": ("podman", "info", "--format", "{{.Host.Arch}}"),
        "enroot": ("enroot", "version"),
    }[engine]


ANSWER_S, IMPORT_S, REMOVE_S = 60.0, 3600.0, 120.0
_NAME = re.compile(r"[A-Za-z_]\w*")
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
    """Directories under their own paths; one that lies in another is in it already."""
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
    done = _call(answer_words(engine), ANSWER_S)
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
        if self.box.engine != "enroot":
            self._fetch()
            return
        self._scratch = Path(tempfile.mkdtemp(prefix="seatrial-enroot-"))
        for words in before_words(self.box, self._name, self._scratch):
            done = _call(words, IMPORT_S)
            if done.code != 0:
                self.remove()
                message = f"{shlex.join(words)}: {one_line(done.error or done.out)[-300:]}"
                raise BlockedError(Boundary.ENVIRONMENT, message, "check the name of the image and the access to its registry")

    def _fetch(self) -> None:
        image = self.box.image
        if _call((self.box.engine, "image", "inspect", image), ANSWER_S).code == 0:
            return
        done = _call((self.box.engine, "pull", image), IMPORT_S)
        if done.code != 0:
            message = f"{self.box.engine} pull {image}: {one_line(done.error or done.out)[-300:]}"
            raise BlockedError(Boundary.ENVIRONMENT, message, "check the name of the image and the access to its registry, or build it")

    def command(self, argv: tuple[str, ...], cwd: Path) -> tuple[tuple[str, ...], dict[str, str]]:
        """A container of its own for each command; the client has the caller's variables, the container those that are named."""
        self._count += 1
        env = dict(os.environ)
        if self.box.engine == "enroot" and self.box.gpus:
            env.setdefault("NVIDIA_VISIBLE_DEVICES", "all")
        return run_words(self.box, self._current(), argv, cwd), env

    def shown(self, argv: tuple[str, ...], cwd: Path) -> list[str]:
        """Every command, in order."""
        scratch = Path(tempfile.gettempdir())
        lines = [*before_words(self.box, self._name, scratch), run_words(self.box, self._name, argv, cwd)]
        lines += [after_words(self.box, self._name)] if self.box.engine == "enroot" else []
        return [shlex.join(words) for words in lines]

    def end(self) -> None:
        """Remove the container of the last command; a client that was killed leaves it running."""
        if self.box.engine != "enroot":
            self._gone(self._current())

    def remove(self) -> None:
        """What enroot unpacked."""
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
    """A container of the caller, with the GPUs of this machine."""
    gpus = devices_here()
    if gpus and "CUDA_VISIBLE_DEVICES" in os.environ:
        env = tuple(dict.fromkeys((*env, "CUDA_VISIBLE_DEVICES")))
    return Box(engine=engine, image=image, mounts=mounts, env=env, gpus=gpus, user=caller())


def _call(words: tuple[str, ...], seconds: float) -> Answer:
    """A short command of an engine; one that hangs or cannot be started has failed."""
    try:
        return run_command(words, seconds)
    except NoAnswerError as error:
        return Answer(127, b"", str(error).encode("utf-8", "replace"))
