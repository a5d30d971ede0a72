"""Starts, awaits, watches and ends one instance of Gym's servers.

- An instance has its own ports, Ray and directory; any number of them may run on a machine. Ray and all servers listen on loopback.
- Ready means: the head lists the expected servers and each answers. The death of a process ends the wait at once, with its last log lines.
- Nothing remains after `end`, a failed start, or kill -9 of the collector (see `gym_guard`).
- The API key stands in the environment only, since Gym writes its configuration onto command lines. gym.log is redacted; Gym's own logs may
  hold secrets and stay in the private directory.
- Gym picks ports long before its servers bind them. The process that binds the first port of a block owns the block, below the kernel's
  ephemeral ports and above those of Ray's workers.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import socket
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from seatrial.core import files
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import parse_json
from seatrial.core.verdict import Boundary
from seatrial.evidence.redact import Redactor
from seatrial.rollouts.backends.gym_guard import Guard
from seatrial.rollouts.backends.gym_install import SERVER_KINDS, Installation, argument_key, config_paths
from seatrial.rollouts.campaign import Gym
from seatrial.runtime.interrupt import stop_requested
from seatrial.runtime.process import STAMP_LENGTH, Control, LineLog, Outcome, ProcessSpec, end_leftovers, pid_file, run
from seatrial.runtime.process_tree import is_alive
from seatrial.runtime.servers import Missed, Target, port_in_use, wait_ready

SIZE = 200
_LOW, _HIGH = 20_000, 32_600


class Block:
    """Ports `head` and `low` to `high`; nobody else's until `close`."""

    def __init__(self) -> None:
        starts = list(range(_LOW, _HIGH, SIZE))
        random.shuffle(starts)
        for start in starts:
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                held.bind((LOOPBACK, start))
            except OSError:
                held.close()
                continue
            if not any(port_in_use(port) for port in range(start + 1, start + SIZE)):
                self._held = held
                self.head, self.low, self.high = start + 1, start + 2, start + SIZE - 1
                return
            held.close()
        message = f"no {SIZE} free ports in a row between {_LOW} and {_HIGH} on this machine"
        raise BlockedError(Boundary.ENVIRONMENT, message, "end what listens there: ss -ltnp")

    def close(self) -> None:
        self._held.close()


KEY = "SEATRIAL_POLICY_API_KEY"
LOOPBACK = "127.0.0.1"
_NOT_PASSED_ON = ("RAY_ADDRESS", "NEMO_GYM_CONFIG_DICT", "NEMO_GYM_CONFIG_PATH", "VIRTUAL_ENV", "PYTHONHOME")
"""They would tie an instance to another one, or to Seatrial's own interpreter."""
_NO_KEY = "EMPTY"
"""Servers that need no key are sent one all the same; this one is usual."""


class PolicyEndpoint(NamedTuple):
    """The policy as Gym's model server asks it."""

    urls: tuple[str, ...]
    model: str
    key: str | None = None


class Private:
    """The directory of one instance, for its owner only, gone at its end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / "w"
        """Where Gym runs: it writes to its working directory."""
        self.logs = root / "l"
        """A log per server, as Gym writes it where servers share an environment; they may hold secrets."""
        self.ray = root / "r"
        """Ray's files; sockets bear no long paths."""
        self.venvs = root / "v"


def start_words(gym: Gym, installation: Installation, ports: Block, policy: PolicyEndpoint, private: Private) -> tuple[str, ...]:
    url = quoted(policy.urls[0]) if len(policy.urls) == 1 else f"[{','.join(map(quoted, policy.urls))}]"
    ours = [
        *_head(ports.head),
        f"+port_range_low={ports.low}",
        f"+port_range_high={ports.high}",
        f"+default_host={LOOPBACK}",
        f"+policy_base_url={url}",
        f"+policy_api_key=${{oc.env:{KEY}}}",
        f"+policy_model_name={quoted(policy.model)}",
        f"+uv_venv_dir={quoted(str(private.venvs))}",
    ]
    if gym.shared_environments:
        ours += ["+skip_venv_if_present=true", f"+nemo_gym_log_dir={quoted(str(private.logs))}"]
    else:
        # No log directory: with one, Gym 0.4.0 runs the installation under pipefail, where a server without requirements of its own
        # fails without a word (`grep -v` finds nothing).
        ours += [f"+uv_cache_dir={quoted(os.environ.get('UV_CACHE_DIR') or str(Path.home() / '.cache' / 'uv'))}"]
    paths = f"+config_paths=[{','.join(config_paths(gym))}]"
    return (*installation.command(installation.generation.start), paths, *_ours(ours, gym.run_arguments), *gym.run_arguments)


