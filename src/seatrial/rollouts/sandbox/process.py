"""One process tree in a sandbox, from its start until nothing of it is left.

- It is held by a pidfd of the namespace's first process. The kernel ends everything in a pid namespace with that one, and says it
  has ended only when all are gone; no number of a process that may be another's by now is ever signalled.
- It is ended when its limits are passed (`trouble` says which), when `end` is called, and by the kernel when Seatrial dies.
- bubblewrap is started without our environment: what a process was started with can be read in its /proc.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
from collections.abc import Awaitable, Mapping
from typing import Literal, TypeVar

from seatrial.launch.descendants import adopt_orphans
from seatrial.rollouts.campaign import SandboxLimits
from seatrial.rollouts.sandbox import bubblewrap, syscalls
from seatrial.rollouts.sandbox.spawn import Child, read_pipe, start_child
from seatrial.rollouts.sandbox.watch import look

Trouble = Literal["timeout", "memory", "processes", "files", "output"]

_LOOK_S = 0.05
_FILES = 50_000
_CHUNK = 1 << 16
_WAIT_S = 30.0
"""For what takes milliseconds, on a machine that is very busy."""

T = TypeVar("T")


class SandboxError(Exception):
    """The sandbox itself did not work; says nothing about the program."""


class Jailed:
    """A running one; made by `start`."""

    def __init__(self, process: Child, limits: SandboxLimits, status: asyncio.StreamReader) -> None:
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self.gone = asyncio.Event()
        """Set when nothing of it is left."""
        self.trouble: asyncio.Future[Trouble] = asyncio.get_running_loop().create_future()
        """The first limit that was passed."""
        self.watched = False
        """Whether its use could be seen at least once."""
        self.token = secrets.token_hex(8)
        """The launcher says it, and nobody else can, just before it becomes the program."""
        self.status = status
        self._process = process
        self._limits = limits
        self._first = 0
        self._pidfd = -1
        self._watcher: asyncio.Task[None] | None = None
        self._ending = asyncio.Lock()
        self._over = False
        self._code: int | None = None

    def hold(self, first: int) -> None:
        """Take hold of the namespace's first process, and watch it; it must not have begun yet."""
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
            # Also when the program has ended: what it left would be ended by bubblewrap, but a moment later.
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
        self._collect()
        code = re.search(rb'"exit-code": (\d+)', said)
        return int(code[1]) if code else None

    async def _end_unheld(self) -> None:
        """End it before it was held, as a start that is cancelled does: its first process would be left, ended, to this one."""
        try:
            self.hold(_first_of(await _within(self.status.readuntil(b"}\n"), "bubblewrap to make the sandbox")))
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            await _within(self.gone.wait(), "the end of a sandbox")
        except (asyncio.IncompleteReadError, ProcessLookupError, SandboxError):
            self._process.kill()

    def _collect(self) -> None:
        """Take the first process, ended, from the table of processes. bubblewrap does not wait for it, so it is ours by now."""
        if self._pidfd < 0:
            return
        try:
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            pass  # bubblewrap did, as it does when we ended it
        os.close(self._pidfd)
        self._pidfd = -1

    def _ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.gone.set()

    async def _watch(self) -> None:
        limits = self._limits
        while not self.gone.is_set():
            use = look(self._first)
            self.watched = self.watched or use is not None
            if use is not None and use.memory > limits.memory_mb << 20:
                self.report("memory")
            elif use is not None and use.tasks >= limits.processes:
                self.report("processes")
            elif use is not None and use.files > _FILES:
                self.report("files")
            await asyncio.sleep(_LOOK_S)


async def start(argv: list[str], files: Mapping[str, str], limits: SandboxLimits, slot: int, cpu_s: float | None = None) -> Jailed:
    """Start a program in a sandbox of its own, with these files in its working directory. Raises SandboxError."""
    bwrap = bubblewrap.find()
    if bwrap is None:
        raise SandboxError("bubblewrap (bwrap) is not installed")
    # Or every program would leave an ended process to whoever is above us, for as long as that one does not look.
    adopt_orphans()
    uid = bubblewrap.uid_of(slot)
    seccomp, block_in, block_out, status_out, status_in = -1, -1, -1, -1, -1
    try:
        seccomp = _filled(syscalls.program())
        block_out, block_in = os.pipe()
        status_out, status_in = os.pipe()
        words = bubblewrap.command(bwrap, limits, uid, seccomp, status_in, block_out) + bubblewrap.launch(limits, uid, argv, cpu_s)
        handle, status_out = status_out, -1  # the stream closes it, also when this is cancelled
        status = await read_pipe(handle)
        process = await start_child(words, errors=True, pass_fds=(seccomp, status_in, block_out), env={}, cwd="/", limit=_CHUNK)
        os.close(status_in)
        status_in = -1
        jailed = Jailed(process, limits, status)
        await _begin(jailed, block_in, files)
        return jailed
    except OSError as error:
        raise SandboxError(f"cannot start a sandbox: {error.strerror or error}") from error
    finally:
        for handle in (seccomp, block_in, block_out, status_out, status_in):
            if handle >= 0:
                os.close(handle)


async def _begin(jailed: Jailed, block: int, files: Mapping[str, str]) -> None:
    """Hold the first process while it is blocked, let it go, and see that the program begins."""
    said = b""
    try:
        status = await _within(jailed.status.readuntil(b"}\n"), "bubblewrap to make the sandbox")
        jailed.hold(_first_of(status))
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


def _first_of(status: bytes) -> int:
    """The first process of a sandbox, as bubblewrap says."""
    first: int = json.loads(status)["child-pid"]
    return first


async def _within(awaited: Awaitable[T], what: str) -> T:
    try:
        async with asyncio.timeout(_WAIT_S):
            return await awaited
    except TimeoutError:
        raise SandboxError(f"waited {_WAIT_S:g} s for {what}") from None


def _filled(data: bytes) -> int:
    """A pipe with something to read in it."""
    out, into = os.pipe()
    with os.fdopen(into, "wb") as stream:
        stream.write(data)
    return out
