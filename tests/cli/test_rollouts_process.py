"""A campaign in processes of its own, as a user runs it: to its end, and interrupted in the middle."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.cli.command import SEATRIAL, environ, seatrial
from tests.rollouts.served import halves, serving, write_rows

pytestmark = pytest.mark.slow


def flags(tmp_path: Path, url: str) -> list[str]:
    write_rows(tmp_path / "rows.jsonl", halves(8))
    rows = ["--input", "rows.jsonl", "--url", url, "--verifier", "choice", "--repeats", "4", "--shards", "4", "--out", "c"]
    return ["rollouts", "start", *rows, "--set", "requests.concurrency=2"]


def left(tmp_path: Path) -> list[psutil.Process]:
    """Processes that know of the campaign."""
    return [item for item in psutil.process_iter(["cmdline"]) if str(tmp_path / "c") in " ".join(item.info["cmdline"] or ())]


def test_ctrl_c_ends_everything_and_resume_finishes(tmp_path: Path) -> None:
    with serving(latency_s=0.2) as stub:
        words = [str(SEATRIAL), *flags(tmp_path, stub.url)]
        running = subprocess.Popen(words, cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 90
        while stub.calls < 8 and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=120)
        assert running.returncode == 130, said
        assert f"what was collected is kept. Go on with: seatrial rollouts resume {tmp_path}/c" in said
        assert left(tmp_path) == []
        found = json.loads(seatrial("rollouts", "status", "c", "--json", cwd=tmp_path).out)
        assert 0 < found["ok"] < 32
        stub.latency_s = 0.0
        resumed = seatrial("rollouts", "resume", "c", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "32 of 32 settled: 32 ok" in resumed.out
    assert json.loads((tmp_path / "c/merged/merge.json").read_text())["duplicates"] == 0


def test_cancel_from_another_terminal_ends_it_with_99(tmp_path: Path) -> None:
    with serving(latency_s=5) as stub:
        words = [str(SEATRIAL), *flags(tmp_path, stub.url)]
        running = subprocess.Popen(words, cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 90
        while not stub.calls and time.monotonic() < deadline:
            time.sleep(0.05)
        answer = seatrial("rollouts", "cancel", "c", cwd=tmp_path)
        out, said = running.communicate(timeout=120)
    assert answer.out == "cancelled what another seatrial carries\n", answer.err
    assert running.returncode == 99, said
    assert "stopped:    it was cancelled" in out
    assert left(tmp_path) == []


def test_a_dead_endpoint_ends_the_campaign_with_its_reason(tmp_path: Path) -> None:
    answer = seatrial(*flags(tmp_path, "http://127.0.0.1:9/v1"), "--set", "requests.dead_s=0.5", cwd=tmp_path)
    assert answer.code == 99
    why = "no server of the policy answered within 0.5 s: http://127.0.0.1:9/v1: connection refused"
    assert f"the round settled nothing: task 0: Blocked (rollout): {why}" in answer.err
    assert "\n  fix: " in answer.err