def collect_words(gym: Gym, installation: Installation, head: int, output: Path, concurrency: int) -> tuple[str, ...]:
    """The command of Gym's collector against servers that run, for inputs that are materialized already: their file is not even opened."""
    ours = [
        *_head(head),
        "+disable_aggregation=true",
        "+upload_rollouts_to_wandb=false",
        f"+num_samples_in_parallel={concurrency}",
        f"+input_jsonl_fpath={quoted(str(output))}",
        f"+output_jsonl_fpath={quoted(str(output))}",
    ]
    return (*installation.command(installation.generation.collect), *_ours(ours, gym.collect_arguments), *gym.collect_arguments)


def environment(
    given: Mapping[str, str], installation: Installation, policy: PolicyEndpoint, private: Private, sandbox: tuple[str, int] | None
) -> dict[str, str]:
    found = {key: value for key, value in given.items() if key not in _NOT_PASSED_ON}
    caches = found.get("HF_HOME") or str(Path.home() / ".cache" / "huggingface")
    # uv looks for the interpreter that Gym runs on along PATH; it must not download another one.
    path = [str(installation.python.parent), str(installation.base / "bin"), found.get("PATH", os.defpath)]
    # Gym asks its own servers through a library that heeds proxies.
    no_proxy = ",".join(filter(None, (found.get("no_proxy") or found.get("NO_PROXY"), LOOPBACK, "localhost")))
    found |= {
        "PATH": os.pathsep.join(path),
        "HF_HOME": caches,
        "HF_DATASETS_CACHE": found.get("HF_DATASETS_CACHE") or str(Path(caches) / "datasets"),
        "UV_PYTHON_DOWNLOADS": "never",
        "RAY_TMPDIR": str(private.ray),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray listens on loopback where it forms no clusters; by this name that can be said on Linux, too.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "PYTHONUNBUFFERED": "1",
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
        KEY: policy.key or _NO_KEY,
    }
    if sandbox:
        found |= {"NEMO_SKILLS_SANDBOX_HOST": sandbox[0], "NEMO_SKILLS_SANDBOX_PORT": str(sandbox[1])}
    return found


def quoted(value: str) -> str:
    """A value as Hydra's grammar takes any text."""
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _head(port: int) -> list[str]:
    return [f"+head_server.host={LOOPBACK}", f"+head_server.port={port}"]


def _ours(ours: Sequence[str], given: Sequence[str]) -> list[str]:
    """Without those that the campaign says itself: Hydra takes no key twice."""
    said = {argument_key(argument) for argument in given} | {
        "num_samples_in_parallel" for argument in given if argument_key(argument) == "concurrency"
    }
    return [argument for argument in ours if argument_key(argument) not in said]


LOG = "gym.log"
_GRACE_S = 2.0
"""They hold nothing that is worth more."""
_STARTED_S = 30.0
_LOOK_S = 0.1
_LAST_LINES = 15
_WHOSE = "Gym's "
_LONGEST_TEMPORARY = 30
"""Ray's sockets lie below the private directory, and their paths may have 107 characters in all."""


class Instance(NamedTuple):
    """A server of Gym."""

    name: str
    kind: str
    url: str
    pid: int


class GymServers:
    """Start, then ask `gone()` now and then, then end. Methods may be called from any thread; `start` blocks."""

    def __init__(
        self,
        gym: Gym,
        installation: Installation,
        policy: PolicyEndpoint,
        logs: Path,
        progress: Callable[[str], None],
        sandbox: tuple[str, int] | None = None,
    ) -> None:
        self._gym, self.installation, self._progress = gym, installation, progress
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
            which = f"{self.installation.generation} ({self.installation.python})"
            self._progress(which)
            with LineLog(self.log, self.redactor.text) as log:
                log.note(which)
            self._thread.start()
            self._wait_for_processes()
            self._guard = Guard(pid_file(self.log), self.private.root)
            self._wait_for_servers(time.monotonic() + self._gym.deadline_s)
        except BaseException:
            self.end()
            raise

    def agents(self) -> dict[str, str]:
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

    def spec(self, kind: str, words: Sequence[str], log: Path, control: Control, grace_s: float) -> ProcessSpec:
        """A process of this instance: without limits of time, its log without secrets."""
        return ProcessSpec(
            argv=tuple(words),
            env=self.environment,
            cwd=self.private.work,
            log=log,
            run_id=f"{kind}-{uuid.uuid4().hex}",
            deadline_s=math.inf,
            stall_s=math.inf,
            grace_s=grace_s,
            line_filter=self.redactor.lines().line,
            control=control,
        )

    def _run(self) -> None:
        try:
            self._ended = run(self.spec("gym", self._words, self.log, self._control, _GRACE_S))
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
        for found in self.instances:
            with suppress(psutil.NoSuchProcess):
                self._watched[found.name] = psutil.Process(found.pid)
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
