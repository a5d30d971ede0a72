"""Command lines of containers, as lists of words: docker, podman and enroot.

- Variables of the caller are passed by name only: a value never stands in a command line, in `ps` or in a log.
- Automatic imports into the history are off, unless the caller names its variable: the store would go with the container.
- The container goes when the command ends, has an init that passes signals on and takes in orphans, and runs as the caller, so that
  what it writes into the checkout belongs to the caller.
- GPUs are passed on when asked. The network is the engine's default.
- enroot has no working directory of its own: a small shell changes to it and hands over.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from seatrial.regress.history.switch import OFF, VARIABLE

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
