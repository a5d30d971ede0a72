"""The service, asked as its clients ask it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from seatrial.core.errors import BlockedError
from seatrial.rollouts.sandbox.sandbox import SandboxError
from seatrial.rollouts.sandbox.sandbox_service import Sessions, serve
from seatrial.runtime.servers import free_port
from tests.rollouts.sandboxes import LIMITS, left_over, needs_sandbox

pytestmark = needs_sandbox()

POSES_AS_THE_ANSWER = """
import os
for handle in range(3, 20):
    try: os.write(handle, b"x" * 99)
    except OSError: pass
"""
Ask = Callable[..., Awaitable[dict[str, Any]]]


def served(talk: Callable[[Ask, aiohttp.ClientSession, str], Awaitable[None]]) -> None:
    """Talk to a running service; nothing is left of it."""

    async def both() -> None:
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        service = asyncio.create_task(serve("127.0.0.1", 0, LIMITS, port.set_result))
        url = f"http://127.0.0.1:{await port}"
        async with aiohttp.ClientSession() as client:

            async def ask(code: str, language: str = "ipython", session: str | None = "s", **more: Any) -> dict[str, Any]:
                body = {"generated_code": code, "language": language, "timeout": 5, **more}
                headers = {"X-Session-ID": session} if session else {}
                async with client.post(f"{url}/execute", json=body, headers=headers) as answer:
                    return {"http": answer.status, **await answer.json()}

            await talk(ask, client, url)
        service.cancel()
        await asyncio.gather(service, return_exceptions=True)

    asyncio.run(both())
    assert left_over() == []


def test_a_session_keeps_its_variables_until_it_is_deleted() -> None:
    async def talk(ask: Ask, client: aiohttp.ClientSession, url: str) -> None:
        first = await ask("x = 20\nx + 1")
        assert first == {"http": 200, "process_status": "completed", "stdout": "21\n", "stderr": "", "new_session_created": True}
        again = await ask("import os\nos.system('echo sub')\nprint(x)")
        assert (again["stdout"], again["new_session_created"]) == ("sub\n20\n", False)
        assert "NameError" in (await ask("x", session="other"))["stderr"]
        async with client.get(f"{url}/sessions") as answer:
            assert set((await answer.json())["sessions"]) == {"s", "other"}
        async with client.delete(f"{url}/sessions/s") as answer:
            assert answer.status == 200
        async with client.delete(f"{url}/sessions/s") as answer:
            assert answer.status == 404
        assert "NameError" in (await ask("x"))["stderr"]
        async with client.get(f"{url}/health") as answer:
            assert (await answer.json())["status"] == "healthy"

    served(talk)


@pytest.mark.slow
def test_cells_that_fail() -> None:
    async def talk(ask: Ask, client: aiohttp.ClientSession, url: str) -> None:
        failed = await ask("y = 1\n1 / 0")
        assert failed["process_status"] == "error"
        assert failed["stderr"].startswith('Traceback (most recent call last):\n  File "<cell 1>", line 2, in <module>\n    1 / 0\n')
        assert failed["stderr"].endswith("\nZeroDivisionError: division by zero\n")
        assert (await ask("1 / 0", traceback_verbosity="Minimal"))["stderr"] == "ZeroDivisionError: division by zero\n"
        assert "SyntaxError" in (await ask("def f(:"))["stderr"]
        assert (await ask("exit(2)"))["stderr"] == "SystemExit: 2\n"
        assert (await ask("y"))["stdout"] == "1\n"
        late = await ask("while True: pass", timeout=0.2)
        assert (late["process_status"], late["stderr"]) == ("timeout", "Execution timed out after 0.2 seconds\n")
        lost = await ask("y")
        assert (lost["process_status"], lost["new_session_created"]) == ("error", True)
        assert "memory" in (await ask("z = bytearray(300 << 20)"))["stderr"]
        assert "Ended early" in (await ask("import os\nos._exit(0)"))["stderr"]
        assert "Ended early" in (await ask(POSES_AS_THE_ANSWER))["stderr"]

    served(talk)


def test_programs_and_scripts() -> None:
    async def talk(ask: Ask, client: aiohttp.ClientSession, url: str) -> None:
        program = await ask("print(input())\n1 / 0", "python", None, std_input="q")
        assert (program["process_status"], program["stdout"]) == ("completed", "q\n")
        assert "ZeroDivisionError" in program["stderr"]
        assert (await ask("print('x' * 50)", "python3", None, max_output_characters=10))["stdout"] == "x" * 10 + "<output cut>"
        assert (await ask("echo hi; exit 3", "shell", None))["process_status"] == "error"
        assert (await ask("sleep 9", "shell", None, timeout=0.1))["process_status"] == "timeout"
        unknown = await ask("theorem", "lean4", None)
        assert (unknown["http"], unknown["process_status"]) == (200, "error")
        assert "no language 'lean4'" in unknown["stderr"]

    served(talk)


def test_requests_without_sense_are_refused_by_name() -> None:
    async def talk(ask: Ask, client: aiohttp.ClientSession, url: str) -> None:
        for wrong, word in (({"timeout": 0}, "timeout"), ({"timeout": None}, "timeout"), ({"max_output_characters": "a"}, "max_output")):
            refused = await ask("1", **wrong)
            assert refused["http"] == 400
            assert word in refused["error"]
        assert "X-Session-ID" in (await ask("1", session=None))["error"]
        assert "generated_code" in (await ask("1", "python", None, generated_code=3))["error"]
        for body in ("[]", "{"):
            async with client.post(f"{url}/execute", data=body, headers={"Content-Type": "application/json"}) as answer:
                assert answer.status == 400

    served(talk)


@pytest.mark.slow
def test_sessions_make_room_for_new_ones() -> None:
    async def crowd() -> None:
        sessions = Sessions(LIMITS.model_copy(update={"wall_s": 60.0, "cpu_s": 30.0}), most=2)
        try:
            for name in ("a", "b", "c"):
                assert (await sessions.run(name, "1", 60.0)).new
            assert set(sessions.open) == {"b", "c"}
            busy = [asyncio.create_task(sessions.run(name, "import time\ntime.sleep(1)", 60.0)) for name in ("b", "c")]
            await asyncio.sleep(0.05)
            with pytest.raises(SandboxError, match="2 sessions are busy"):
                await sessions.run("d", "1", 60.0)
            assert not any(cell.new for cell in await asyncio.gather(*busy))
            await sessions.end_idle()
            assert set(sessions.open) == {"b", "c"}, "used just now"
            sessions._idle_s = 0.0
            await asyncio.sleep(0.05)
            await sessions.end_idle()
            assert sessions.open == {}
        finally:
            await sessions.close()

    asyncio.run(crowd())
    assert left_over() == []


def test_a_session_that_is_ended_while_it_begins_or_works_leaves_nothing() -> None:
    async def crowd() -> None:
        sessions = Sessions(LIMITS, most=2)

        async def use(number: int) -> str:
            name = str(number % 3)
            if number % 4 == 0:
                return str(await sessions.end(name))
            try:
                return (await sessions.run(name, "import time\ntime.sleep(0.01)", 1.0)).ending
            except SandboxError as error:
                return str(error)

        found = set(await asyncio.gather(*(use(number) for number in range(24))))
        await sessions.close()
        assert found <= {"True", "False", "done", "killed", "2 sessions are busy already", "the session was ended while it began"}

    asyncio.run(crowd())
    assert left_over() == []


def test_a_port_that_is_taken_is_said() -> None:
    async def twice() -> None:
        port = free_port()
        ready = asyncio.Event()
        first = asyncio.create_task(serve("127.0.0.1", port, LIMITS, lambda _: ready.set()))
        await ready.wait()
        with pytest.raises(BlockedError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve("127.0.0.1", port, LIMITS, lambda _: None)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    asyncio.run(twice())


@pytest.mark.parametrize("language", ["python", "ipython"])
def test_a_client_that_leaves_takes_its_program_with_it(language: str) -> None:
    async def talk(ask: Ask, client: aiohttp.ClientSession, url: str) -> None:
        before = time.monotonic()
        for _ in range(4):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask("import time\ntime.sleep(1000)", language=language), 0.3)
        answer = await ask("print(1)", language=language)
        assert (answer["stdout"], answer["process_status"]) == ("1\n", "completed")
        assert time.monotonic() - before < 4 * LIMITS.wall_s  # none of them was run to its limit

    served(talk)
