"""One instance of Gym's servers: started, waited for, watched, ended.

- It has its own block of ports, its own Ray, its own directory (see `command`); any number of instances may run on a machine.
- Ready means: the head lists the expected servers, and each answers (200, where this generation of Gym does). Until then the
  deadline counts, what is waited for is said, and the death of any process ends the wait at once, with the last lines of the log
  that matters.
- Later `gone()` tells within a moment that a process died; Gym itself looks once a minute.
- Nothing is left of it: not after `end`, not after a failed start, not after kill -9 of the collector (see `guard`).
- What Gym prints stands in gym.log, without secrets. Its own log files may hold some: they stay in the private directory.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from seatrial import files
from seatrial.evidence.redact import Redactor
from seatrial.launch.interrupt import stop_requested
from seatrial.launch.linelog import STAMP_LENGTH, LineLog
from seatrial.launch.process import Control, Outcome, ProcessSpec, end_leftovers, pid_file, run
from seatrial.launch.processes import is_alive
from seatrial.launch.ready import Missed, Target, wait_ready
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.guarded import parse_json
from seatrial.model.verdict import Boundary
from seatrial.rollouts.campaign import Gym
from seatrial.rollouts.gym.command import LOOPBACK, Asked, Private, environment, start_words
from seatrial.rollouts.gym.guard import Guard
from seatrial.rollouts.gym.install import SERVER_KINDS, Installation
from seatrial.rollouts.gym.ports import Block

LOG = "gym.log"
_GRACE_S = 2.0
"""They hold nothing that is worth more."""
_STARTED_S = 30.0
_LOOK_S = 0.1
_LAST_LINES = 15
_WHOSE = "Gym's "
_LONGEST_TEMPORARY = 30
"""Ray's sockets lie below the private directory, and their paths may have 107 characters in all."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A server of Gym."""

    name: str
    kind: str
    """resources_servers, responses_api_agents, responses_api_models."""
    url: str
    pid: int


