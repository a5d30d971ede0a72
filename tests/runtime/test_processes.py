"""What can be seen of processes, in the moments in which they show nothing."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from seatrial.runtime import process_tree


def test_a_process_that_becomes_another_program_keeps_its_marker(tmp_path: Path) -> None:
    """In the middle of an exec it shows no environment: one look in eight, of a process that does nothing else."""
    (tmp_path / "again.sh").write_text("exec sh again.sh")
    with subprocess.Popen(["sh", "again.sh"], cwd=tmp_path, env={**os.environ, process_tree.MARKER: str(tmp_path)}) as again:
        seen = {process_tree.marker(again.pid) for _ in range(5000)}
        again.kill()
    assert seen == {str(tmp_path)}


def test_a_process_without_an_environment_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "_EXEC_S", 60.0)
    with subprocess.Popen(["/bin/sleep", "600"], env={}) as bare:
        before = time.monotonic()
        assert all(process_tree.marker(bare.pid) is None for _ in range(100))
        spent = time.monotonic() - before
        bare.kill()
    assert spent < 45  # the hundred of them together


def test_a_process_that_ended_and_is_not_collected_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "_EXEC_S", 60.0)
    with subprocess.Popen(["/bin/true"]) as dead:
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
        before = time.monotonic()
        assert process_tree.marker(dead.pid) is None
        assert time.monotonic() - before < 45
