"""What a user sees of Seatrial and must not change by accident while its inside is rebuilt.

The help of every command, exit codes, lists of faults, and the files that a trial, a probe, a campaign, a bisect and a functional run
leave, with the keys of what they hold. SEATRIAL_UPDATE_GOLDEN=1 writes tests/data/frozen anew; read the diff.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from seatrial.cli import main
from tests.checks.run_facts import clean
from tests.cli.command import inside
from tests.rollouts.served import QUICK, halves, run_in_process, serving, write_rows
from tests.trial.conftest import Bench
from tests.trial.conftest import bench as bench  # a fixture

FROZEN = Path(__file__).parent / "data" / "frozen"
DATA = Path(__file__).parent / "data"
VARYING = re.compile(r"\d{8}T\d{6}Z?|(?<![a-z])[0-9a-f]{7,64}(?![a-z0-9])|\d+")
"""Dates, digests and numbers in the names of files."""
OPEN_ENDED = ("packages", "environment", "gpus", "files", "signals", "digests", "environ")
"""Keys whose children are data."""
DEEPEST = 4


def frozen(name: str, text: str) -> None:
    """Hold a text against the file of that name."""
    file = FROZEN / name
    if os.environ.get("SEATRIAL_UPDATE_GOLDEN") == "1":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), f"{file} differs: if that is meant, SEATRIAL_UPDATE_GOLDEN=1 writes it anew"


def commands(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    """Every command below this one, as words."""
    yield words
    for name in sorted(getattr(command, "commands", {})):
        yield from commands(command.commands[name], *words, name)


class Tree:
    """The whole command, whose parts are imported when they are asked for."""

    def __init__(self, command: Any) -> None:
        self.commands = {name: command.get_command(typer.Context(command), name) for name in main.COMMANDS}


def every_command() -> Iterator[tuple[str, ...]]:
    """As a user may type them."""
    yield from commands(Tree(typer.main.get_command(main.app)))


def outline(directory: Path) -> str:
    """Every file below it by its name, those of JSON with the keys that they hold; what varies from run to run is a star."""
    shown: dict[str, set[str]] = {}
    for file in sorted(directory.rglob("*")):
        if file.is_dir() or file.relative_to(directory).parts[0] == "instruments":  # modules of ours: named by the house, not by users
            continue
        name = VARYING.sub("*", file.relative_to(directory).as_posix())
        shown.setdefault(name, set()).update(keys_of(file))
    return "".join(f"{name}\n" + "".join(f"    {key}\n" for key in sorted(keys)) for name, keys in sorted(shown.items()))


def keys_of(file: Path) -> set[str]:
    """The paths of keys in a file of JSON or of JSON lines."""
    if file.suffix not in (".json", ".jsonl"):
        return set()
    text = file.read_text(encoding="utf-8")
    values = [json.loads(text)] if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    return {key for value in values for key in paths(value)}


def paths(value: Any, *above: str) -> Iterator[str]:
    """Keys with those above them, joined by dots; data that is used as keys is a star."""
    if isinstance(value, list):
        for one in value:
            yield from paths(one, *above)
    elif isinstance(value, dict) and len(above) < DEEPEST:
        for key, inner in value.items():
            data = (above and above[-1] in OPEN_ENDED) or not re.fullmatch(r"[a-z_]+", key)
            place = (*above, "*" if data else key)
            yield ".".join(place)
            yield from paths(inner, *place)


def test_help() -> None:
    texts = []
    for words in every_command():
        answer = inside(*words, "--help", COLUMNS="100", TERMINAL_WIDTH="100", NO_COLOR="1")
        assert answer.code == 0
        texts.append(f"$ seatrial {' '.join((*words, '--help'))}\n{answer.out}")
    frozen("help.txt", "\n".join(texts))


@pytest.mark.parametrize("words", ["run trl", "run verl --device cpu", "probe refit", "probe bridge"])
def test_faults(words: str) -> None:
    answer = inside(*words.split(), "--fault", "list")
    assert answer.code == 0
    frozen(f"faults-{'-'.join(words.split()[:2])}.txt", answer.out)


def test_exit_codes(tmp_path: Path) -> None:
    trl = DATA / "trl" / "made"
    file, script = tmp_path / "file", tmp_path / "exits.sh"
    file.write_text("{")
    script.write_text("exit 3\n")
    calls: dict[str, tuple[str | Path, ...]] = {
        "a run that passed": ("judge", "trl", "--log", DATA / "trl" / "grpo_full" / "console.log"),
        "a run that failed": ("judge", "trl", "--log", trl / "reward_raises" / "console.log"),
        "a run that was blocked": ("judge", "trl", "--log", trl / "unknown_argument" / "console.log"),
        "no command": (),
        "an unknown command": ("walk",),
        "an unknown loop": ("run", "nothing"),
        "an unknown level": ("run", "trl", "--level", "19"),
        "an unknown flag": ("plan", "trl", "--fast"),
        "a change that is not there": ("plan", "trl", "--change", tmp_path / "gone"),
        "a log that is not there": ("judge", "trl", "--log", tmp_path / "gone"),
        "metrics that are torn": ("check", file, 'max(data["loss"]) < 1'),
        "a check that is no check": ("check", DATA / "trl" / "grpo_full", "import os"),
        "a trial that is not there": ("report", tmp_path / "gone"),
        "a directory that is no trial": ("resume", tmp_path),
        "a campaign that is not there": ("rollouts", "status", tmp_path / "gone"),
        "a script that fails": ("functional", "run", script, "--out", tmp_path / "out"),
        "a script that is not there": ("functional", "run", tmp_path / "gone.sh"),
        "a commit that is not there": ("bisect", "--good", "gone", "--bad", "HEAD", "--", "true"),
        "history without a store": ("history", "show", "--store", tmp_path / "gone.db"),
        "a key that is none": ("config", "--set", "run.nothing=1"),
        "an environment that is none": ("env", "build", "nothing"),
        "a skill that is none": ("skill", "show", "nothing"),
        "a job that is not there": ("jobs", "wait", tmp_path / "gone"),
    }
    codes = {what: inside(*words, cwd=tmp_path).code for what, words in calls.items()}
    frozen("exit_codes.txt", "".join(f"{code:3} {what}\n" for what, code in codes.items()))


@pytest.mark.slow
def test_files_of_a_trial(bench: Bench) -> None:
    bench.start(0, 1)
    frozen("trial.txt", outline(bench.out))


@pytest.mark.slow
def test_files_of_a_probe(tmp_path: Path) -> None:
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in clean()))
    assert inside("probe", "refit", "--facts", tmp_path / "facts.jsonl", "--out", tmp_path / "out").code in (0, 1, 99)
    frozen("probe.txt", outline(tmp_path / "out"))


@pytest.mark.slow
def test_files_of_a_campaign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_process(monkeypatch)
    rows = write_rows(tmp_path / "rows.jsonl", halves(3))
    with serving() as stub:
        flags = ("--input", rows, "--url", stub.url, "--verifier", "choice", "--out", "c", "--repeats", "2", "--shards", "2", *QUICK)
        answer = inside("rollouts", "start", *flags, cwd=tmp_path)
    assert answer.code == 0, answer.err
    frozen("campaign.txt", outline(tmp_path / "c"))


@pytest.mark.slow
def test_files_of_a_bisect(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=a@b", *words], cwd=repo, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    for value in ("1", "1 ", "1  ", "2"):
        (repo / "v").write_text(value)
        git("add", "-A")
        git("commit", "-q", "-m", f"v is {value}")
    words = ("--good", "main~3", "--bad", "main", "--env", "none", "--out", tmp_path / "out", "--", "grep", "-q", "1", "v")
    answer = inside("bisect", *words, cwd=repo)
    assert answer.code == 0, answer.err
    for place in ("trees", "stores"):  # the commits themselves
        subprocess.run(["rm", "-rf", tmp_path / "out" / place], check=True)
    frozen("bisect.txt", outline(tmp_path / "out"))


@pytest.mark.slow
def test_files_of_a_functional_run(tmp_path: Path) -> None:
    script = tmp_path / "fun.sh"
    script.write_text('echo step 1 loss 1.0\necho \'{"train/loss": {"1": 1.0}}\' > metrics.json\n')
    answer = inside("functional", "run", script, "--out", tmp_path / "out", "--metrics", "metrics.json", "--steps", "1", cwd=tmp_path)
    assert answer.code in (0, 1, 99), answer.err
    frozen("functional.txt", outline(tmp_path / "out"))
