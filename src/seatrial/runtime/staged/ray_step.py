"""Runs a client inside a Ray cluster of its own, and never takes Ray's end for the client's.

- One file, standard library only, Python 3.8 or newer: it is copied into the job directory and run there, once per node
  (`nodes`), by `ray symmetric-run` around the client (`entry`), or by the loop's own launcher (`result`).
- `ray symmetric-run` exits with 0 when Ray did not start on its head, and with 1 for many reasons. So the client leaves its exact
  exit code in a file; without that file the client never ended, and the step exits with 99 (Blocked).
- A signal to stop reaches the client, not Ray; Ray is stopped after it, on every node. Ray's logs are kept when a run fails.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCKED = 99
_TICK_S = 0.2
_GRACE_S = 30.0
"""How long Ray may take to end by itself, and a shared file system to show a file."""


class Told:
    """Remembers that this process was told to stop."""

    def __init__(self) -> None:
        self.signal = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        self.signal = number


def _say(text: str) -> None:
    sys.stderr.write(f"[seatrial] {text}\n")
    sys.stderr.flush()


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=str(path.parent), prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    Path(name).chmod(0o644)
    Path(name).replace(path)


def _read(path: Path) -> str:
    """What a file says; nothing where it is none: a pipe would hold its reader for ever."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    except OSError:
        return ""


def _number(text: str, most: int) -> int | None:
    """A number from 0 to `most`; None for other text. This file runs where there is no Seatrial, so it reads with care itself."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) and int(text) <= most else None


def _code(status: int) -> int:
    """An exit code as shells give it: a signal is 128 and its number."""
    return status if status >= 0 else 128 - status


def has_token(environment: dict[str, str]) -> bool:
    """Whether Ray has a token here, given or left by a cluster that somebody started on this machine."""
    home = Path(environment.get("HOME") or Path.home())
    given = environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH")
    return bool(given) or (home / ".ray" / "auth_token").is_file()


def one_vendor(environment: dict[str, str]) -> dict[str, str]:
    """Without the second name of the same GPUs: a Slurm that was not told whose they are names them for every vendor."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given and given == environment.get("ROCR_VISIBLE_DEVICES"):
        environment.pop("CUDA_VISIBLE_DEVICES" if Path("/dev/kfd").exists() else "ROCR_VISIBLE_DEVICES")
    return environment


def run_client(words: list[str], environment: dict[str, str] | None = None) -> tuple[int, bool]:
    """The exact exit code of a command, and whether it was told to stop: signals are passed on to it."""
    told = Told()
    try:
        child = subprocess.Popen(words, env=environment)
    except OSError as error:
        _say(f"the client cannot be started: {words[0]}: {error.strerror or error}")
        return (127 if isinstance(error, FileNotFoundError) else 126), False
    passed = 0
    while True:
        if told.signal and told.signal != passed:
            passed = told.signal
            child.send_signal(passed)
        try:
            return _code(child.wait(timeout=_TICK_S)), bool(told.signal)
        except subprocess.TimeoutExpired:
            continue


