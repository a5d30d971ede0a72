"""Untrusted programs, each in a sandbox of its own: `await Sandbox(limits).run("print(1)")`.

- A run ends as `done` or with the limit that it passed. Failures of the sandbox itself are a SandboxError, never a result. At most
  `limits.at_once` run at a time. Nothing outlives a run.
- A process tree is held by a pidfd of its namespace's first process, whose end ends all. bubblewrap starts without our environment.
- Memory, tasks and files are measured from outside, in the sandbox's own /proc: anonymous, shared and swapped memory of the processes.
- `start_child` replaces asyncio's subprocess, which may wait forever when its start is cancelled or a pipe stays open.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from seatrial.core.errors import BlockedError
from seatrial.core.verdict import Boundary
from seatrial.rollouts.campaign import SandboxLimits
from seatrial.rollouts.sandbox import bubblewrap
from seatrial.runtime.process_tree import adopt_orphans

_COUNTED = (b"RssAnon:", b"RssShmem:", b"VmSwap:")
_WRITABLE = ("tmp", "dev/shm")


class Use(NamedTuple):
    """At one moment."""

    memory: int
    tasks: int
    """Threads of all processes but the first, which is bubblewrap's."""
    files: int


def measure_use(first: int) -> Use | None:
    """What the sandbox whose first process is `first` uses; None while it is being made, and when it is gone."""
    root = Path(f"/proc/{first}/root")
    proc = root / "proc"
    try:
        if _shows_us(proc):
            return None
        processes = [entry for entry in proc.iterdir() if entry.name.isdigit() and entry.name != "1"]
        systems = [os.statvfs(root / place) for place in _WRITABLE]
    except OSError:
        return None
    memory = tasks = 0
    for entry in processes:
        try:
            text = (entry / "status").read_bytes()
        except OSError:
            continue  # it has just ended
        for line in text.splitlines():
            if line.startswith(_COUNTED):
                memory += int(line.split()[1]) << 10
            elif line.startswith(b"Threads:"):
                tasks += int(line.split()[1])
    return Use(memory, tasks, sum(system.f_files - system.f_ffree for system in systems))


def _shows_us(proc: Path) -> bool:
    """Whether it is still the machine's own /proc: in another pid namespace's there is no `self` for us."""
    try:
        return bool((proc / "self").readlink())
    except FileNotFoundError:
        return False


_FIRST_LOOK_S = 0.001
_LAST_LOOK_S = 0.05
END_S = 30.0


