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

from seatrial.rollouts.sandbox.sandbox import Child, start_child
from seatrial.rollouts.verifiers.process_verifiers import WorkerError, WorkerPool

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
    assert cut_off(WorkerPool(["math"], 5).ask({"expected": ["1"], "text": "1"}), turns).cancelled()
    assert left("seatrial.rollouts.verifiers.process_verifiers") == []


FUNCTION = """
import os
def late(row, text):
    if text == "late":
        os.write(4, b"%012d%012d" % (row["number"], 12) + b'{"value": 7}')
    if text == "fork" and os.fork() == 0:
        return 8
    if text == "stop":
        os.kill(os.getpid(), 19)
    return {"reward": 1, "pid": os.getpid()}
"""


def workers(place: Path, timeout_s: float = 30) -> WorkerPool:
    (place / "mine.py").write_text(FUNCTION)
    return WorkerPool(["function", str(place), "mine.py:late"], timeout_s, count=1)


def request(text: str, number: int = 0) -> dict[str, Any]:
    return {"row": {"number": number}, "text": text}


def test_an_answer_to_an_earlier_request_is_none_to_this_one(tmp_path: Path) -> None:
    """Whatever wrote it: the worker is replaced, and the next request gets its own answer."""

    async def main() -> None:
        pool = workers(tmp_path)
        first = (await pool.ask(request("x")))["value"]
        with pytest.raises(WorkerError, match="answered request 99 where 1 was asked"):
            await pool.ask(request("late", 99))
        second = (await pool.ask(request("x")))["value"]
        assert (second["reward"], second["pid"] != first["pid"]) == (1, True)
        await pool.close()

    asyncio.run(main())
    assert left("seatrial.rollouts.verifiers.process_verifiers") == []


def test_the_child_of_a_function_that_forks_answers_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        pool = workers(tmp_path)
        found = [(await pool.ask(request(text)))["value"] for text in ("fork", "x", "fork", "x")]
        assert [one["reward"] for one in found] == [1] * 4
        assert len({one["pid"] for one in found}) == 1
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("timeout_s", [0, 0.2])
def test_a_worker_whose_answer_never_comes_is_ended(timeout_s: float, tmp_path: Path) -> None:
    """It is stopped in the middle, or the time is over before it can answer: its streams stay open until it is killed."""

    async def main() -> None:
        pool = workers(tmp_path, timeout_s)
        with pytest.raises(WorkerError, match="no answer within"):
            await pool.ask(request("stop"))
        assert left("seatrial.rollouts.verifiers.process_verifiers") == []
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 100])
def test_nothing_starts_after_the_end_of_a_verifier(turns: int, tmp_path: Path) -> None:
    """It ends while its only worker starts, loads or is stopped, and while another request waits for its turn."""

    async def main() -> None:
        pool = workers(tmp_path)
        asked = [asyncio.create_task(pool.ask(request("stop"))) for _ in range(2)]
        for _ in range(turns):
            await asyncio.sleep(0.02 if turns == 100 else 0)
        await pool.close()
        for one in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(one, WorkerError)
            assert (str(one), one.heals) == ("the verifier was closed", True)
        assert left("seatrial.rollouts.verifiers.process_verifiers") == []

    asyncio.run(main())


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