class Node:
    """What happens on one node of the cluster."""

    def __init__(self, words: argparse.Namespace) -> None:
        self.words = words
        attempt = f"local-{os.getpid()}"
        if "SLURM_JOB_ID" in os.environ:
            attempt = f"{os.environ['SLURM_JOB_ID']}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"
        self.state = Path(words.state) / attempt
        """One per attempt: what an earlier one left says nothing about this one."""
        self.ray = shutil.which(words.ray) or words.ray
        # Sockets lie below it, and the kernel allows them 107 characters. Ray uses the first node's path on every node.
        self.temporary = Path("/tmp") / f"ray-{attempt}"
        self.environment = {**os.environ, "RAY_TMPDIR": str(self.temporary)}
        self.environment["PATH"] = os.pathsep.join((str(Path(self.ray).parent), os.environ.get("PATH", os.defpath)))
        self.environment.setdefault("RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT", str(words.deadline))
        # `ray start` takes a token that it finds for a wish to use it; a client does so only when it is told, and is then refused.
        if has_token(self.environment):
            self.environment.setdefault("RAY_AUTH_MODE", "token")

    def run(self) -> int:
        """The exit code of this node: the client's on the first, 0 on the others when it has ended."""
        told = Told()
        address = _address(self.words.address, self.words.nodes)
        if address is None or not self._own_directory():
            return BLOCKED
        if self.words.rank == 0:
            for name in ("client", "code"):  # of an attempt that had the same number: ids and PIDs come again
                (self.state / name).unlink(missing_ok=True)
        code = BLOCKED
        try:
            code = self._cluster(address, told)
        finally:
            self._keep_logs(code)
        return code

    def _cluster(self, address: str, told: Told) -> int:
        me = [sys.executable, str(Path(__file__).absolute()), "entry", "--state", str(self.state), "--address", address, "--"]
        command = [self.ray, "symmetric-run", "--address", address, "--min-nodes", str(self.words.nodes), *self.words.options, "--"]
        try:
            child = subprocess.Popen([*command, *me, *self.words.client], env=self.environment)
        except OSError as error:
            _say(f"Ray cannot be started: {self.ray}: {error.strerror or error}")
            return BLOCKED
        try:
            return self._first(child, told) if self.words.rank == 0 else self._other(child, told)
        finally:
            self._stop(child)

    def _first(self, child: subprocess.Popen[bytes], told: Told) -> int:
        asked = False
        while child.poll() is None:
            if told.signal and not asked:
                asked = True
                client = _read(self.state / "client")
                if not client:
                    _say("told to stop before the client had started")
                    return 128 + told.signal
                process = _number(client, 1 << 22)  # Linux has no higher one
                if not process or process == 1:  # 0 is the whole group, and a negative one even more
                    _say(f"told to stop, but {self.state / 'client'} names no process: {client[:80]!r}")
                    return 128 + told.signal
                try:
                    os.kill(process, told.signal)
                except (ProcessLookupError, PermissionError):
                    pass  # it has just ended, and its code says how
            time.sleep(_TICK_S)
        code = _read(self.state / "code")
        if not code:
            began = "did not end by itself" if _read(self.state / "client") else "never started"
            _say(f"ray symmetric-run ended with {_code(child.returncode)}, but the client {began}: Ray is to blame, see above")
            return BLOCKED
        ended = _number(code, 255)
        if ended is None:
            _say(f"{self.state / 'code'} holds no exit code: {code[:80]!r}")
            return BLOCKED
        return ended

    def _other(self, child: subprocess.Popen[bytes], told: Told) -> int:
        """Wait until the client has ended on the first node, or Ray here."""
        while not _read(self.state / "code"):
            if told.signal:
                return 128 + told.signal
            if child.poll() is not None:
                ends = time.monotonic() + _GRACE_S
                while time.monotonic() < ends and not told.signal:
                    if _read(self.state / "code"):
                        return 0
                    time.sleep(_TICK_S)
                _say(f"Ray ended on this node (rank {self.words.rank}) before the client did: the cluster is not whole any more")
                return BLOCKED
            time.sleep(_TICK_S)
        return 0

    def _stop(self, child: subprocess.Popen[bytes]) -> None:
        """End Ray on this node, which is ours alone."""
        if child.poll() is None:
            child.send_signal(signal.SIGINT)  # symmetric-run then stops Ray itself; on SIGTERM it would leave it behind
            try:
                child.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                pass
        if child.poll() is None:
            child.kill()
            child.wait()
            subprocess.run([self.ray, "stop", "--force"], env=self.environment, check=False, stdout=subprocess.DEVNULL, timeout=120)

    def _own_directory(self) -> bool:
        try:
            self.temporary.mkdir(mode=0o700, exist_ok=True)
            if self.temporary.stat().st_uid == os.getuid():
                return True
            _say(f"{self.temporary} belongs to somebody else")
        except OSError as error:
            _say(f"{self.temporary}: cannot be made: {error.strerror or error}")
        return False

    def _keep_logs(self, code: int) -> None:
        """Ray's own logs of a run that failed, beside the state; its directory under /tmp is removed."""
        logs = self.temporary / "ray" / "session_latest" / "logs"
        if code and logs.is_dir():
            try:
                shutil.copytree(str(logs), str(self.state / f"logs-{self.words.rank}"), ignore_dangling_symlinks=True, dirs_exist_ok=True)
            except (OSError, shutil.Error) as error:
                _say(f"not all of Ray's logs could be kept: {error}")
        shutil.rmtree(str(self.temporary), ignore_errors=True)


