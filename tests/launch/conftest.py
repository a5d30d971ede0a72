"""Quicker ticks than in production, so that the room's tests stay fast."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quick_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.launch.process._TICK_S", 0.1)
