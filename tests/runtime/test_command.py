"""A short command: its output, its time limit, and what is left of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from seatrial.runtime.command import NoAnswerError, run_command
from tests.runtime.children import wait_until


def test_output_code_and_input(tmp_path: Path) -> None:
    done = run_command(["sh", "-c", "cat; echo oh >&2; echo no >&2; exit 3"], 60, stdin=b"in \xff")
    assert (done.code, done.data, done.out, done.error, done.last_words) == (
        3,
        b"in \xff",
        "in \N{REPLACEMENT CHARACTER}",
        "oh\nno\n",
        "no",
    )
    with (tmp_path / "out").open("wb") as file:
        assert run_command([sys.executable, "-c", "print(1)"], 60, into=file).data == b""
    assert (tmp_path / "out").read_text() == "1\n"


@pytest.mark.parametrize(("words", "missing"), [(["/no/such/program"], True), (["sh", "a\0b"], False), (["/"], False)])
def test_what_cannot_be_started(words: list[str], missing: bool) -> None:
    with pytest.raises(NoAnswerError) as caught:
        run_command(words, 60)
    assert (caught.value.missing, caught.value.late) == (missing, False)
    assert caught.value.why


@pytest.mark.parametrize("own_session", [True, False])
def test_a_late_command_is_ended_and_in_a_session_of_its_own_all_that_it_started(tmp_path: Path, own_session: bool) -> None:
    began = time.monotonic()
    with pytest.raises(NoAnswerError) as caught:
        run_command(["sh", "-c", f"sleep 61 & echo $! > {tmp_path}/pid; wait"], 0.5, own_session=own_session)
    assert caught.value.late
    assert time.monotonic() - began < 60
    left = int((tmp_path / "pid").read_text())
    if own_session:
        wait_until(lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE, "its end")
    else:
        psutil.Process(left).kill()