def _address(text: str, nodes: int) -> str | None:
    """HOST:PORT of the head with its IP address. With several nodes a loopback address is none: Ray would start heads."""
    host, _, port = text.rpartition(":")
    try:
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, ValueError, OverflowError) as error:  # a label that is too long, no number, no port
        _say(f"the name of the first node cannot be resolved here: {host}: {error}")
        return None
    ip = str(found[0][4][0])
    if nodes > 1 and ipaddress.ip_address(ip).is_loopback:
        _say(f"the name of the first node, {host}, is {ip} here, which other nodes cannot reach: correct /etc/hosts of the node")
        return None
    return f"{ip}:{port}"


def entry(words: argparse.Namespace) -> int:
    """The client, on the first node, inside the running cluster."""
    state = Path(words.state)
    _write(state / "client", str(os.getpid()))
    code, _ = run_client(words.client, {**os.environ, "RAY_ADDRESS": words.address})
    _write(state / "code", str(code))
    return code


def result(words: argparse.Namespace) -> int:
    """The client, run by the loop's own launcher; its result is written before that launcher stops Ray.

    The launcher keeps Slurm's variables from its driver, but its log directory is named after the job.
    """
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?-logs", Path(words.script).parent.name)
    if match is None:
        _say(f"{words.script}: not in a directory JOB[-RESTART]-logs, so the id of the job is not known")
        return BLOCKED
    path = Path(words.results) / f"{words.index}.json"
    before = _read(path)
    if before and _ending(before) == "done":
        _say("this unit is done already: nothing to do")
        return 0
    _show_log(path.parent.parent / "logs" / f"{words.client_name}.0.log")
    started = int(time.time())
    code, stopped = run_client(words.client, one_vendor(dict(os.environ)))
    ending = "stopped" if stopped else ("done" if code == 0 else "client-failed")
    row = {"job": words.job, "index": words.index, "slurm": match[1], "restart": int(match[2] or 0), "ending": ending}
    row.update(component=f"{words.client_name}.0", exit_code=code, node=socket.gethostname(), started=started, ended=int(time.time()))
    row.update(message="told to stop" if stopped else "")
    _write(path, json.dumps(row) + "\n")
    return BLOCKED if stopped else code


def _ending(text: str) -> object:
    """The ending in a result; None of one that a killed process left torn. This file runs where there is no Seatrial."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found.get("ending") if isinstance(found, dict) else None


def _show_log(link: Path) -> None:
    """The launcher has its own place for what the client says; let it be found where every job has it."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        log = Path("/proc/self/fd/1").resolve()
        if log.is_file():
            fresh.symlink_to(os.path.relpath(str(log), str(link.parent)))
            fresh.replace(link)
    except OSError as error:
        _say(f"{link}: cannot be made: {error.strerror or error}")


def main() -> int:
    """The command line; the client's words come after `--`."""
    argv = sys.argv[1:]
    if "--" not in argv:
        argv.append("--")
    cut = argv.index("--")
    parser = argparse.ArgumentParser(description="Run a client inside a Ray cluster of its own.")
    ways = parser.add_subparsers(dest="way", required=True)
    nodes = ways.add_parser("nodes", help="once per node: start Ray, run the client on the first node, stop Ray")
    nodes.add_argument("--rank", required=True, type=int)
    nodes.add_argument("--nodes", required=True, type=int)
    nodes.add_argument("--address", required=True, help="HOST:PORT of the first node")
    nodes.add_argument("--state", required=True, help="directory that every node sees")
    nodes.add_argument("--ray", default="ray", help="Ray's command")
    nodes.add_argument("--deadline", type=int, default=600, help="seconds until every node must have joined")
    nodes.add_argument("--option", dest="options", action="append", default=[], help="an option of ray start, on every node")
    inside = ways.add_parser("entry", help="the client, run by ray symmetric-run")
    inside.add_argument("--state", required=True)
    inside.add_argument("--address", required=True)
    by_launcher = ways.add_parser("result", help="the client, run by a loop's own launcher")
    by_launcher.add_argument("--script", required=True, help="path of the launcher's driver script")
    by_launcher.add_argument("--results", required=True)
    by_launcher.add_argument("--job", required=True)
    by_launcher.add_argument("--client", dest="client_name", required=True, help="its name")
    by_launcher.add_argument("--index", type=int, default=0)
    words = parser.parse_args(argv[:cut])
    words.client = argv[cut + 1 :]
    if not words.client:
        parser.error("no client after --")
    ways_to_run = {"nodes": lambda: Node(words).run(), "entry": lambda: entry(words), "result": lambda: result(words)}
    return ways_to_run[words.way]()


if __name__ == "__main__":
    sys.exit(main())
