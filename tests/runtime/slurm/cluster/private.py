"""A private Slurm cluster for tests: real daemons, all under one directory, brought up and torn down by PID.

- Needs no systemd and no configuration of the machine; several clusters live side by side and beside a real one.
- Whoever wants to use it merges `env` into a child's environment; that is all that selects a cluster.
- `up` starts from nothing, also where a cluster was before; a failed `up` leaves nothing behind. Logs stay in `root/log`.
- `down` also works in a later Python: it needs the root only, and ends what is left of a cluster whose owner was killed.
- On loopback all nodes share the machine's name and ports: use `$SLURMD_NODENAME`. With `network="namespaces"` (root only)
  each node has its own host name, address and ports, and names resolve on the nodes.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

from tests.runtime.slurm.cluster import conf, database, lan, processes, tools

T = TypeVar("T")

_LONGEST_ROOT = 70
"""Sockets of munge and of job steps live under the root, and the kernel allows them 107 characters."""
_FOREIGN = ("SLURM", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_")
"""A surrounding real job's variables would reach our commands."""
_READY_S = 60.0


class PrivateSlurm:
    """One cluster; `with PrivateSlurm(root) as cluster: cluster.run("sbatch", ...)`."""

    def __init__(
        self,
        root: Path,
        nodes: int = 4,
        cpus: int = 8,
        gpus: int = 8,
        accounting: bool = False,
        pyxis: bool = True,
        network: Literal["loopback", "namespaces"] = "loopback",
        min_job_age: int = 300,
        settings: Mapping[str, str] | None = None,
        keep: bool = False,
    ) -> None:
        """`settings` are lines of slurm.conf to set or replace; `keep` lets the daemons outlive this Python."""
        self.root = root.resolve()
        if len(str(self.root)) > _LONGEST_ROOT:
            raise ValueError(f"{self.root}: longer than {_LONGEST_ROOT} characters, too long for sockets; choose a shorter root")
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.munge = False
        self._cpus, self._gpus, self._min_job_age, self._settings = cpus, gpus, min_job_age, dict(settings or {})
        self._accounting, self._pyxis, self._namespaces = accounting, pyxis, network == "namespaces"
        self._processes = processes.Processes(self.root, keep)
        self._lan = lan.Lan(self.root, self._processes)

    @property
    def env(self) -> dict[str, str]:
        """What sbatch, squeue, sacct and the rest need in their environment to talk to this cluster."""
        return {"SLURM_CONF": str(self.root / "slurm.conf")}

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    def up(self) -> None:
        """Bring up everything and wait until every node is idle."""
        lacking = tools.missing(self._accounting, self._pyxis, self._namespaces)
        if lacking:
            raise RuntimeError(f"a private Slurm cannot come up here: {lacking}")
        running = [name for name in self._processes.names() if self._processes.alive(name)]
        if running:
            raise RuntimeError(
                f"{self.root}: already up ({', '.join(running)}); first: python -m tests.runtime.slurm.cluster down {self.root}"
            )
        try:
            self._start()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End every process of the cluster, jobs included, and remove its network. Nothing happens when it is down."""
        if not self.root.exists():
            return
        # The database is the only one that would have to recover from a kill, and the next `up` starts without it.
        processes.end_all(self._lan.inhabitants)
        for name in reversed(self._processes.names()):
            self._processes.end(name)
        processes.end_all(lambda: processes.slurm_started(self.root))
        self._lan.down()

    def kill_controller(self) -> None:
        """`kill -9` the controller, as a crash does. What it did not save is forgotten: it saves some 5 s after a step began."""
        self._processes.end("slurmctld")

    def start_controller(self) -> None:
        """Start the controller on the state that the last one saved, and wait until it answers."""
        self._processes.start("slurmctld", [tools.tool("slurmctld"), "-D"], self._environ())
        self._ready("slurmctld", lambda: self.run("scontrol", "ping").returncode == 0)

    def kill_node(self, name: str) -> None:
        """The node dies at once, with everything that runs on it. Slurm notices after some 15 s (measured)."""
        self._processes.end(name)
        processes.end_all(lambda: processes.slurm_started(self.root, name) | self._lan.inhabitants(name))

    def start_node(self, name: str) -> None:
        """Start the node's daemon and wait until the controller sees it; it returns to service by itself."""
        self._start_slurmd(name)
        self._ready(name, lambda: self._is_up(self.node_states().get(name, "")))

    def set_node(self, name: str, state: str, reason: str = "test") -> None:
        """`scontrol update` of a node's state (DOWN, DRAIN, RESUME...), as an administrator does."""
        done = self.run("scontrol", "update", f"NodeName={name}", f"State={state}", f"Reason={reason}")
        if done.returncode:
            raise RuntimeError(f"scontrol update of {name} to {state}: {done.stderr.strip()}")

    def node_states(self) -> dict[str, str]:
        """Each node's state as sinfo shows it (`idle`, `mixed`, `down*`...)."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", "--partition=main").stdout.splitlines()
        return {name: state for name, _, state in (line.partition(" ") for line in lines)}

    def run(self, *argv: str, stdin: str = "", timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command against this cluster; an exit code other than 0 is the caller's to judge."""
        where = self.root / "work"
        return subprocess.run(
            argv, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s, env=self._environ(), cwd=where
        )

    def wait(self, condition: Callable[[], T], what: str, deadline_s: float = 30.0) -> T:
        """Poll until `condition` is true and return what it returned; else a TimeoutError that says what was waited for."""
        ends = time.monotonic() + deadline_s
        while not (value := condition()):
            if time.monotonic() > ends:
                raise TimeoutError(f"waited {deadline_s:g} s for {what}; nodes: {self.node_states()}; logs: {self.root / 'log'}")
            time.sleep(0.05)
        return value

    def oracle(self) -> list[dict[str, str]]:
        """Every finished job as slurmctld itself wrote it down (jobcomp/filetxt): state and exact exit code."""
        path = self.root / "jobcomp.txt"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # A value may hold spaces: it ends where the next key begins.
        return [dict(re.findall(r"(\w+)=(.*?) (?=[A-Z]\w+=|$)", line)) for line in text.splitlines()]

    def log(self, name: str) -> str:
        """The log of a daemon: `slurmctld`, `slurmdbd` or a node."""
        return (self.root / "log" / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def _environ(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
        return {**inherited, **self.env}

    def _start(self) -> None:
        for name in ("state", "spool", "run", "database"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        for name in ("state", "spool", "run", "log", "work"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        (self.root / "jobcomp.txt").unlink(missing_ok=True)
        self.munge = self._start_munge()
        shape = self._shape()
        conf.write(shape)
        if shape.accounting:
            database.start(self.root, self._processes, shape.accounting, self._environ(), self._ready)
        self.start_controller()
        for name in self.nodes:
            self._start_slurmd(name)
        for name in self.nodes:
            self._ready(name, partial(self._is_idle, name))
        if self._accounting:  # a job that starts before this is missing from sacct for a while
            self.wait(self._is_registered, "slurmctld to register with slurmdbd", _READY_S)

    def _shape(self) -> conf.Shape:
        ports = tools.free_ports(len(self.nodes) + 3)
        hostname = socket.gethostname().partition(".")[0]
        addresses = self._lan.up(self.nodes) if self._namespaces else dict.fromkeys(self.nodes, "127.0.0.1")
        nodes = (
            conf.Node(name, addresses[name], port, name if self._namespaces else hostname)
            for name, port in zip(self.nodes, ports[3:], strict=True)
        )
        return conf.Shape(
            root=self.root,
            user=pwd.getpwuid(os.geteuid()).pw_name,
            hostname=hostname,
            address=self._lan.gateway if self._namespaces else "127.0.0.1",
            controller_port=ports[0],
            nodes=tuple(nodes),
            cpus=self._cpus,
            devices=tools.gpu_devices(self.root / "dev", self._gpus),
            munge=self.munge,
            accounting=conf.Accounting(ports[1], ports[2], secrets.token_hex(16)) if self._accounting else None,
            plugin=tools.build_pyxis(self.root / "lib" / "fake_pyxis.so") if self._pyxis else None,
            min_job_age=self._min_job_age,
            settings=self._settings,
        )

    def _start_munge(self) -> bool:
        """A munge with its own socket and key; False when there is none or it refuses to run here (auth/none then)."""
        root, key = self.root, self.root / "munge.key"
        if not tools.installed("munged"):
            return False
        key.unlink(missing_ok=True)
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        places = [f"--socket={root}/munge.socket", f"--key-file={key}", f"--pid-file={root}/run/munged.pid"]
        places += [f"--log-file={root}/log/munged.log", f"--seed-file={root}/run/munged.seed"]
        # --force: an unusual owner or mode of a directory above the root is a warning, not the end.
        self._processes.start("munged", [tools.tool("munged"), "--foreground", "--force", "--num-threads=2", *places], self._environ())
        socket_file = root / "munge.socket"
        self.wait(lambda: socket_file.exists() or not self._processes.alive("munged"), "munged", 60)
        return self._processes.alive("munged")

    def _start_slurmd(self, name: str) -> None:
        argv = [tools.tool("slurmd"), "-D", "-N", name]
        self._processes.start(name, self._lan.boot(name, argv) if self._namespaces else argv, self._environ())

    def _ready(self, name: str, condition: Callable[[], bool]) -> None:
        """Wait until a daemon that was just started is of use; notice at once when it has ended instead."""
        self.wait(lambda: not self._processes.alive(name) or condition(), f"{name} to be ready", _READY_S)
        if not self._processes.alive(name):
            said = (self.root / "log" / f"{name}.out").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"{name} ended as soon as it was started:\n{said[-2000:]}")

    def _is_registered(self) -> bool:
        port = self.run("sacctmgr", "--noheader", "--parsable2", "show", "cluster", "private", "format=controlport").stdout.strip()
        return port not in ("", "0")

    def _is_idle(self, name: str) -> bool:
        return self.node_states().get(name) == "idle"

    @staticmethod
    def _is_up(state: str) -> bool:
        return bool(state) and not state.startswith(("down", "unknown")) and not state.endswith("*")
