"""A child process of an event loop, with its standard streams.

asyncio's own (seen with Python 3.11.7) may wait for ever: where its start is cancelled half-way, as `asyncio.run` does with every task
that is left, and where a pipe stays open after the process has ended, because nobody reads what it said or a process of another session
holds it. Here a start that is cancelled leaves nothing, and an end depends on the process alone.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence

_FIRST_LOOK_S = 0.001
_LAST_LOOK_S = 0.05
END_S = 30.0
"""For what takes milliseconds, on a machine that is very busy."""


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
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()

    async def wait(self) -> int:
        """Its exit code when it has ended."""
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


class _Output:
    def __init__(self, reader: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self.reader = reader
        self.transport = transport


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


async def read_pipe(handle: int) -> asyncio.StreamReader:
    """A stream of what comes out of a pipe, which it closes at its end."""
    return (await _connect(handle, 1 << 16)).reader


async def _connect(handle: int, limit: int) -> _Output:
    reader = asyncio.StreamReader(limit)
    pipe = os.fdopen(handle, "rb", 0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return _Output(reader, transport)