class Child:
    """A running process; made by `start_child`."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: asyncio.StreamWriter, outputs: Sequence[_Output]) -> None:
        self.pid = process.pid
        self.stdin = stdin
        self.stdout = outputs[0].reader
        self.stderr = outputs[-1].reader
        """The same as `stdout` where standard error goes nowhere."""
        self._process = process
        self._outputs = outputs

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        pause = _FIRST_LOOK_S
        while (code := self._process.poll()) is None:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_S)
        return code

    def close(self) -> None:
        """Close its streams: what it left running may hold their other ends. What was not written yet is lost."""
        if not self.stdin.is_closing():
            self.stdin.transport.abort()
        for output in self._outputs:
            output.transport.close()


class _Output(NamedTuple):
    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport


async def start_child(
    words: Sequence[str],
    *,
    errors: bool = False,
    limit: int = 1 << 16,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
    before_exec: Callable[[], None] | None = None,
) -> Child:
    """Start a process. With `errors`, standard error is a stream, too; otherwise it goes nowhere. `limit`: bytes of a stream's buffer.
    The process is started last, so that whatever is raised here, a cancellation too, leaves none."""
    loop, unread, own, its = asyncio.get_running_loop(), asyncio.StreamReader(), list[asyncio.BaseTransport](), list[int]()
    try:
        out, into = os.pipe()
        its.append(out)
        stdin, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(unread), os.fdopen(into, "wb", 0))
        own.append(stdin)
        outputs = []
        for _ in range(2 if errors else 1):
            out, into = os.pipe()
            its.append(into)
            outputs.append(await _connect(out, limit))
            own.append(outputs[-1].transport)
        process = subprocess.Popen(
            words,
            stdin=its[0],
            stdout=its[1],
            stderr=its[2] if errors else subprocess.DEVNULL,
            env=env,
            cwd=cwd,
            pass_fds=tuple(pass_fds),
            start_new_session=start_new_session,
            preexec_fn=before_exec,
        )
    except BaseException:
        for transport in own:
            transport.close()
        raise
    finally:
        for handle in its:
            os.close(handle)
    return Child(process, asyncio.StreamWriter(stdin, protocol, None, loop), outputs)


async def _connect(handle: int, limit: int) -> _Output:
    reader = asyncio.StreamReader(limit)
    pipe = os.fdopen(handle, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return _Output(reader, transport)


Trouble = Literal["timeout", "memory", "processes", "files", "output"]

_LOOK_S = 0.05
_FILES = 50_000
_WAIT_S = 30.0
"""For what takes milliseconds, on a machine that is very busy."""

T = TypeVar("T")


class SandboxError(Exception):
    """The sandbox itself did not work; says nothing about the program."""


class SandboxedProcess:
    """A running one; made by `start`."""

    def __init__(self, process: Child, limits: SandboxLimits, status: asyncio.StreamReader) -> None:
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self.gone = asyncio.Event()
        self.trouble: asyncio.Future[Trouble] = asyncio.get_running_loop().create_future()
        """The first limit that was passed."""
        self.watched = False
        """Whether its use could be seen at least once."""
        self.token = secrets.token_hex(8)
        """The launcher says it, and nobody else can, just before it becomes the program."""
        self.status, self._process, self._limits = status, process, limits
        self._first = 0
        self._pidfd = -1
        self._watcher: asyncio.Task[None] | None = None
        self._ending = asyncio.Lock()
        self._over = False
        self._code: int | None = None

    def hold(self, status: bytes) -> None:
        """Take hold of the namespace's first process, of which bubblewrap's status tells, and watch it; it must not have begun yet."""
        first: int = json.loads(status)["child-pid"]
        self._first, self._pidfd = first, os.pidfd_open(first)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)
        self._watcher = asyncio.create_task(self._watch())

    def report(self, trouble: Trouble) -> None:
        """A limit was passed; the first one counts."""
        if not self.trouble.done():
            self.trouble.set_result(trouble)

    async def end(self) -> int | None:
        """End whatever is left, wait until it is gone, and give the program's exit code if it ended by itself. May be called again."""
        if self._pidfd >= 0 and not self.gone.is_set():
            # Also when the program has ended: what it left would be ended by bubblewrap, but a moment later. It may be gone by now.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        async with self._ending:
            if not self._over:
                self._code = await self._finish()
                self._over = True
            return self._code

    async def _finish(self) -> int | None:
        if self._pidfd >= 0:
            await _within(self.gone.wait(), "the end of a sandbox")
        elif self._process.returncode is None:
            await self._end_unheld()
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        self.stdin.close()
        said = await _within(self.status.read(), "the status of bubblewrap")
        await _within(self._process.wait(), "the end of bubblewrap")
        self.gone.set()
        if self._pidfd >= 0:
            # Take the first process, ended, from the table of processes: bubblewrap does not wait for it, so it is ours by now.
            with suppress(ChildProcessError):  # bubblewrap did, as it does when we ended it
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            os.close(self._pidfd)
            self._pidfd = -1
        code = re.search(rb'"exit-code": (\d+)', said)
        return int(code[1]) if code else None

    async def _end_unheld(self) -> None:
        """End it before it was held, as a start that is cancelled does: its first process would be left, ended, to this one."""
        try:
            self.hold(await _within(self.status.readuntil(b"}\n"), "bubblewrap to make the sandbox"))
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            await _within(self.gone.wait(), "the end of a sandbox")
        except (asyncio.IncompleteReadError, ProcessLookupError, SandboxError):
            self._process.kill()

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.gone.set()

    async def _watch(self) -> None:
        limits = self._limits
        while not self.gone.is_set():
            use = measure_use(self._first)
            self.watched = self.watched or use is not None
            if use is not None and use.memory > limits.memory_mb << 20:
                self.report("memory")
            elif use is not None and use.tasks >= limits.processes:
                self.report("processes")
            elif use is not None and use.files > _FILES:
                self.report("files")
            await asyncio.sleep(_LOOK_S)


