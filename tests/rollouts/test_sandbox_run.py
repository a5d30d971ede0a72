"""The sandbox as it is used: programs, their input and output, files, limits, and the refusal where there can be none."""

from __future__ import annotations

import asyncio
import platform
import struct
import time

import pytest

from seatrial.core.errors import BlockedError
from seatrial.rollouts.sandbox import bubblewrap
from seatrial.rollouts.sandbox import sandbox as process
from seatrial.rollouts.sandbox.sandbox import Sandbox, SandboxError, require, why_not
from tests.rollouts.sandboxes import LIMITS, left_over, needs_sandbox, ran, refusal

pytestmark = pytest.mark.slow

here = needs_sandbox()


@here
def test_input_output_errors_and_exit_code() -> None:
    result = ran("import sys\nprint(input().upper())\nprint('é', file=sys.stderr)\nexit(3)", stdin="hé\n")
    assert (result.stdout, result.stderr, result.exit_code, result.ending) == ("HÉ\n", "é\n", 3, "done")


@here
def test_files_lie_in_the_working_directory_which_is_the_programs_own() -> None:
    program = "import os\nprint(open('a.txt').read(), os.getcwd(), sorted(os.listdir()))\nopen('b', 'w')"
    assert ran(program, files={"a.txt": "x\u2028"}).stdout == "x\u2028 /tmp ['a.txt', 'main.py']\n"
    assert "'b'" not in ran(program, files={"a.txt": ""}).stdout


@here
def test_bytes_that_are_no_text_do_not_break_it() -> None:
    assert ran("import os\nos.write(1, b'a\\xff')").stdout == "a\ufffd"


@here
def test_the_standard_library_works() -> None:
    program = """
import asyncio, bisect, concurrent.futures, ctypes, decimal, hashlib, heapq, json, lzma, multiprocessing, sqlite3, tempfile, threading
with concurrent.futures.ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, [-1])) == [1]
with multiprocessing.Pool(2) as pool: assert pool.map(abs, [-1]) == [1]
asyncio.run(asyncio.sleep(0)); tempfile.TemporaryFile(); sqlite3.connect(":memory:"); print("fine")
"""
    assert (ran(program).stdout) == "fine\n"


@here
def test_the_own_wall_time_of_a_program_cannot_exceed_the_limits() -> None:
    async def both() -> tuple[str, float]:
        result = await Sandbox(LIMITS.model_copy(update={"wall_s": 90.0})).run("import time\ntime.sleep(90)", wall_s=0.2)
        return result.ending, result.seconds

    ending, seconds = asyncio.run(both())
    assert ending == "timeout"
    assert seconds < 45  # it would be 90


@here
@pytest.mark.slow
def test_cpu_time_is_limited() -> None:
    result = ran("while True: pass", limits=LIMITS.model_copy(update={"cpu_s": 1.0, "wall_s": 9.0}))
    assert (result.ending, result.exit_code) == ("timeout", 128 + 24)


@here
def test_only_so_many_run_at_once_and_the_others_wait() -> None:
    async def many() -> float:
        sandbox = Sandbox(LIMITS.model_copy(update={"at_once": 1}))
        began = time.monotonic()
        results = await asyncio.gather(*(sandbox.run("import time\ntime.sleep(0.1)") for _ in range(3)))
        assert {result.ending for result in results} == {"done"}
        return time.monotonic() - began

    assert asyncio.run(many()) > 0.3


@here
def test_a_shell_script_runs_as_contained() -> None:
    result = asyncio.run(Sandbox(LIMITS).run("yes | head -1; ls /work /root; exit 4", language="bash"))
    assert (result.stdout, result.exit_code) == ("y\n", 4)
    assert result.stderr.count("No such file") == 2
    assert left_over() == []


@here
def test_a_program_that_cannot_be_put_there_is_no_result() -> None:
    with pytest.raises(SandboxError, match=r"could not be started: .*space left"):
        ran("print(1)" + " " * (9 << 20))


@here
def test_a_program_cannot_pose_as_a_broken_sandbox() -> None:
    assert ran("import sys\nsys.exit('0123456789abcdef no such thing')").ending == "done"


@here
def test_what_bubblewrap_refuses_is_an_error_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "_read_only", lambda: ("--ro-bind", "/no/such/place", "/x"))
    with pytest.raises(SandboxError, match="no/such/place"):
        ran("print(1)")
    assert "no/such/place" in str(why_not())


@here
def test_the_probe_may_be_called_while_a_loop_runs() -> None:
    async def within() -> str | None:
        return why_not()

    assert asyncio.run(within()) is None
    assert refusal() is None


@here
def test_a_program_that_cannot_be_watched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "measure_use", lambda first: None)
    monkeypatch.setattr("seatrial.rollouts.sandbox.sandbox._PROBE_S", 0.3)
    assert why_not() == "what a program uses cannot be seen in /proc"


def test_without_bubblewrap_it_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "find_bubblewrap", lambda: None)
    with pytest.raises(BlockedError, match=r"bubblewrap \(bwrap\) is not installed") as refused:
        require()
    assert "apt-get install bubblewrap" in refused.value.fix


def test_an_unknown_processor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "no system call filter" in str(why_not())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_jump_of_the_filter_stays_in_it(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    steps = list(struct.iter_unpack("=HBBI", bubblewrap.seccomp_filter()))
    assert steps[-1] == (0x06, 0, 0, 0x7FFF0000)
    for place, (code, if_true, if_false, _) in enumerate(steps):
        assert place + 1 + max(if_true, if_false) < len(steps) or code == 0x06
