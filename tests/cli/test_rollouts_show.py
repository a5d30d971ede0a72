"""How a campaign is shown: the line while it runs, the table, and the exit code at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from seatrial.cli import rollouts
from seatrial.rollouts.campaign_runner import Status

ZERO: dict[str, Any] = {
    **dict.fromkeys(("failed", "rows_done", "shards_done", "collectors", "open", "torn", "duplicates", "conflicts", "foreign"), 0),
    **{"name": "small", "units": 200, "ok": 0, "owed": 200, "rows": 50, "shards": 4, "round": 1, "on": "local", "stopped": ""},
    **{"per_s": None, "eta_s": None, "mean_reward": None, "failures": {}, "owing_most": (0, 1)},
}


def status(**changes: Any) -> Status:
    return Status.model_validate({**ZERO, **changes})


HALF = status(ok=98, failed=2, owed=100, shards_done=1, per_s=2.5, eta_s=40.0, mean_reward=0.25, failures={"timeout": 7, "parse": 1})


def test_the_line_says_what_is_known() -> None:
    assert rollouts.line(status()) == "0/200 rollouts (0.0 %) · 0/4 shards"
    assert rollouts.line(HALF) == (
        "100/200 rollouts (50.0 %) · 1/4 shards · 2.5/s, 40 s to go · mean reward 0.250 · 2 failed for good · failures: timeout 7, parse 1"
    )
    assert rollouts.line(status(stopped="too many")).endswith(" · stopped: too many")


def test_the_table_leaves_out_what_is_not_there() -> None:
    text = rollouts.table(status(round=0, on=""))
    assert text.splitlines()[0] == "campaign:   small (no round was launched)"
    assert "records:" not in text
    assert "stopped:" not in text
    text = rollouts.table(HALF.model_copy(update={"torn": 1, "conflicts": 2, "stopped": "too many"}))
    assert "owing most: shard 0, shard 1" in text
    assert "records:    1 torn, 2 contradicting" in text
    assert text.endswith("stopped:    too many")


def test_failures_that_healed_are_said_to_have() -> None:
    healed = status(ok=200, owed=0, failures={"http-5xx": 30})
    assert rollouts.line(healed).endswith("failures: http-5xx 30 (all healed)")
    assert "failures:   http-5xx 30 (all healed)" in rollouts.table(healed)
    assert "healed" not in rollouts.table(status(ok=199, failed=1, owed=0, failures={"http-5xx": 30}))
    assert "failures:   none" in rollouts.table(status())


@pytest.mark.parametrize(
    ("seen_s", "collectors", "text"),
    [
        (None, 0, "0 collectors at work, 1 request open"),
        (1.9, 1, "1 collector at work, 1 request open"),
        (14.4, 2, "2 collectors seen 14 s ago, 1 request open"),
    ],
)
def test_a_collector_that_is_silent_may_be_gone(seen_s: float | None, collectors: int, text: str) -> None:
    assert text in rollouts.table(status(seen_s=seen_s, collectors=collectors, open=1))


def test_rows_that_failed_are_settled_not_complete() -> None:
    assert "rows:       50 of 50 settled" in rollouts.table(status(failed=200, owed=0, rows_done=50))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (3900, "1 h 05 min"), (90000, "25 h 00 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert rollouts.duration(seconds) == text


def test_elsewhere_than_on_a_terminal_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("seatrial.cli.rollouts.time.monotonic", lambda: now)
    progress = rollouts.CampaignProgress()
    for count in range(8):  # every four seconds
        progress.show(status(ok=count, owed=200 - count))
        now += 4.0
    progress.say("a word")
    progress.show(status(ok=200, owed=0))
    progress.close()
    said = [line.removeprefix("seatrial: ").split(" ")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == ["0/200", "3/200", "6/200", "a", "200/200"]


def test_on_a_terminal_one_line_is_rewritten_below_what_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    progress = rollouts.CampaignProgress()
    progress.say("first")
    progress.show(HALF)
    progress.say("second")
    progress.close()
    progress.close()
    text = capsys.readouterr().err
    bar = "seatrial: 100/200 rollouts (50.0 %) · 1"
    assert len(bar) == 39
    assert text == f"seatrial: first\n\r\x1b[K{bar}\r\x1b[Kseatrial: second\n{bar}\n"


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (status(ok=200, owed=0), None, ""),
        (HALF, 99, "100 rollouts are still owed; collect them with: seatrial rollouts resume '/a b'"),
        (status(ok=199, owed=1), 99, "1 rollout is still owed; collect it with: seatrial rollouts resume '/a b'"),
        (status(failed=200, owed=0), 99, "no rollout worked"),
    ],
)
def test_the_end(found: Status, code: int | None, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended = None
    try:
        rollouts.close(found, Path("/a b"))
    except typer.Exit as error:
        ended = error.exit_code
    assert ended == code
    assert said in capsys.readouterr().err