async def start_sandboxed(
    argv: list[str], files: Mapping[str, str], limits: SandboxLimits, slot: int, cpu_s: float | None = None
) -> SandboxedProcess:
    """Start a program in a sandbox of its own, with these files in its working directory. Raises SandboxError."""
    bwrap = bubblewrap.find_bubblewrap()
    if bwrap is None:
        raise SandboxError("bubblewrap (bwrap) is not installed")
    # Or every program would leave an ended process to whoever is above us, for as long as that one does not look.
    adopt_orphans()
    uid = bubblewrap.uid_of(slot)
    seccomp, block_in, block_out, status_out, status_in = -1, -1, -1, -1, -1
    try:
        seccomp, into = os.pipe()
        with os.fdopen(into, "wb") as stream:
            stream.write(bubblewrap.seccomp_filter())
        block_out, block_in = os.pipe()
        status_out, status_in = os.pipe()
        words = bubblewrap.bubblewrap_command(bwrap, limits, uid, seccomp, status_in, block_out) + bubblewrap.launcher_command(
            limits, uid, argv, cpu_s
        )
        handle, status_out = status_out, -1  # the stream closes it, also when this is cancelled
        status = (await _connect(handle, _CHUNK)).reader
        process = await start_child(words, errors=True, pass_fds=(seccomp, status_in, block_out), env={}, cwd="/", limit=_CHUNK)
        os.close(status_in)
        status_in = -1
        jailed = SandboxedProcess(process, limits, status)
        await _begin(jailed, block_in, files)
        return jailed
    except OSError as error:
        raise SandboxError(f"cannot start a sandbox: {error.strerror or error}") from error
    finally:
        for handle in (seccomp, block_in, block_out, status_out, status_in):
            if handle >= 0:
                os.close(handle)


async def _begin(jailed: SandboxedProcess, block: int, files: Mapping[str, str]) -> None:
    """Hold the first process while it is blocked, let it go, and see that the program begins."""
    said = b""
    try:
        status = await _within(jailed.status.readuntil(b"}\n"), "bubblewrap to make the sandbox")
        jailed.hold(status)
        os.write(block, b"1")
        payload = json.dumps({"token": jailed.token, "files": dict(files)}).encode()
        jailed.stdin.write(b"%012d" % len(payload) + payload)
        said = await _within(jailed.stderr.readline(), "the program to begin")
    except (asyncio.IncompleteReadError, ProcessLookupError):
        # It ended before its status was whole, or before it could be held.
        said = await _within(jailed.stderr.readline(), "bubblewrap to say why it ended")
    except BaseException:
        await jailed.end()
        raise
    if said.decode(errors="replace").strip() != jailed.token:
        await jailed.end()
        raise SandboxError(
            f"the program could not be started: {said.decode(errors='replace').strip() or 'bubblewrap ended without a word'}"
        )


async def _within(awaited: Awaitable[T], what: str) -> T:
    try:
        async with asyncio.timeout(_WAIT_S):
            return await awaited
    except TimeoutError:
        raise SandboxError(f"waited {_WAIT_S:g} s for {what}") from None


Ending = Literal["done", "killed"] | Trouble

_CHUNK = 1 << 16
_RUNS = bubblewrap.SLOTS // 2
"""The other half is for sessions."""
_INSTALL = "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap), and allow user namespaces where you are not root"
_PROBE = """\
import os, socket, threading
thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
child = os.fork()
if child == 0: os._exit(0)
os.waitpid(child, 0)
open("/tmp/x", "w").write("x")
assert os.getuid() != 0 and "1" in os.listdir("/proc") and len(os.listdir("/proc/self/task")) == 1
input(); print("contained")
"""

_PROBE_S = 5.0
"""Until it must have been seen."""

_free: deque[int] = deque(range(bubblewrap.SLOTS))
"""Slots of this process, whichever sandbox takes them: a slot stands for a user id."""


class Ran(NamedTuple):
    """What a program did."""

    stdout: str
    stderr: str
    exit_code: int | None
    """128 + signal when one ended it, ours included; None when that is not known."""
    ending: Ending
    seconds: float


