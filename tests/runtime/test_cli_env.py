"""`seatrial env`: output for people and programs, and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from seatrial.cli.env import app
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.verdict import ExitCode
from tests.runtime.wheels import only_local


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    only_local(tmp_path / "wheels", monkeypatch)
    path = tmp_path / "environment.lock"
    path.write_text(f"# python: {sys.version_info.major}.{sys.version_info.minor}\n")
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "cache"))

    monkeypatch.setattr("seatrial.loops.environments", lambda: {"loop": path})
    return path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=True)


def test_from_nothing_to_removed(lock: Path, tmp_path: Path) -> None:
    absent = call("check", "loop")
    assert absent.exit_code == ExitCode.BLOCKED
    assert "environment exists\tnot ok" in absent.stdout
    assert "fix: seatrial env build loop\n" in absent.stdout

    built = call("build", "loop")
    assert built.exit_code == 0
    assert built.stdout.startswith(f"loop: ready: {tmp_path}/cache/envs/loop-")
    assert built.stderr == "loop: creating\n"

    again = call("build", "loop", "--json")
    assert again.stderr == ""
    environment = json.loads(again.stdout)
    assert environment["name"] == "loop"
    assert Path(environment["python"]).exists()

    good = call("check", "loop", "--json")
    assert good.exit_code == 0
    assert all(finding["ok"] for finding in json.loads(good.stdout))

    assert call("list").stdout.startswith(f"loop\tenv\t{environment['hash'][:12]}\tcomplete\t")
    (entry,) = json.loads(call("list", "--json").stdout)
    assert entry["complete"] is True
    assert entry["path"] == environment["path"]

    assert call("remove", "loop").stdout == f"removed {environment['path']}\n"
    assert json.loads(call("list", "--json").stdout) == []


def test_errors_reach_the_command_line(lock: Path) -> None:
    for arguments in (("build", "other"), ("check", "other"), ("remove", "other")):
        assert isinstance(call(*arguments).exception, UserError)
    lock.write_text("# python: 3.99\n")
    assert isinstance(call("build", "loop").exception, BlockedError)


def test_empty_cache_says_where_it_looked(lock: Path, tmp_path: Path) -> None:
    listed = call("list")
    assert (listed.exit_code, listed.stdout) == (0, "")
    assert listed.stderr == f"{tmp_path}/cache: no environments\n"
