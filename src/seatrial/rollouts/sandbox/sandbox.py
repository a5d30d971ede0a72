"""Untrusted programs, each in a sandbox of its own: `await Sandbox(limits).run("print(1)")`.

- What a program may see and use: `bubblewrap`, `syscalls`, `process`. Nothing outlives a run; nothing of it is left on this machine.
- How it ended is one word: it was `done` by itself (see its exit code), or which limit it passed.
- Failures of the sandbox itself are a SandboxError, never a result.
- At most `limits.at_once` run at a time; the others wait.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from seatrial.model.errors import BlockedError
from seatrial.model.verdict import Boundary
from seatrial.rollouts.campaign import SandboxLimits
from seatrial.rollouts.sandbox import bubblewrap, syscalls
from seatrial.rollouts.sandbox.process import Jailed, SandboxError, Trouble, start

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


@dataclass(frozen=True, slots=True)
class Ran:
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
            jailed = await start([*interpreter, name], {**(files or {}), name: program}, self.limits, number)
            try:
                return await self._follow(jailed, stdin, began, min(wall_s or self.limits.wall_s, self.limits.wall_s))
            finally:
                await jailed.end()

    async def _follow(self, jailed: Jailed, stdin: str, began: float, wall_s: float) -> Ran:
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
        return Ran(stdout, stderr, code, _ending(jailed, code), time.monotonic() - began)

    async def _take(self, jailed: Jailed, stream: asyncio.StreamReader) -> str:
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


async def _feed(jailed: Jailed, stdin: str) -> None:
    """Give the program its input; one that does not read it, or ends, is no error."""
    try:
        jailed.stdin.write(stdin.encode("utf-8", errors="surrogatepass"))
        await jailed.stdin.drain()
        jailed.stdin.close()
    except ConnectionError:
        return


def _ending(jailed: Jailed, code: int | None) -> Ending:
    if jailed.trouble.done():
        return jailed.trouble.result()
    if code == 128 + signal.SIGXCPU:
        return "timeout"
    return "killed" if code in (None, 128 + signal.SIGKILL) else "done"


def why_not() -> str | None:
    """None when programs can be run here, isolated and watched; otherwise why not. Really tries; may be called anywhere."""
    if not syscalls.supported():
        return f"no system call filter for processors of kind {os.uname().machine}"
    found: list[str | None] = []

    def attempt() -> None:
        found.append(asyncio.run(_attempt()))

    # Of its own, as a loop may be running in this one.
    thread = threading.Thread(target=attempt, name="sandbox-probe")
    thread.start()
    thread.join()
    return found[0] if found else "the attempt itself broke"


async def _attempt() -> str | None:
    limits = SandboxLimits(processes=16)
    try:
        async with slot() as number:
            jailed = await start([*bubblewrap.interpreter(), "main.py"], {"main.py": _PROBE}, limits, number)
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
