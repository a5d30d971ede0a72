"""Gym's servers, played by a stand-in: ready, dead, deaf, ended, and nothing left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.rollouts.backends.gym_guard import Guard
from seatrial.rollouts.backends.gym_servers import GymServers, PolicyEndpoint
from seatrial.runtime.process import pid_file
from tests.rollouts.gym_instance import KEY, campaign, fake_installation, hurry

pytestmark = pytest.mark.slow

__all__ = ["hurry"]


def servers(tmp_path: Path, said: list[str] | None = None, **gym: Any) -> GymServers:
    about = campaign("http://h/v1", gym=gym).gym
    assert about is not None
    tell = (lambda _: None) if said is None else said.append
    return GymServers(about, fake_installation(tmp_path / "gym"), PolicyEndpoint(("http://h/v1",), "m", KEY), tmp_path / "logs", tell)


def below() -> set[int]:
    """Our processes, but for a cluster that other tests share, whose daemons come and go."""
    found = psutil.process_iter(["pid", "name"])
    mine = {process.pid for process in psutil.Process().children(recursive=True)}
    return {process.pid for process in found if process.pid in mine and not process.info["name"].startswith(("slurm", "munge", "maria"))}


def test_they_are_ready_and_then_a_death_is_noticed_and_nothing_is_left(tmp_path: Path) -> None:
    before, said = below(), list[str]()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "resources_servers").mkdir()
    found = servers(tmp_path, said, directory=str(tmp_path / "mine"))
    found.start()
    try:
        assert found.agents().keys() == {"mcqa_simple_agent", "other_agent"}
        assert "3 servers are ready" in said[-1]
        assert found.private.root.stat().st_mode & 0o777 == 0o700
        assert (found.private.venvs / "resources_servers" / "mcqa" / ".venv").resolve() == tmp_path / "gym"
        assert (found.private.work / "resources_servers").is_symlink()
        assert found.gone() is None
        os.kill(next(one.pid for one in found.instances if one.name == "mcqa"), signal.SIGKILL)
        stops = time.monotonic() + 60
        while (why := found.gone()) is None and time.monotonic() < stops:
            time.sleep(0.02)
        assert why is not None
        assert "server mcqa died" in why
    finally:
        found.end()
    found.end()
    assert below() <= before
    assert not found.private.root.exists()
    assert not pid_file(found.log).exists()
    assert (tmp_path / "mine" / "resources_servers").is_dir()
    log = found.log.read_text()
    assert "the key is" in log
    assert KEY not in log


def test_one_that_dies_at_its_start_ends_the_wait_with_its_own_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GYM", "dies")
    before, found = below(), servers(tmp_path)
    with pytest.raises(BlockedError, match=r"server mcqa died: .*no module named luck") as caught:
        found.start()
    assert KEY not in caught.value.message
    assert str(found.log) in caught.value.fix
    assert below() <= before
    assert not found.private.root.exists()


def test_one_that_is_deaf_costs_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_GYM", "deaf")
    before = below()
    with pytest.raises(BlockedError, match=r"not ready within .* s: Gym's (mcqa|head): http.*refused"):
        servers(tmp_path, deadline_s=0.3).start()
    assert below() <= before


def test_another_number_of_servers_than_expected_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"starts 3 servers .mcqa, .* says 4"):
        servers(tmp_path, servers=4).start()


def test_a_program_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    found = servers(tmp_path)
    (tmp_path / "gym" / "bin" / "gym").unlink()
    with pytest.raises(BlockedError, match=r"ended with code 2: .*can't open file"):
        found.start()


def test_without_uv_each_server_cannot_have_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BlockedError, match="uv, which is not on PATH") as caught:
        servers(tmp_path, shared_environments=False).start()
    assert "shared_environments" in caught.value.fix


def test_the_guard_removes_what_a_killed_collector_left(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    code = "import sys; from pathlib import Path; from seatrial.rollouts.backends.gym_guard import Guard\n"
    code += "Guard(*map(Path, sys.argv[1:])); sys.stdin.read()"
    words = [sys.executable, "-c", code, str(tmp_path / "none.pids"), str(tmp_path / "private")]
    driver = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        guard = None
        while not guard:
            guard = psutil.Process(driver.pid).children()
            time.sleep(0.02)
    finally:
        driver.kill()
        driver.communicate()
    psutil.wait_procs(guard, 10)
    assert not (tmp_path / "private").exists()


def test_a_guard_that_is_dismissed_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    Guard(tmp_path / "none.pids", tmp_path / "private").dismiss()
    assert (tmp_path / "private").is_dir()
