"""Quicker ticks than in production, so that the room's tests stay fast; and children that are not hurried."""

from __future__ import annotations

import subprocess

import pytest

from seatrial.runtime import process
from tests.runtime.children import wait_for


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.runtime.process._TICK_S", 0.1)
    monkeypatch.setattr("seatrial.runtime.servers._ASK_EVERY_S", 0.05)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has started when it has written `pid`: on a busy machine, too, a short deadline does not pass before that."""
    start = process._start

    def waits(spec: process.ProcessSpec) -> subprocess.Popen[bytes]:
        child = start(spec)
        wait_for(spec.cwd / "pid")
        return child

    monkeypatch.setattr(process, "_start", waits)
