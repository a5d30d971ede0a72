"""Advice for every boundary is concrete, and every command that it names parses and is not refused there."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from seatrial import loops
from seatrial.cli.bisect import check_trial
from seatrial.core.verdict import Boundary, Verdict
from seatrial.loops import get_loop
from seatrial.triage.advice import ADVICE, PROOFS, Situation, advise, proving_level
from seatrial.trial.files_judge import judge_files
from tests.cli.mentions import problems

LOOPS = loops.names()
FILES = Situation(Boundary.METRICS, Verdict.FAIL, "trl")
EMPTY = re.compile(r"checks\.json|see the log\b|find the cause")


def commands(situation: Situation) -> list[str]:
    return [code for text in advise(situation) for code in re.findall(r"`(seatrial [^`]+)`", text)]


def situation(loop: str, boundary: Boundary, verdict: Verdict = Verdict.FAIL, **known: Any) -> Situation:
    return replace(Situation(boundary, verdict, loop, get_loop(loop).levels()), **known)


RUN: dict[str, Any] = {
    "run": "trials/20261115-010203-x",
    "level": 0,
    "changes": ("bridge=/work/bridge",),
    "model": "/m",
    "arguments": ("--lr", "1e-3"),
}
CONTEXTS: dict[str, dict[str, Any]] = {
    "files": {},
    "files without metrics": {"measured": False},
    "run": RUN,
    "run without a change": {**RUN, "changes": ()},
    "run beside its base": {**RUN, "compared": True},
    "run with a fault": {**RUN, "fault": "frozen-optimizer", "isolable": True, "tokens": True},
    "run with reruns": {**RUN, "isolable": True, "tokens": True, "facts": "trials/x/levels/2-refit"},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_every_boundary_has_a_next_step_that_parses(loop: str) -> None:
    advised: set[str] = set()
    for boundary, context, verdict in product(Boundary, CONTEXTS, (Verdict.FAIL, Verdict.BLOCKED)):
        asked = situation(loop, boundary, verdict, **CONTEXTS[context])
        said = advise(asked)
        assert said, asked
        assert not [text for text in said if EMPTY.search(text) or "{" in text.replace("{tree}", "")]
        assert commands(asked) or verdict is Verdict.BLOCKED or context == "run without a change", asked
        advised |= set(commands(asked))
    assert problems("```\n" + "\n".join(sorted(advised)) + "\n```") == []


@pytest.mark.parametrize("boundary", Boundary)
def test_a_command_that_would_be_refused_is_not_advised(boundary: Boundary) -> None:
    for name, known in CONTEXTS.items():
        found = commands(situation("trl", boundary, **known))
        named = {command.split()[1] for command in found}
        if "run" not in known:
            assert not named & {"isolate", "localize", "resume", "report"}, "there is no run directory"
        if "fault" in known:
            assert not named & {"isolate", "localize", "bisect"}, name
            assert not any("--baseline" in command for command in found)
        if known.get("changes") == ():
            assert "bisect" not in named
            assert not any("--baseline" in command for command in found), "a revision needs a change"
        if not known.get("isolable"):
            assert "isolate" not in named
        if not known.get("tokens"):
            assert "localize" not in named
        if not known.get("facts"):
            assert not any("--facts" in command for command in found)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_words_of_a_bisect_are_those_of_a_trial(loop: str, tmp_path: Path) -> None:
    for command in commands(situation(loop, Boundary.OPTIMIZER, **RUN)):
        if " bisect " in command:
            check_trial(command.partition(" -- ")[2].split(), tmp_path)
            assert "--repo /work/bridge" in command
            break
    else:
        pytest.fail("no bisect is advised")


def test_nothing_is_advised_about_a_pass() -> None:
    assert advise(replace(FILES, verdict=Verdict.PASS)) == ()


@pytest.mark.parametrize("loop", LOOPS)
def test_the_level_that_proves_a_boundary_exists(loop: str) -> None:
    levels = {level.number: level.name for level in get_loop(loop).levels()}
    for boundary in Boundary:
        assert levels[proving_level(boundary, get_loop(loop).levels())] in (*PROOFS.get(boundary, ()), "smoke")
    assert set(ADVICE) == set(Boundary)


@pytest.mark.parametrize(("loop", "name"), [("trl", "reward_constant"), ("trl", "no_checkpoint"), ("trl", "stopped_bar")])
def test_a_verdict_on_files_names_a_command(loop: str, name: str) -> None:
    log = Path(__file__).parents[1] / "data" / loop / "made" / name / "console.log"
    found = judge_files(get_loop(loop), log, [], None, None)
    assert "`seatrial " in found.advice
    assert problems(found.advice) == []
    assert "isolate" not in found.advice
