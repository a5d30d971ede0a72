"""One child process: how it may end, what its log says, and what it costs."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError
from seatrial.runtime import process
from seatrial.runtime.process import Control, Interrupted, Interruptible, Outcome, ProcessSpec, Tick, pid_file, run
from tests.runtime.children import gone, lines, send, spec, wait_for, wait_until
from tests.runtime.small_jobs import ALMOST_A_MINUTE, Clock

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("code", [0, 1, 77, 255])
def test_exit_code(tmp_path: Path, code: int) -> None:
    outcome = run(spec(tmp_path, "sh", "-c", f"exit {code}"))
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("exited", code, None)
    assert not pid_file(tmp_path / "run.log").exists()


def test_a_signal_is_told_from_an_exit(tmp_path: Path) -> None:
    outcome = run(spec(tmp_path, "sh", "-c", "kill -SEGV $$"))
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("exited", 128 + signal.SIGSEGV, signal.SIGSEGV)


def test_output_and_errors_share_the_log(tmp_path: Path) -> None:
    run(spec(tmp_path, "sh", "-c", r"echo out; echo err >&2; printf 'a\rb\n\377\n'; printf 'no newline'"))
    assert lines(tmp_path) == ["out", "err", "a\rb", "\\xff", "no newline"]


def test_surroundings_of_the_child(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    program = "import os, sys; print(os.getcwd(), sorted(os.environ.items()), os.getsid(0) == os.getpid(), repr(sys.stdin.read()))"
    run(spec(tmp_path, program, cwd=work, env={"A": "b", "LC_CTYPE": "C.UTF-8"}, run_id="my-run"))
    assert lines(tmp_path) == [f"{work} {[('A', 'b'), ('LC_CTYPE', 'C.UTF-8'), ('SEATRIAL_RUN', 'my-run')]} True ''"]


def test_no_shell(tmp_path: Path) -> None:
    run(spec(tmp_path, "echo", "$HOME; exit 3"))
    assert lines(tmp_path) == ["$HOME; exit 3"]


def test_runs_append_to_the_log(tmp_path: Path) -> None:
    run(spec(tmp_path, "echo", "one"))
    run(spec(tmp_path, "echo", "two"))
    assert lines(tmp_path) == ["one", "two"]


def test_lines_are_filtered_on_disk_and_in_ticks(tmp_path: Path) -> None:
    ticks: list[Tick] = []

    def note(tick: Tick) -> None:
        ticks.append(tick)
        if len([each for each in ticks if each.last_line]) == 2:
            (tmp_path / "go").touch()

    program = "echo my secret; until [ -e go ]; do sleep 0.02; done"
    run(spec(tmp_path, "sh", "-c", program, line_filter=lambda line: line.replace("secret", "***")), note)
    assert lines(tmp_path) == ["my ***"]
    assert {tick.last_line for tick in ticks if tick.last_line} == {"my ***"}
    assert 0.1 <= ticks[0].seconds < ticks[1].seconds


def test_much_output_completely(tmp_path: Path) -> None:
    outcome = run(spec(tmp_path, "import sys\nfor i in range(5000): sys.stdout.write('x' * 99 + '\\n' + 'y' * 9899 + '\\n')"))
    assert outcome.exit_code == 0
    written = (tmp_path / "run.log").stat().st_size
    assert written == 5000 * (9999 + 1 + 2 * 25)


def test_waiting_does_not_spin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    class Counted(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            looks.append(timeout)
            return super().select(timeout)

    monkeypatch.setattr(selectors, "DefaultSelector", Counted)
    run(spec(tmp_path, "sleep", "0.6"))
    assert 1 <= len(looks) <= 30, "a look every few milliseconds would be a hundred and more"


def test_a_child_that_closed_its_output_is_waited_for(tmp_path: Path) -> None:
    outcome = run(spec(tmp_path, "sh", "-c", "exec >&- 2>&-; sleep 0.2; exit 5"))
    assert outcome.exit_code == 5
    assert outcome.seconds > 0.2


def test_cpu_of_grandchildren_counts(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    outcome = run(spec(tmp_path, f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-E', '-c', {burn!r}])"))
    assert 0.3 <= outcome.cpu_seconds < 3
    assert outcome.peak_rss_mb > 1


def test_deadline(tmp_path: Path) -> None:
    outcome = run(spec(tmp_path, "sh", "-c", "while true; do echo busy; sleep 0.05; done", deadline_s=0.3))
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("deadline", None, signal.SIGTERM)
    assert "[seatrial] the deadline of 0.3 s passed: ending the run" in lines(tmp_path)


@pytest.mark.usefixtures("begun")
def test_what_a_child_says_while_it_is_ended_is_kept(tmp_path: Path) -> None:
    program = "import signal, sys, time\nsignal.signal(15, lambda *_: (print('z' * 200000), sys.exit(0)))\n"
    outcome = run(spec(tmp_path, program + "open('pid', 'w').write('there')\ntime.sleep(60)", deadline_s=0.2))
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("deadline", None, None)
    assert lines(tmp_path)[-1] == "z" * 200000


@pytest.mark.usefixtures("begun")
def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    stubborn = "trap '' TERM; echo $$ > pid; while true; do sleep 0.1; done"
    outcome = run(spec(tmp_path, "sh", "-c", stubborn, deadline_s=0.2, grace_s=0.3))
    assert (outcome.ended, outcome.signal) == ("deadline", signal.SIGKILL)


def fake_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "stack of $3: secret"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("begun")
def test_stall_puts_stacks_into_the_log_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_py_spy(tmp_path, monkeypatch)
    program = "import os, time; print(os.getpid(), flush=True); open('pid', 'w').write('there'); time.sleep(60)"
    outcome = run(spec(tmp_path, program, stall_s=0.3, line_filter=lambda line: line.replace("secret", "***")))
    assert (outcome.ended, outcome.exit_code, outcome.signal) == ("stalled", None, signal.SIGTERM)
    pid, *rest = lines(tmp_path)
    assert rest == [
        "[seatrial] no output and no change of a watched path for 0.3 s: ending the run",
        f"[seatrial] py-spy dump --pid {pid}",
        f"[seatrial] stack of {pid}: ***",
    ]


def test_stall_without_py_spy_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    outcome = run(spec(tmp_path, "/bin/sleep", "60", stall_s=0.2))
    assert outcome.ended == "stalled"
    assert "py-spy is neither on PATH nor beside" in lines(tmp_path)[-1]


@pytest.mark.parametrize("watched", ["metrics.jsonl", "."])
def test_a_watched_change_is_progress(tmp_path: Path, watched: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    quiet = "for i in $(seq 20); do echo $i >> metrics.jsonl; sleep 0.05; done"
    outcome = run(spec(tmp_path, "sh", "-c", quiet, cwd=work, stall_s=0.8, watch=(work / watched,)))
    assert (outcome.ended, outcome.exit_code) == ("exited", 0)


def test_output_without_newlines_is_progress(tmp_path: Path) -> None:
    outcome = run(spec(tmp_path, "sh", "-c", r"for i in $(seq 20); do printf '%s\r' $i; sleep 0.05; done", stall_s=0.8))
    assert outcome.ended == "exited"
    assert lines(tmp_path) == ["".join(f"{number}\r" for number in range(1, 21))]


def test_program_that_is_not_there_blocks(tmp_path: Path) -> None:
    with pytest.raises(BlockedError, match=r"cannot start /no/such/program .*No such file"):
        run(spec(tmp_path, "/no/such/program", "x"))
    with pytest.raises(BlockedError, match="cannot start"):
        run(spec(tmp_path, "echo", "x", cwd=tmp_path / "gone"))
    with pytest.raises(ValueError, match="null byte"):
        run(spec(tmp_path, "echo", "a\0b"))
    assert not pid_file(tmp_path / "run.log").exists()


def test_an_exception_on_the_way_leaves_nothing_running(tmp_path: Path) -> None:
    def fail(tick: Tick) -> None:
        raise ValueError(tick)

    with pytest.raises(ValueError):
        run(spec(tmp_path, "sh", "-c", "sleep 60 & echo $! > pid; wait"), fail)
    assert gone(int(wait_for(tmp_path / "pid")))
    assert not pid_file(tmp_path / "run.log").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_runs_end_in_order(tmp_path: Path, number: int) -> None:
    with Interruptible() as stop:
        send(tmp_path / "pid", number)
        outcome = run(spec(tmp_path, "sh", "-c", "sleep 60 & echo $! > pid; wait"))
        assert (outcome.ended, outcome.exit_code) == ("interrupted", None)
        assert stop.signal == number
        assert run(spec(tmp_path, "touch", "started")).ended == "interrupted"
    assert gone(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "started").exists()


def test_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    send(tmp_path / "pid", signal.SIGINT, signal.SIGINT)
    with Clock() as clock, pytest.raises(Interrupted), Interruptible():
        run(spec(tmp_path, "sh", "-c", "trap '' TERM; echo $$ > pid; while true; do sleep 0.1; done", grace_s=60))
    assert clock.seconds < ALMOST_A_MINUTE
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_second_interrupt_while_the_child_is_being_started_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = process._start

    def interrupted(spec: ProcessSpec) -> subprocess.Popen[bytes]:
        signal.raise_signal(signal.SIGINT)
        child = start(spec)
        wait_for(tmp_path / "pid")
        signal.raise_signal(signal.SIGINT)
        return child

    monkeypatch.setattr(process, "_start", interrupted)
    with pytest.raises(Interrupted), Interruptible():
        run(spec(tmp_path, "sh", "-c", "setsid sleep 60 & echo $! > pid; wait"))
    assert gone(int((tmp_path / "pid").read_text()))
    assert not pid_file(tmp_path / "run.log").exists()


def controlled(tmp_path: Path, *argv: str, **changes: Any) -> tuple[Control, Future[Outcome], ThreadPoolExecutor]:
    """A run in another thread, under way."""
    control, pool = Control(), ThreadPoolExecutor(1)
    running = pool.submit(run, spec(tmp_path, *argv, control=control, **changes))
    wait_for(tmp_path / "pid")
    return control, running, pool


def test_a_controlled_run_is_seen_and_ended_from_another_thread(tmp_path: Path) -> None:
    control, running, pool = controlled(tmp_path, "sh", "-c", "echo $$ > pid; exec sleep 60")
    with pool:
        assert control.peek() is None
        control.stop("the client ended", 5)
        assert running.result(ALMOST_A_MINUTE).ended == "interrupted"
    assert control.peek() == 128 + signal.SIGTERM
    assert lines(tmp_path) == ["[seatrial] the client ended: ending the run"]


def test_the_end_of_a_controlled_child_is_seen_before_what_it_left_is_ended(tmp_path: Path) -> None:
    control, running, pool = controlled(tmp_path, "sh", "-c", "(trap '' TERM; sleep 60) & echo $$ > pid; exit 7", grace_s=60)
    with pool, Interruptible():
        wait_until(lambda: control.peek() is not None, "the end of the child is seen")
        assert control.peek() == 7
        assert not running.done()
        control.stop("hurry", 0)
        assert running.result(ALMOST_A_MINUTE).exit_code == 7


def test_asking_again_only_shortens(tmp_path: Path) -> None:
    control, running, pool = controlled(tmp_path, "sh", "-c", "trap '' TERM; echo $$ > pid; while true; do sleep 0.1; done")
    with pool:
        control.stop("slowly", 60)
        time.sleep(0.3)
        assert not running.done()
        control.stop("now", 0)
        control.stop("slowly", 60)
        assert running.result(ALMOST_A_MINUTE).signal == signal.SIGKILL
    assert control.why == "slowly"


def test_an_interrupt_of_seatrial_is_left_to_who_holds_the_control(tmp_path: Path) -> None:
    with Interruptible():
        control, running, pool = controlled(tmp_path, "sh", "-c", "echo $$ > pid; exec sleep 60")
        with pool:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.4)
            assert not running.done()
            control.stop("", 5)
            assert running.result(ALMOST_A_MINUTE).ended == "interrupted"


def test_a_run_that_was_asked_to_end_before_it_began_never_starts(tmp_path: Path) -> None:
    control = Control()
    control.stop("too late", 5)
    assert run(spec(tmp_path, "touch", "started", control=control)).ended == "interrupted"
    assert control.peek() is None
    assert not (tmp_path / "started").exists()


def test_runs_that_share_a_log_have_their_own_pid_files(tmp_path: Path) -> None:
    seen: list[bool] = []
    run(spec(tmp_path, "sleep", "0.3", part="1"), lambda _: seen.append((tmp_path / "run.log.1.pids").exists()))
    assert seen[0]
    assert not list(tmp_path.glob("*.pids"))
