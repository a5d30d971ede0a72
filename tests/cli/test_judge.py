"""`seatrial judge`: exit codes, text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import inside, seatrial

DATA = Path(__file__).parents[1] / "data" / "trl"
FULL = DATA / "grpo_full" / "console.log"
MADE = DATA / "made"


@pytest.mark.parametrize(
    ("log", "options", "code"),
    [
        (FULL, (), 0),
        (FULL, ("--expect-steps", "21"), 1),
        (FULL, ("--level", "6"), 99),
        (MADE / "reward_raises" / "console.log", (), 1),
        (MADE / "unknown_argument" / "console.log", (), 99),
    ],
)
def test_the_exit_code_is_the_verdict(log: Path, options: tuple[str, ...], code: int) -> None:
    answer = inside("judge", "trl", "--log", log, *options, "--json")
    assert answer.code == code, answer.err
    verdict = json.loads(answer.out)["verdict"]
    assert verdict == {0: "Pass", 1: "Fail", 99: "Blocked"}[code]


def test_people_read_where_and_why() -> None:
    answer = seatrial("judge", "trl", "--log", MADE / "ranks_raise" / "console.log")
    assert answer.code == 1
    rows = dict(line.split(":", 1) for line in answer.out.splitlines() if ":" in line and not line.startswith(" "))
    assert rows["verdict"].strip() == "Fail"
    assert rows["boundary"].strip() == "reward"
    assert rows["decisive"].strip() == f"{MADE / 'ranks_raise' / 'console.log'}:43"
    assert rows["steps"].strip() == "2 of 6"
    assert rows["milestone"].strip() == "first step"
    assert "reward function raised" in rows["advice"]


def test_a_log_with_metrics_from_several_places() -> None:
    state, events = FULL.with_name("trainer_state.json"), FULL.parent / "runs"
    answer = inside("judge", "trl", "--log", FULL, "--metrics", state, "--metrics", events, "--json")
    assert (answer.code, json.loads(answer.out)["steps_expected"]) == (0, 20)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("trl", "--log", "/no/such.log"), "/no/such.log: no such log file"),
        (("trl", "--log", str(DATA)), "a directory, not a log file"),
        (("tlr", "--log", str(FULL)), "unknown loop 'tlr'"),
        (("trl", "--log", str(FULL), "--log", str(FULL)), "--log is given 2 times"),
        (("trl", "--log", str(FULL), "--metrics", "/none"), "/none: no such file or directory"),
        (("trl", "--log", str(FULL), "--metrics", str(FULL)), "the file holds no metrics"),
        (("trl", "--log", str(FULL), "--level", "9"), "unknown level 9"),
        (("trl", "--log", str(FULL), "--level", "-1"), "is not a level"),
        (("trl", "--log", str(FULL), "--expect-steps", "many"), "--expect-steps"),
    ],
)
def test_wrong_input_is_2(words: tuple[str, ...], message: str) -> None:
    answer = inside("judge", *words)
    assert answer.code == 2
    assert message in answer.err
    assert "Traceback" not in answer.err
    assert answer.out == ""
