"""Ctrl-C while answers are scored in processes of their own: no good rollout is lost, and none gets a wrong reward."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.command import SEATRIAL, environ, seatrial
from tests.rollouts.served import halves, serving, write_rows

pytestmark = pytest.mark.slow

FUNCTION = """
import subprocess
def reward(row, text):
    return float(subprocess.run(["sleep", "0.3"]).returncode == 0)
"""
CAMPAIGN = """
name = "signals"
verifier = "mine"
datasets = [{{ name = "rows", path = "rows.jsonl" }}]
policy = {{ url = "{url}" }}
work = {{ repeats = 4, shards = 1 }}
[verifiers.mine]
kind = "function"
function = "fn.py:reward"
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_fails_no_rollout_that_is_being_scored(tmp_path: Path, number: signal.Signals) -> None:
    write_rows(tmp_path / "rows.jsonl", halves(5))
    (tmp_path / "fn.py").write_text(FUNCTION)
    with serving() as stub:
        (tmp_path / "campaign.toml").write_text(CAMPAIGN.format(url=stub.url))
        words = [str(SEATRIAL), "rollouts", "start", "campaign.toml", "--out", "c"]
        running = subprocess.Popen(
            words, cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        deadline = time.monotonic() + 60
        while not _records(tmp_path) and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(running.pid, number)
        _, said = running.communicate(timeout=60)
        assert running.returncode == 130, said
        found = json.loads(seatrial("rollouts", "status", "c", "--json", cwd=tmp_path).out)
        assert (found["failed"], found["ok"] < 20) == (0, True), found
        resumed = seatrial("rollouts", "resume", "c", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "20 of 20 settled: 20 ok" in resumed.out
    rows = [json.loads(line) for line in (tmp_path / "c/merged/rollouts.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [1.0] * 20


def _records(folder: Path) -> list[str]:
    return [line for path in (folder / "c").glob("shards/*/attempt-*.jsonl") for line in path.read_text().splitlines()]
