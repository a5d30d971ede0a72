"""A vLLM server with the refit extension: starts it on a loopback port, asks it, streams tensors to it, ends it with all its processes.

- Every call has a deadline. A free port may be taken when the server binds it, so an answer counts only while our processes alone listen.
- A sample carries the version that the generator held when it was dispatched; a generator that changes under a request is an error.
- The stream stands in for an NCCL broadcast: bytes in the announced order, without names. Each tensor is framed by its length, so a
  sender that leaves one out or adds one is an error and not a shift of all that follow.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

EXTENSION = "seatrial.instruments.engines.vllm_extension.Extension"
BACKEND = "seatrial"
MODEL = "policy"  # the name that the server gives its model
READY_SECONDS = 300.0
END_SECONDS = 15.0
SAY_EVERY = 15.0
FAULTS_ALLOWED = "SEATRIAL_FAULTS"  # set to 1 in a server that may be damaged on purpose, see vllm_extension
LISTENING = "0A"  # in /proc/net/tcp
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
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", MODEL]
    words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "16"]
    words += ["--worker-extension-cls", EXTENSION, "--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
    return [python, *words, *options]


class VllmServer:
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

    def __enter__(self) -> VllmServer:
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
                ended = f"vLLM ended with code {self.process.returncode} before it was ready"
                raise RuntimeError(f"{ended}; {self.log} ends with:\n{self.tail()}")
            if now - started > self._deadline_s:
                others = f"; another process listens on port {self._port}" if answered else ""
                raise RuntimeError(f"vLLM was not ready within {self._deadline_s:.0f} s{others}; {self.log} ends with:\n{self.tail()}")
            if now - said > SAY_EVERY:
                said = now
                self._say(f"waiting for vLLM ({now - started:.0f} s): {self.tail(1)}")
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


CALL_SECONDS = 120.0
PROOF_SECONDS = 1800.0
PROOFS = ("seatrial_map", "seatrial_read", "seatrial_verify", "seatrial_coverage", "seatrial_state")
"""Methods that go over every weight: on a CPU, minutes for a large model."""
AT_ONCE = 16  # requests that are under way together: as many as the server takes into one batch


SAMPLED = {"logprobs": 0, "return_token_ids": True}  # what a request for samples asks for beside them


class ServerError(RuntimeError):
    """A route of the server failed; says which, and how."""


@dataclass(frozen=True)
class Sample:
    """One completion, with the log-probability of each of its tokens and the version it came from."""

    tokens: list[int]
    logprobs: list[float]
    version: int
    incarnation: str


class VllmClient:
    """One vLLM server, seen from outside. `timeout_s` is for every call; without it PROOFS have longer than the others."""

    def __init__(self, url: str, timeout_s: float | None = None) -> None:
        self.url = url.rstrip("/")
        self._call_s, self._proof_s = (CALL_SECONDS, PROOF_SECONDS) if timeout_s is None else (timeout_s, timeout_s)

    def call(
        self, route: str, body: dict[str, Any] | None = None, method: str = "POST", seconds: float | None = None, waiting: str = ""
    ) -> Any:
        """One request; the parsed answer. `waiting` goes into the error of one that has none in time."""
        seconds = self._call_s if seconds is None else seconds
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{route}", data=data, method=method, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[-2000:]
            raise ServerError(f"{method} {self.url}{route}: status {error.code}: {said or 'no body'}") from error
        except (urllib.error.URLError, OSError) as error:
            raise ServerError(f"{method} {self.url}{route}: no answer within {seconds:.0f} s{waiting}: {error}") from error
        try:
            return json.loads(text) if text else None
        except json.JSONDecodeError as error:
            raise ServerError(f"{method} {self.url}{route}: not JSON: {text[:200]!r}") from error

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of the extension in every worker; one answer per rank."""
        seconds = self._proof_s if method in PROOFS else self._call_s
        body = {"method": method, "kwargs": arguments, "timeout": seconds}
        waiting = f" (waited for {method} in every worker)"
        results: list[Any] = self.call("/collective_rpc", body, seconds=seconds, waiting=waiting)["results"]
        return results

    def start(self, version: int = 0) -> None:
        """Tell the transfer backend which version the generator starts with."""
        self.call("/init_weight_transfer_engine", {"init_info": {"version": version}})

    def refit(self, path: str, version: int) -> None:
        """Pause, send one payload file through the weight-update routes, resume. The caches are cleared; a refusal is raised."""
        self.call("/pause?mode=abort&clear_cache=true", {})
        try:
            self.call("/start_weight_update", {})
            self.call("/update_weights", {"update_info": {"path": path}})
            self.call("/finish_weight_update", {"weight_version": str(version)})
        finally:
            self.call("/resume", {})

    def versions(self) -> list[dict[str, Any]]:
        return self.rpc("seatrial_version")

    def _held(self) -> tuple[int, str]:
        found = self.versions()
        if len({row["version"] for row in found}) != 1:
            raise ServerError(f"{self.url}: the ranks hold different versions: {found}")
        return int(found[0]["version"]), str(found[0]["incarnation"])

    def logprobs(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        """Log-probability of every token of each sequence from its start (>= 1) on."""
        choices = self._complete(sequences, 1, prompt_logprobs=0)
        result = []
        for tokens, start, choice in zip(sequences, starts, choices, strict=True):
            rows = choice["prompt_logprobs"]
            result.append([float(rows[place][str(tokens[place])]["logprob"]) for place in range(start, len(tokens))])
        return result

    def sample(self, prompts: Sequence[Sequence[int]], length: int, seed: int) -> list[Sample]:
        """One completion of exactly `length` tokens per prompt, stamped with the version at dispatch."""
        given = {"min_tokens": length, "ignore_eos": True, **SAMPLED}
        return self._stamped(prompts, lambda: self._complete(prompts, length, seed=seed, **given))

    def rollouts(self, prompts: Sequence[Sequence[int]], length: int, seeds: Sequence[int], **given: Any) -> list[Sample]:
        """One completion of at most `length` tokens per prompt, each from its own seed, with the model's end token if it came to one.

        `given` is added to each request.
        """

        def ask() -> list[dict[str, Any]]:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                each = [{"seed": seed, **given, **SAMPLED} for seed in seeds]
                asked = [pool.submit(self._complete, [row], length, **how) for row, how in zip(prompts, each, strict=True)]
                return [choice for answer in asked for choice in answer.result()]

        return self._stamped(prompts, ask)

    def _complete(self, prompts: Sequence[Sequence[int]], length: int, **given: Any) -> list[dict[str, Any]]:
        """One request; its choices in the order of the prompts."""
        body = {"model": MODEL, "prompt": [list(tokens) for tokens in prompts], "max_tokens": length, "temperature": 1.0, **given}
        return sorted(self.call("/v1/completions", body)["choices"], key=lambda choice: int(choice["index"]))

    def _stamped(self, prompts: Sequence[Sequence[int]], ask: Callable[[], list[dict[str, Any]]]) -> list[Sample]:
        """What was sampled, with the version that was held before, during and after it."""
        version, incarnation = self._held()
        choices = ask()
        if self._held() != (version, incarnation):
            raise ServerError(f"{self.url}: the generator changed from version {version} while it was sampling")
        drawn = [(list(map(int, choice["token_ids"])), list(map(float, choice["logprobs"]["token_logprobs"]))) for choice in choices]
        if len(drawn) != len(prompts) or any(len(tokens) != len(logprobs) for tokens, logprobs in drawn):
            what = f"{len(drawn)} completions for {len(prompts)} prompts, or tokens without log-probability"
            raise ServerError(f"{self.url}/v1/completions: {what}")
        return [Sample(tokens, logprobs, version, incarnation) for tokens, logprobs in drawn]


SECONDS = 120.0
_LENGTH = struct.Struct("!Q")
_END = (1 << 64) - 1


class StreamError(RuntimeError):
    """The stream is not what was announced, or ended too early."""


class Sender:
    def __init__(self, address: str, port: int, seconds: float = SECONDS) -> None:
        with socket.create_server((address, port)) as listener:
            listener.settimeout(seconds)
            try:
                self._socket, _ = listener.accept()
            except TimeoutError:
                raise StreamError(f"no worker connected to {address}:{port} within {seconds:.0f} s") from None
        self._socket.settimeout(seconds)
        self.group = SimpleNamespace(store=None, socket=None)  # what TRL lets go of at its end
        self.bytes = 0

    def send(self, tensors: Iterable[Any]) -> None:
        import torch

        self.bytes = 0
        try:
            for tensor in tensors:
                data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
                self.bytes += len(data)
            self._socket.sendall(_LENGTH.pack(_END))
        except BaseException:
            self._socket.close()
            raise


class Receiver:
    def __init__(self, address: str, port: int, seconds: float = SECONDS) -> None:
        ends = time.monotonic() + seconds
        while True:
            try:
                self._socket = socket.create_connection((address, port), timeout=seconds)
                return
            except OSError as error:  # the trainer may not listen yet
                if time.monotonic() > ends:
                    raise StreamError(f"no trainer listens at {address}:{port}: {error}") from error
                time.sleep(0.05)

    def receive(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> Iterator[tuple[str, Any]]:
        """What was announced, and nothing else."""
        import torch

        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            length = self._length()
            if length == _END:
                raise StreamError(f"the stream ended before {name}")
            made = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
            if made.numel() * made.element_size() != length:
                raise StreamError(f"{name}: {length} bytes arrived for {dtype} of shape {list(shape)}")
            made.view(-1).view(torch.uint8).numpy()[:] = memoryview(self._read(length))
            yield name, made
        if self._length() != _END:
            raise StreamError(f"the stream goes on after {names[-1] if names else 'nothing'}")

    def _length(self) -> int:
        return int(_LENGTH.unpack(self._read(_LENGTH.size))[0])

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise StreamError("the trainer closed the stream")
            done += count
        return data

    def close(self) -> None:
        self._socket.close()