class Sandbox:
    """Runs programs within limits."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self._turn = asyncio.Semaphore(min(limits.at_once or os.cpu_count() or 1, _RUNS))

    async def run(
        self,
        program: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        language: Literal["python", "bash"] = "python",
        wall_s: float | None = None,
    ) -> Ran:
        """Run a program to its end, in a directory with `files`. Raises SandboxError."""
        name, interpreter = ("main.py", bubblewrap.interpreter()) if language == "python" else ("main.sh", ["/bin/bash"])
        async with self._turn, slot() as number:
            began = time.monotonic()
            jailed = await start_sandboxed([*interpreter, name], {**(files or {}), name: program}, self.limits, number)
            try:
                return await self._follow(jailed, stdin, began, min(wall_s or self.limits.wall_s, self.limits.wall_s))
            finally:
                await jailed.end()

    async def _follow(self, jailed: SandboxedProcess, stdin: str, began: float, wall_s: float) -> Ran:
        feed = asyncio.create_task(_feed(jailed, stdin))
        outputs = [asyncio.create_task(self._take(jailed, stream)) for stream in (jailed.stdout, jailed.stderr)]
        gone = asyncio.create_task(jailed.gone.wait())
        try:
            awaited: set[asyncio.Future[Any]] = {gone, jailed.trouble}
            done, _ = await asyncio.wait(awaited, timeout=wall_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                jailed.report("timeout")
            code = await jailed.end()
            # Whoever could write is gone, so both have ended or do so now.
            stdout, stderr = await asyncio.gather(*outputs)
        finally:
            for task in (feed, gone, *outputs):
                task.cancel()
            await asyncio.gather(feed, gone, *outputs, return_exceptions=True)
        ending: Ending = "killed" if code in (None, 128 + signal.SIGKILL) else "done"
        if jailed.trouble.done():
            ending = jailed.trouble.result()
        elif code == 128 + signal.SIGXCPU:
            ending = "timeout"
        return Ran(stdout, stderr, code, ending, time.monotonic() - began)

    async def _take(self, jailed: SandboxedProcess, stream: asyncio.StreamReader) -> str:
        """All output up to the limit; what comes after that is thrown away."""
        kept, limit = bytearray(), self.limits.output_kb << 10
        while chunk := await stream.read(_CHUNK):
            kept += chunk[: limit - len(kept) + 1]
            if len(kept) > limit:
                jailed.report("output")
        return bytes(kept[:limit]).decode("utf-8", errors="replace")


@asynccontextmanager
async def slot() -> AsyncIterator[int]:
    """A slot for a sandbox, given back when nothing of it is left."""
    if not _free:
        raise SandboxError(f"{bubblewrap.SLOTS} sandboxes run already")
    number = _free.popleft()
    try:
        yield number
    finally:
        _free.append(number)


async def _feed(jailed: SandboxedProcess, stdin: str) -> None:
    """Give the program its input; one that does not read it, or ends, is no error."""
    try:
        jailed.stdin.write(stdin.encode("utf-8", errors="surrogatepass"))
        await jailed.stdin.drain()
        jailed.stdin.close()
    except ConnectionError:
        return


def why_not() -> str | None:
    """None when programs can be run here, isolated and watched; otherwise why not. Really tries; may be called anywhere."""
    if not bubblewrap.seccomp_supported():
        return f"no system call filter for processors of kind {os.uname().machine}"
    found: list[str | None] = []

    def attempt() -> None:
        found.append(asyncio.run(_try_sandbox()))

    # Of its own, as a loop may be running in this one.
    thread = threading.Thread(target=attempt, name="sandbox-probe")
    thread.start()
    thread.join()
    return found[0] if found else "the attempt itself broke"


async def _try_sandbox() -> str | None:
    limits = SandboxLimits(processes=16)
    try:
        async with slot() as number:
            jailed = await start_sandboxed([*bubblewrap.interpreter(), "main.py"], {"main.py": _PROBE}, limits, number)
            try:
                async with asyncio.timeout(limits.wall_s):
                    stops = time.monotonic() + _PROBE_S
                    while not jailed.watched and not jailed.gone.is_set() and time.monotonic() < stops:
                        await asyncio.sleep(0.005)
                    await _feed(jailed, "\n")
                    said, why = await jailed.stdout.read(), await jailed.stderr.read()
            finally:
                await jailed.end()
    except TimeoutError:
        return f"a trivial program did not end within {limits.wall_s:g} s"
    except SandboxError as error:
        return str(error)
    if said != b"contained\n":
        return "a trivial program failed: " + (why.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    return None if jailed.watched else "what a program uses cannot be seen in /proc"


def require() -> None:
    """Refuse, with what to do, where programs cannot be isolated."""
    if why := why_not():
        raise BlockedError(Boundary.ENVIRONMENT, f"no sandbox for untrusted code on {os.uname().nodename}: {why}", _INSTALL)
