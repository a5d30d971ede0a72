"""seatrial.toml, --set and flags: who wins, who is named in an error, and what `config show` prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from seatrial import config
from seatrial.cli.config import app
from seatrial.model.errors import UserError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / config.FILE
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message", "fix"),
    [
        ("[rnu]\nlevels = '0'", r"seatrial\.toml: unknown section \[rnu\]", r"did you mean \[run\]\?"),
        ("[rnu]", r"seatrial\.toml: unknown section \[rnu\]", r"did you mean \[run\]\?"),
        ("[qqqq]", "unknown section", "known sections: run, change, environment, limits"),
        ("[run]\nlevel = '0'", r"seatrial\.toml: unknown key 'run\.level'", r"did you mean run\.levels\?"),
        ("[limits]\ndeadline = 3", "unknown key", r"did you mean limits\.deadline_minutes\?"),
        ("[run]\nqqqqqqqqqqqq = 1", "unknown key", r"known keys: run\.loop, "),
        ("loop = 'x'", "values stand in sections", r"write \[run\]"),
        ("[run]\nlevels = 0", r"seatrial\.toml: run\.levels: Input should be a valid string \(got 0\)", r"correct run\.levels"),
        ("[change]\npaths = 'a'", r"change\.paths: Input should be a valid list", r"correct change\.paths"),
        ("[change]\npaths = ['a', 1]", r"change\.paths: Input should be a valid string", "correct"),
        ("[limits]\nstall_minutes = 'soon'", r"limits\.stall_minutes: .*valid number.*\(got 'soon'\)", "correct"),
        ("[limits]\nstall_minutes = 0", r"limits\.stall_minutes: .*greater than 0", "correct"),
        ("[limits]\nstall_minutes = nan", r"limits\.stall_minutes: ", "correct"),
        ("[run\nloop = 1", r"seatrial\.toml: .*line 1", "correct the file"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, message: str, fix: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        config.load(write(tmp_path, text))
    assert re.search(fix, caught.value.fix)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / config.FILE
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"seatrial\.toml"):
        config.load(path)


def test_later_sources_win_and_each_value_knows_its_origin(tmp_path: Path) -> None:
    file = write(tmp_path, "[run]\nlevels = '1'\nmodel = 'from file'\ntrials = 'x'\n")
    loaded = config.load(file, ["run.levels=2", "run.model=from set"], {"run.levels": "3", "run.loop": None})
    assert loaded.config.run.levels == "3"
    assert loaded.config.run.model == "from set"
    assert loaded.config.run.trials == "x"
    origins = {key: origin for key, _, origin, _ in loaded.rows()}
    assert origins["run.levels"] == "command line"
    assert origins["run.model"] == "--set"
    assert origins["run.trials"] == str(file)
    assert origins["run.loop"] == origins["limits.stall_minutes"] == "default"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("run.arguments=--lr 1", ["--lr", "1"]),
        ('run.arguments=["--lr", "a b"]', ["--lr", "a b"]),
        ("run.arguments=[]", []),
        ("run.arguments=", []),
    ],
)
def test_a_list_is_set_as_words_or_as_toml(setting: str, expected: list[str]) -> None:
    assert config.load(None, [setting]).config.run.arguments == expected


def test_a_scalar_is_set_as_it_stands() -> None:
    loaded = config.load(None, ["limits.deadline_minutes=2.5", "run.levels=0,1=x", " run.model =a b"])
    assert loaded.config.limits.deadline_minutes == 2.5
    assert loaded.config.run.levels == "0,1=x"
    assert loaded.config.run.model == "a b"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("run.levels", r"no '=' in it"),
        ("run.lvels=1", r"--set: unknown key 'run\.lvels'"),
        ("levels=1", "unknown key 'levels'"),
        ("run=1", "unknown key 'run'"),
        ("run.arguments=[1", r"--set run\.arguments: "),
        ("limits.stall_minutes=x", r"--set: limits\.stall_minutes: "),
        ("limits.stall_minutes=-1", r"--set: limits\.stall_minutes: .*greater than 0"),
    ],
)
def test_a_mistake_in_a_setting_is_named(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config.load(None, [setting])


def test_the_nearest_file_above_counts(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert config.find_file(deep) in (None, Path("/seatrial.toml"))
    outer = write(tmp_path, "")
    assert config.find_file(deep) == outer
    inner = write(tmp_path / "a", "")
    assert config.find_file(deep) == inner


def test_every_key_has_a_meaning() -> None:
    assert all(config.known_keys().values())
    assert "run.loop" in config.known_keys()


def test_show_prints_every_key_with_value_and_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "[run]\nlevels = '0-2'\n")
    printed = CliRunner().invoke(app, ["show", "--set", "limits.stall_minutes=3"])
    assert printed.exit_code == 0, printed.output
    rows = {line.split()[0]: line for line in printed.output.splitlines()}
    assert set(rows) == set(config.known_keys())
    assert "'0-2'" in rows["run.levels"]
    assert str(tmp_path / "seatrial.toml") in rows["run.levels"]
    assert "3.0" in rows["limits.stall_minutes"]
    assert "--set" in rows["limits.stall_minutes"]
    assert "default" in rows["run.loop"]


def test_show_prints_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(app, ["show", "--json", "--set", 'change.paths=["/a b"]'])
    shown = json.loads(printed.output)
    assert shown["change.paths"] == {"value": ["/a b"], "origin": "--set"}
    assert set(shown) == set(config.known_keys())
