"""Text from a log reaches the terminal as text: no control sequence, no markup of rich, no way round."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

import pytest
import typer
from rich.console import Console

from seatrial.cli import display, main
from seatrial.cli.judge import print_table
from seatrial.core.records import CheckResult
from seatrial.core.verdict import Boundary
from seatrial.trial.progress import SideRunning, Stage
from tests.cli.command import inside

EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e[red]x[/red] [/] [link=http://evil]y"
CONTROL = ("\x1b", "\x07", "\x9b", "\u202e")


def printed(act: Callable[[], object]) -> str:
    """What comes out where `run` has made standard output."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(cast(TextIO, main.Output(stream))):
        act()
    return stream.getvalue()


def test_text_cannot_steer_the_terminal() -> None:
    said = printed(lambda: typer.echo(f"a\tb {EVIL}"))
    assert not any(letter in said for letter in CONTROL)
    assert said.startswith("a\tb ")
    assert "\\x1b]0;title\\x07\\u009b31m\\u202e[red]x[/red] [/] " in said
    assert said.endswith("\n")


def test_json_stays_json() -> None:
    assert json.loads(printed(lambda: typer.echo(json.dumps({"text": EVIL}, ensure_ascii=False)))) == {"text": EVIL}


def test_there_is_no_way_round() -> None:
    assert not hasattr(main.Output(sys.__stdout__ or io.StringIO()), "buffer")
    said = printed(lambda: Console(force_terminal=True, color_system="standard").print("[red]x"))
    assert "\x1b[31m" in said  # our own colours stay


def test_tables_show_text() -> None:
    check = CheckResult(name=EVIL, passed=False, message=EVIL, value=EVIL, boundary=Boundary.METRICS)
    said = printed(lambda: print_table([check], title=EVIL))
    assert not any(letter in said for letter in CONTROL)
    assert "[/]" in said


@pytest.mark.parametrize("event", [Stage(name=EVIL, detail=EVIL), SideRunning(name=EVIL, line=EVIL, seconds=1.0)])
@pytest.mark.parametrize("live", [True, False])
def test_progress_shows_text(monkeypatch: pytest.MonkeyPatch, event: Any, live: bool) -> None:
    make: Callable[..., Console] = Console
    monkeypatch.setattr(display, "Console", lambda **words: make(**words, force_terminal=live, no_color=True, width=400))

    def show() -> None:
        shown = display.Text()
        shown(event)
        if shown.status is not None:
            shown.status.stop()

    said = printed(show)
    assert not any(letter in said for letter in ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\u202e"))
    assert "[/]" in said


def test_an_error_shows_what_it_names(tmp_path: Path) -> None:
    answer = inside("plan", "trl", "--auto", "--change", tmp_path / EVIL.replace("/", "_"))
    assert answer.code == 2
    assert not any(letter in answer.out + answer.err for letter in CONTROL)


@pytest.mark.parametrize("text", ["::error::x", "  ::set-output name=a::b", "a\n::stop-commands::x", "x ##[add-mask]y"])
def test_recorded_text_is_no_workflow_command(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for here, active in (("true", False), ("", True)):
        monkeypatch.setenv("GITHUB_ACTIONS", here)
        said = printed(lambda: typer.echo(text)) + printed(lambda: Console(width=200).print(text, markup=False))
        assert bool(re.search(r"(?m)^\s*::|##\[", said)) is active
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert json.loads(printed(lambda: typer.echo(json.dumps({"a": text, "b": "::c", "d": ["::"]}, indent=1))))["a"] == text
    stream = io.StringIO()
    main.Output(stream).command("::error title=a::ours\n")
    assert stream.getvalue() == "::error title=a::ours\n"


FORGED = "a\nverdict:   Pass\r\n::error::x\n  ok      fine"


@pytest.fixture
def forged(tmp_path: Path) -> Path:
    """Metrics with a name that has lines of its own, and a log that is nothing but them."""
    rows = [{"step": step, "loss": 0.5 - step / 100, FORGED + EVIL: float("nan") if step == 3 else 1.0} for step in range(1, 9)]
    file = tmp_path / "run" / "metrics.jsonl"
    file.parent.mkdir()
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


LABELS = ("verdict:", "boundary:", "reason:", "decisive:", " " * 11, "steps:", "milestone:", "checks:", "missed:", "advice:", "note:")


@pytest.mark.parametrize("loop", ["trl", "verl", "nemo-rl"])
def test_a_name_with_newlines_forges_no_line(forged: Path, tmp_path: Path, loop: str) -> None:
    judged = inside("judge", loop, "--log", forged, "--metrics", forged)
    assert judged.code in (1, 99)
    lines = judged.out.splitlines()
    assert all(line.startswith(LABELS) for line in lines)
    assert [line.partition(":")[0] for line in lines].count("verdict") == 1
    assert not [letter for letter in CONTROL if letter in judged.out]


def test_tables_of_metrics_have_one_line_for_each(forged: Path, tmp_path: Path) -> None:
    shown = inside("metrics", "show", forged)
    assert len([line for line in shown.out.splitlines() if line.startswith("│")]) == 2
    store = tmp_path / "history"
    assert inside("history", "import", forged.parent, "--store", store).code == 0
    for words in (("show", "*"), ("trend", "*"), ("calibrate", "*"), ("runs",)):
        said = inside("history", *words, "--store", store)
        assert not [line for line in said.out.splitlines() if line.startswith(("verdict:", "::", "  ok "))], words
        assert not [letter for letter in CONTROL if letter in said.out]