class GymServers:
    """Start, then ask `gone()` now and then, then end. Methods may be called from any thread; `start` blocks."""

    def __init__(
        self,
        gym: Gym,
        installation: Installation,
        policy: Asked,
        logs: Path,
        progress: Callable[[str], None],
        sandbox: tuple[str, int] | None = None,
    ) -> None:
        self._gym = gym
        self.installation = installation
        self._progress = progress
        self.log = logs / LOG
        self.ports = Block()
        self.private = Private(Path(tempfile.mkdtemp(prefix="st-gym-", dir=_temporary())))
        self.environment: Mapping[str, str] = environment(os.environ, installation, policy, self.private, sandbox)
        self.redactor = Redactor(self.environment)
        self._words = start_words(gym, installation, self.ports, policy, self.private)
        self._control = Control()
        self._ended: Outcome | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gym-servers")
        self._guard: Guard | None = None
        self._ending = threading.Lock()
        self._watched: dict[str, psutil.Process] = {}
        self.instances: tuple[Instance, ...] = ()

    def start(self) -> None:
        """Return when every server is ready; a BlockedError or UserError says why not, and leaves nothing behind."""
        try:
            self._prepare()
            self._say_which()
            self._thread.start()
            self._wait_for_processes()
            self._guard = Guard(pid_file(self.log), self.private.root)
            self._wait_for_servers(time.monotonic() + self._gym.deadline_s)
        except BaseException:
            self.end()
            raise

    def agents(self) -> dict[str, str]:
        """URLs of the agents by name."""
        return {found.name: found.url for found in self.instances if found.kind == "responses_api_agents"}

    def gone(self) -> str | None:
        """None, or which process is no more, with the end of its log."""
        if self._ended is not None:
            how = f"with code {self._ended.exit_code}" if isinstance(self._ended, Outcome) else f"({self._ended})"
            return f"Gym's servers ended {how}: {self._last_lines()}"
        for name, process in self._watched.items():
            if not is_alive(process):
                return f"Gym's server {name} died: {self._last_lines(name)}"
        return None

    def end(self) -> None:
        """End every process and remove the private directory."""
        self._control.stop("the collector needs Gym's servers no more", _GRACE_S)
        if self._thread.ident is not None:
            self._thread.join()
        with self._ending:
            if self._guard is not None:
                self._guard.dismiss()
                self._guard = None
            shutil.rmtree(self.private.root, ignore_errors=True)
            self.ports.close()

    def _prepare(self) -> None:
        end_leftovers(pid_file(self.log))
        for directory in (self.private.work, self.private.logs, self.private.ray, self.private.venvs):
            directory.mkdir()
        own = Path(self._gym.directory).expanduser().absolute() if self._gym.directory else None
        for entry in own.iterdir() if own else ():
            # Gym finds relative paths, and env.yaml, below its working directory, and writes there, too.
            (self.private.work / entry.name).symlink_to(entry)
        if self._gym.shared_environments:
            for root in filter(None, (self.installation.root, own)):
                _share(self.installation.prefix, root, self.private.venvs)
        elif shutil.which("uv", path=self.environment["PATH"]) is None:
            fix = "pip install uv, or say gym.shared_environments = true where Gym's own environment has all that the servers need"
            raise BlockedError(Boundary.ENVIRONMENT, "Gym makes an environment for each of its servers with uv, which is not on PATH", fix)

    def _say_which(self) -> None:
        which = f"{self.installation.generation} ({self.installation.python})"
        self._progress(which)
        with LineLog(self.log, self.redactor.text) as log:
            log.note(which)

    def _run(self) -> None:
        spec = ProcessSpec(
            argv=self._words,
            env=self.environment,
            cwd=self.private.work,
            log=self.log,
            run_id=f"gym-{uuid.uuid4().hex}",
            deadline_s=math.inf,
            stall_s=math.inf,
            grace_s=_GRACE_S,
            line_filter=self.redactor.lines().line,
            control=self._control,
        )
        try:
            self._ended = run(spec)
        except (BlockedError, UserError) as error:
            self._ended = error

    def _wait_for_processes(self) -> None:
        """Until the run has noted its processes: before that there is nothing that a guard could find."""
        stops = time.monotonic() + _STARTED_S
        while not pid_file(self.log).is_file():
            self._halt_or_raise()
            if time.monotonic() > stops:
                raise self._blocked(f"{self._words[1]} was not started within {_STARTED_S:g} s")
            time.sleep(_LOOK_S)

    def _wait_for_servers(self, stops: float) -> None:
        head = f"http://{LOOPBACK}:{self.ports.head}/server_instances"
        self._wait([Target(f"{_WHOSE}head", head, stops - time.monotonic())])
        while not (listed := _get_json(head)):
            self._halt_or_raise()
            if time.monotonic() > stops:
                raise self._blocked(f"Gym's head lists no servers after {self._gym.deadline_s:g} s")
            time.sleep(_LOOK_S)
        self.instances = tuple(Instance(one["process_name"], one["server_type"], one["url"], one["pid"]) for one in listed)
        if self._gym.servers is not None and len(self.instances) != self._gym.servers:
            names = ", ".join(found.name for found in self.instances)
            raise UserError(f"Gym starts {len(self.instances)} servers ({names}), and gym.servers says {self._gym.servers}", "correct one")
        self._watched = {found.name: process for found in self.instances if (process := _process(found.pid))}
        if missing := [found.name for found in self.instances if found.name not in self._watched]:
            raise self._blocked(f"Gym's server {missing[0]} died: {self._last_lines(missing[0])}")
        left = stops - time.monotonic()
        foreign = not self.installation.generation.liveness
        self._wait([Target(f"{_WHOSE}{found.name}", f"{found.url}/", left, foreign) for found in self.instances])
        self._progress(f"Gym's {len(self.instances)} servers are ready: {', '.join(found.name for found in self.instances)}")

    def _wait(self, targets: list[Target]) -> None:
        result = wait_ready(targets, self._halt, self._progress)
        if isinstance(result, Missed):
            raise self._blocked(f"{result.message}; {self._last_lines(result.name.removeprefix(_WHOSE))}")
        if result is not None:
            raise self._blocked(result)

    def _halt(self) -> str | None:
        return "the collector was asked to stop" if self._control.asked or stop_requested() else self.gone()

    def _halt_or_raise(self) -> None:
        if isinstance(self._ended, BaseException):
            raise self._ended
        if reason := self._halt():
            raise self._blocked(reason)

    def _blocked(self, message: str) -> BlockedError:
        return BlockedError(Boundary.ENVIRONMENT, message, f"see {self.log}")

    def _last_lines(self, name: str | None = None) -> str:
        """What a server, or Gym itself, said last, without secrets."""
        own = self.private.logs / f"{name}.log"
        if name is not None and own.is_file():
            lines = files.read_text(own).splitlines()
        else:
            lines = [line[STAMP_LENGTH:] for line in files.read_text(self.log).splitlines()] if self.log.is_file() else []
            # Servers put their names before their lines, once they are far enough.
            others = tuple(f"({found.name}) " for found in self.instances if found.name != name) if name else ()
            lines = [line for line in lines if not line.startswith(others)]
        kept = [line for line in lines if line.strip() and not line.startswith("[seatrial]")][-_LAST_LINES:]
        return self.redactor.text("\n".join(kept)) or "nothing was said"


def _temporary() -> Path:
    """A directory with a short path that every shell takes as it is: Gym does not quote."""
    chosen = tempfile.gettempdir()
    plain = all(letter.isalnum() or letter in "/._-" for letter in chosen)
    return Path(chosen if plain and len(chosen) <= _LONGEST_TEMPORARY else "/tmp")


def _share(prefix: Path, root: Path, venvs: Path) -> None:
    """Give each server Gym's own environment: it takes one that is there for its own."""
    for kind in SERVER_KINDS:
        for server in (root / kind).glob("*/"):
            link = venvs / kind / server.name / ".venv"
            if not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(prefix)


def _get_json(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as answer:
            return parse_json(answer.read())
    except (urllib.error.URLError, OSError, ValueError):
        return None


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None
