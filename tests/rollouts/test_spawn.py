"""Child processes of an event loop: no start and no end waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from seatrial.rollouts.sandbox.spawn import Child, start_child
from seatrial.rollouts.verify.workers import Workers

pytestmark = pytest.mark.timeout(60)
SLEEP = ("sleep", "61")


def left(word: str) -> list[int]:
    """Our children with this word in their command that still run."""
    running = []
    for child in psutil.Process().children(recursive=True):
        try:
            running += [child.pid] if word in child.cmdline() else []
        except psutil.Error:
            continue
    return running


def cut_off(work: Coroutine[Any, Any, object], turns: int) -> asyncio.Task[object]:
    """End a loop while this is under way, as an error in another task does: `asyncio.run` cancels it, and all that asyncio began for it."""

    async def main() -> asyncio.Task[object]:
        task = asyncio.create_task(work)
        for _ in range(turns):
            await asyncio.sleep(0)
        return task

    return asyncio.run(main())


@pytest.mark.parametrize("turns", range(8))
def test_a_start_that_the_end_of_its_loop_cancels(turns: int) -> None:
    task = cut_off(start_child(SLEEP, errors=True), turns)
    if not task.cancelled():
        child = task.result()
        assert isinstance(child, Child)
        child.kill()
        asyncio.run(child.wait())
    assert left(SLEEP[1]) == []


@pytest.mark.parametrize("turns", [1, 2, 3, 5])
def test_a_verifier_whose_loop_ends_while_a_worker_starts(turns: int) -> None:
    assert cut_off(Workers(["math"], 5).ask({"expected": ["1"], "text": "1"}), turns).cancelled()
    assert left("seatrial.rollouts.verify.worker") == []


@pytest.mark.parametrize("errors", [True, False])
def test_the_streams_of_a_child(errors: bool, tmp_path: Path) -> None:
    async def main() -> None:
        word = "import sys; sys.stdout.write(input()); sys.stderr.write('b'); sys.exit(3)"
        child = await start_child((sys.executable, "-c", word), errors=errors, env={"A": "1"}, cwd=str(tmp_path))
        child.stdin.write(b"a\n")
        await child.stdin.drain()
        assert await child.stdout.read() == b"a"
        if errors:
            assert await child.stderr.read() == b"b"
        assert await child.wait() == 3
        assert child.returncode == 3
        child.close()

    asyncio.run(main())


def test_the_end_of_a_child_whose_pipe_another_session_holds() -> None:
    async def main() -> None:
        child = await start_child(("sh", "-c", f"setsid {' '.join(SLEEP)} & echo $!; exit 3"))
        other = int(await child.stdout.readline())
        try:
            assert await child.wait() == 3
        finally:
            child.close()
            os.kill(other, signal.SIGKILL)

    asyncio.run(main())


def test_the_end_of_a_child_whose_answer_nobody_reads() -> None:
    async def main() -> None:
        child = await start_child((sys.executable, "-c", "print('x' * 10**6)"))
        while child.stdout._buffer.__len__() < 1 << 16:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
        child.kill()
        assert await child.wait() == -signal.SIGKILL
        child.close()

    asyncio.run(main())


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        asyncio.run(start_child(("/nowhere/at/all",)))
