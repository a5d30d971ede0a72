"""Start a vLLM server with the refit extension on a loopback port, and end it with everything it started.

The server runs in its own process group, so that its end is the end of all its processes. Waiting has a deadline, says
what it waits for, and is cut short when the server dies; then its last lines are in the error. A port is free when it is chosen and
may be taken when the server binds it: an answer counts only while nobody but our processes listens there.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

EXTENSION = "seatrial.probes.engines.vllm_extension.Extension"
BACKEND = "seatrial"
READY_SECONDS = 300.0
END_SECONDS = 15.0
SAY_EVERY = 15.0
FAULTS_ALLOWED = "SEATRIAL_FAULTS"
"""Set to 1 in a server that may be damaged on purpose, see vllm_extension."""
LISTENING = "0A"
"""In /proc/net/tcp."""
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1"}
_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    """A port that nothing listens on right now; below those that the kernel gives away, which are soon taken by others."""
    for _ in range(64):
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(model: Path, port: int, options: Sequence[str] = (), python: str = sys.executable) -> list[str]:
    """How the server is started; `vllm serve` itself needs package metadata that the CPU package does not have."""
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "policy"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "16"]
    words += ["--worker-extension-cls", EXTENSION, "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
    return [python, *words, *options]


class Server:
    """One vLLM server, as a context: ready inside, gone after.

    `python` is an interpreter with vLLM, this one if none is named. Only with `faults` may its weights be damaged on purpose.
    `more_paths` stand behind all others on its import path.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        say: Callable[[str], None],
        options: Sequence[str] = (),
        deadline_s: float = READY_SECONDS,
        python: str = sys.executable,
        faults: bool = False,
        more_paths: Sequence[str] = (),
    ) -> None:
        self.log, self._say, self._deadline_s = log, say, deadline_s
        self._port = port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        source = Path(__file__).resolve().parents[3]
        paths = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")]), *more_paths])
        # vLLM leaves its sockets where temporary files go.
        self._sockets = tempfile.TemporaryDirectory(prefix="seatrial-vllm-", ignore_cleanup_errors=True)
        own = {"PYTHONPATH": paths, "VLLM_RPC_BASE_PATH": self._sockets.name, FAULTS_ALLOWED: "1" if faults else "0"}
        env = {**_ON_CPU, **os.environ, **_QUIET, **own}
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command(model, port, options, python),
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        try:
            self._wait()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def _wait(self) -> None:
        started = said = time.monotonic()
        self._say(f"waiting up to {self._deadline_s:.0f} s for vLLM to answer {self.url}/health (log: {self.log})")
        while not (answered := self._healthy()) or not self._listens_alone() or self.process.poll() is not None:
            now = time.monotonic()
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"vLLM ended with code {self.process.returncode} before it was ready; {self.log} ends with:\n{self.tail()}"
                )
            if now - started > self._deadline_s:
                others = f"; another process listens on port {self._port}" if answered else ""
                raise RuntimeError(f"vLLM was not ready within {self._deadline_s:.0f} s{others}; {self.log} ends with:\n{self.tail()}")
            if now - said > SAY_EVERY:
                said = now
                self._say(f"vLLM is not ready after {now - started:.0f} s: {self.tail(1)}")
            time.sleep(0.25)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _listens_alone(self) -> bool:
        """Whether the sockets that listen on the port are all of our processes: two vLLM servers may even share one."""
        held = set()
        for process in running(self.process.pid):
            for link in Path(f"/proc/{process}/fd").glob("*"):
                try:
                    held.add(str(link.readlink()))
                except OSError:  # it was closed meanwhile
                    continue
        listening = listeners(self._port)
        return bool(listening) and listening <= held

    def tail(self, lines: int = 15) -> str:
        """The last lines of the server's log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def end(self) -> None:
        """End the whole process group: politely, then not."""
        for name in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, name)
            except ProcessLookupError:
                break
            if self._gone(END_SECONDS):
                break
        self.process.wait()
        self._sockets.cleanup()

    def _gone(self, seconds: float) -> bool:
        """Whether the group has no running process left, waited for."""
        stops = time.monotonic() + seconds
        while time.monotonic() < stops:
            self.process.poll()
            if not running(self.process.pid):
                return True
            time.sleep(0.05)
        return False


def listeners(port: int) -> set[str]:
    """The sockets that listen on a port of this host over IPv4, as the links in /proc/PID/fd name them."""
    found = set()
    for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == LISTENING and int(local.rpartition(":")[2], 16) == port:
            found.add(f"socket:[{rest[5]}]")
    return found


def running(group: int) -> list[int]:
    """The processes of a process group; what is dead and only waits to be collected by its parent does not count."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = place.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # it ended meanwhile
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(place.parent.name))
    return found
