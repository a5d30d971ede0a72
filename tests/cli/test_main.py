"""The table of commands, exit codes, and errors without a traceback."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import typer.main

import seatrial as package
from seatrial.cli import main
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.verdict import Boundary
from tests.cli.command import SEATRIAL, inside, seatrial

BLOCKED = Path(__file__).parents[1] / "data" / "trl" / "made" / "unknown_argument" / "console.log"


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_of_the_table_can_be_imported(name: str) -> None:
    module = importlib.import_module(f"seatrial.cli.{main.COMMANDS[name][0]}")
    assert hasattr(module, "app") or callable(getattr(module, name))
    assert main.COMMANDS[name][1].endswith((".", "?"))


def exit_code(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Call the entry point in this process."""
    monkeypatch.setattr(sys, "argv", ["seatrial", *words])
    with pytest.raises(SystemExit) as caught:
        main.run()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def commands() -> Iterator[tuple[str, ...]]:
    for name in main.COMMANDS:
        yield (name,)
        app = getattr(importlib.import_module(f"seatrial.cli.{main.COMMANDS[name][0]}"), "app", None)
        if app is not None:
            yield from ((name, inner) for inner in getattr(typer.main.get_command(app), "commands", {}))


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_has_help(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*words, "--help", monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "Usage: " in printed
    assert words[-1] in printed
    assert len(printed.splitlines()) > 5


def test_the_help_lists_every_command_and_imports_none() -> None:
    code = "import sys; sys.argv = ['seatrial', '--help']\nfrom seatrial.cli.main import run\ntry: run()\nexcept SystemExit: pass\n"
    code += "print([name for name in sys.modules if name.startswith('seatrial.')], 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listing, _, modules = done.stdout.rpartition("\n[")
    for name, (_, text) in main.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text.split('.')[0].split(',')[0][:30])}", listing, re.MULTILINE), name
    assert "seatrial.trial" not in modules
    assert modules.strip().endswith("False")


def test_without_a_command_the_help_is_shown() -> None:
    answer = seatrial()
    assert "Usage: seatrial" in answer.out + answer.err
    assert answer.code == 2


def test_the_version_is_printed() -> None:
    assert seatrial("--version").out == f"seatrial {package.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [("nope",), ("run", "--nope"), ("judge",), ("judge", "trl"), ("plan", "a", "b"), ("judge", "trl", "--log", "x", "--expect-steps", "0")],
    ids=" ".join,
)
def test_wrong_usage_is_2_without_a_traceback(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*words, monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err
    assert "Error" in said or "seatrial: " in said
    assert "Traceback" not in said


def test_a_user_error_is_2_with_its_fix_and_no_traceback() -> None:
    answer = seatrial("plan", "tlr")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "seatrial: unknown loop 'tlr'; known: nemo-rl, trl, verl\n  fix: use 'trl'\n"


def test_a_broken_configuration_is_2(tmp_path: Path) -> None:
    (tmp_path / "seatrial.toml").write_text("[run\n")
    answer = seatrial("config", "show", cwd=tmp_path)
    assert answer.code == 2
    assert str(tmp_path / "seatrial.toml") in answer.err
    assert "Traceback" not in answer.err
    answer = seatrial("plan", "--config", tmp_path / "none.toml", cwd=tmp_path)
    assert (answer.code, "no such configuration file" in answer.err) == (2, True)


ERRORS: list[tuple[BaseException, int, str, bool]] = [
    (UserError("a.toml: wrong", "correct it"), 2, "seatrial: a.toml: wrong\n  fix: correct it\n", False),
    (UserError("a.toml: wrong"), 2, "seatrial: a.toml: wrong\n", False),
    (BlockedError(Boundary.DATA, "no data", "get it"), 99, "seatrial: Blocked (data): no data\n  fix: get it\n", False),
    (KeyboardInterrupt(), 130, "", False),
    (ZeroDivisionError("oops"), 3, "seatrial: internal error: oops\n", True),
    (AssertionError(), 3, "seatrial: internal error: ", True),
    (OSError(5, "Input/output error"), 3, "seatrial: internal error: [Errno 5]", True),
]


@pytest.mark.parametrize(("error", "code", "message", "traceback"), ERRORS, ids=lambda item: type(item).__name__)
def test_each_kind_of_error_has_its_exit_code(
    error: BaseException,
    code: int,
    message: str,
    traceback: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr("seatrial.cli.request.load_config", fail)
    assert exit_code("plan", monkeypatch=monkeypatch) == code
    said = capsys.readouterr().err
    assert message in said
    assert ("Traceback" in said) == traceback


@pytest.mark.parametrize(("words", "code"), [(("config", "show"), 0), (("judge", "trl", "--log", str(BLOCKED)), 99)])
def test_a_reader_that_went_away_does_not_change_the_exit_code(words: tuple[str, ...], code: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([SEATRIAL, *words], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert done.returncode == code
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("words", "ours", "theirs"),
    [
        (["run", "--level", "0", "--", "--max_steps", "3"], ["run", "--level", "0"], ("--max_steps", "3")),
        (["plan", "--", "--", "x"], ["plan"], ("--", "x")),
        (["run", "--"], ["run"], ()),
        (["run"], ["run"], ()),
        (["check", "--", "x"], ["check", "--", "x"], ()),
        ([], [], ()),
    ],
)
def test_what_stands_behind_two_dashes_is_not_read(words: list[str], ours: list[str], theirs: tuple[str, ...]) -> None:
    assert main.split_arguments(words) == (ours, theirs)


def test_arguments_of_the_loop_reach_the_plan() -> None:
    answer = seatrial("plan", "trl", "--level", "0", "--json", "--", "--help", "--level", "9")
    assert answer.code == 0, answer.err
    assert '"--help",\n    "--level",\n    "9"' in answer.out


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        (("judge",), "judge: Missing argument 'loop'", "give LOOP (The loop that wrote the files); seatrial judge --help"),
        (("judge", "trl"), "judge: Missing option '--log'", "give --log (The log of the run); seatrial judge --help"),
        (("metrics", "show"), "metrics: show: Missing argument 'logdir'", "give LOGDIR ("),
        (("metrics", "foo"), "metrics: No such command 'foo'", "commands: dump, show"),
        (("dokter",), "No such command 'dokter'", "seatrial doctor; seatrial --help"),
        (("plan", "--nope"), "plan: No such option: --nope", "seatrial plan --help"),
        (("--nope",), "No such option: --nope", "seatrial --help"),
        (("run", "--level"), "run: Option '--level' requires an argument", "seatrial run --help"),
        (("judge", "trl", "--log", "x", "--level", "y"), "judge: Invalid value for '--level'", "give --level (Judge against"),
        (("judge", "trl", "--log", "."), ".: a directory, not a log file", "name the file"),
        (("judge", "nope", "--log", "x"), "unknown loop 'nope'; known: nemo-rl, trl, verl", "use a known one"),
    ],
)
def test_wrong_usage_says_what_where_and_the_fix(words: tuple[str, ...], message: str, fix: str) -> None:
    answer = inside(*words)
    assert (answer.code, answer.out) == (2, "")
    said, help_ = answer.err.splitlines()
    assert said.startswith(f"seatrial: {message}")
    assert help_.startswith(f"  fix: {fix}")
