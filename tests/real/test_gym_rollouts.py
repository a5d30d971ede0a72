"""Real NeMo Gym: its servers with a resources server that needs no GPU, and a stub as the policy.

Without the environment these tests fail: a skip would look like success in the one place where the real Gym is driven.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from seatrial.rollouts.backends.gym_backend import GymBackend, collect_with_gym
from seatrial.rollouts.backends.gym_install import GYM_LOCK
from seatrial.rollouts.rollout_record import FailureKind, RolloutError, RolloutOutcome, ServersGoneError, Unit
from seatrial.runtime.environments import Environments
from tests.rollouts import gym_instance
from tests.rollouts.gym_instance import KEY, Loop, campaign, unit
from tests.rollouts.stub import Stub

pytestmark = pytest.mark.real

POISON = "[[status=500]]"


@pytest.fixture(scope="module")
def python() -> str:
    found = Environments().find("gym", GYM_LOCK)
    if found is None:
        pytest.fail("the environment gym is not built: run `seatrial env build gym` first", pytrace=False)
    return str(found.python)


class Running:
    """The stub, and one instance of Gym."""

    def __init__(self, python: str, logs: Path) -> None:
        self._others = {process.pid for process in psutil.Process().children(recursive=True)}
        """Of other tests, such as a cluster that several of them share."""
        self.loop, self.stub, self._python = Loop(), Stub(key=KEY), python
        self.loop(self.stub.start())
        self.backend = self.another(logs)
        self.loop(self.backend.open())

    def another(self, logs: Path) -> GymBackend:
        about = campaign(self.stub.url, gym={"python": self._python}, sampling={"temperature": 0.7})
        return GymBackend(about, [self.stub.url], KEY, logs, agents=(gym_instance.AGENT,))

    def roll(self, units: Sequence[Unit]) -> list[RolloutOutcome | BaseException]:
        async def all_of_them() -> list[RolloutOutcome | BaseException]:
            return await asyncio.gather(*(self.backend.roll(one) for one in units), return_exceptions=True)

        return self.loop(all_of_them())

    def processes(self) -> list[psutil.Process]:
        """What was started since, and lives."""
        found = psutil.Process().children(recursive=True)
        return [process for process in found if process.pid not in self._others and process.status() != psutil.STATUS_ZOMBIE]

    def close(self) -> None:
        self.loop(self.backend.close())
        self.loop(self.stub.die())
        self.loop.close()


@pytest.fixture(scope="module")
def running(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    found = Running(python, tmp_path_factory.mktemp("attempt"))
    yield found
    below = found.processes()
    found.close()
    assert alive(below) == []
    assert not found.backend.gone()


def test_a_poisoned_prompt_costs_its_own_rollouts(running: Running) -> None:
    found = running.roll([unit(number, POISON if number // 2 == 7 else "", repeats=2) for number in range(80)])
    failed = {number: outcome for number, outcome in enumerate(found) if not isinstance(outcome, RolloutOutcome)}
    assert failed.keys() == {14, 15}
    for error in failed.values():
        assert isinstance(error, RolloutError)
        assert (error.kind, error.heals) == (FailureKind.HTTP_5XX, True)
        assert "VLLMModel___policy_model" in str(error)
    rewards = [outcome.reward for outcome in found if isinstance(outcome, RolloutOutcome)]
    assert {0.0, 1.0} == set(rewards)
    first = found[0]
    assert isinstance(first, RolloutOutcome)
    assert (first.turns, first.finish, first.answer in ("A", "B", "C", "D")) == (1, "stop", True)
    assert first.output_tokens


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none of one that has just ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_the_key_is_on_no_command_line_and_in_no_log_and_everything_listens_on_loopback(running: Running) -> None:
    servers = running.backend.servers
    tree = running.processes()
    lines = [" ".join(words_of(process)) for process in tree]
    assert sum("NEMO_GYM_CONFIG_DICT" in line for line in lines) == 3
    assert not any(KEY in line for line in lines)
    assert KEY not in servers.log.read_text()
    where = {
        one.laddr.ip.removeprefix("::ffff:")
        for process in tree
        for one in process.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
    assert where <= {"127.0.0.1", "::1"}


def test_rows_are_those_that_gyms_own_collector_writes(running: Running, tmp_path: Path) -> None:
    units = [unit(number, repeats=2) for number in range(8)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(unit(number).row.data) + "\n" for number in range(4)))
    servers = running.backend.servers
    words = [*servers.installation.command(servers.installation.generation.collect), f"+agent_name={gym_instance.AGENT}"]
    words += [f"+input_jsonl_fpath={tmp_path}/in.jsonl", f"+output_jsonl_fpath={tmp_path}/out.jsonl", "+num_repeats=2"]
    words += ["+num_repeats_add_seed=true", "+responses_create_params.temperature=0.7", "+disable_aggregation=true"]
    words += ["+head_server.host=127.0.0.1", f"+head_server.port={servers.ports.head}"]
    done = subprocess.run(words, env=dict(servers.environment), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    ours = [outcome.row for outcome in running.roll(units) if isinstance(outcome, RolloutOutcome)]
    assert [canonical(row) for row in by_key(ours)] == [canonical(row) for row in by_key(theirs)]
    assert [list(row) for row in by_key(ours)] == [list(row) for row in by_key(theirs)]


def by_key(rows: Sequence[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: (row["_ng_task_index"], row["_ng_rollout_index"]))


def canonical(row: Any) -> str:
    """A row without what Gym draws at random for each response."""
    response = {**row["response"], "id": "", "created_at": 0}
    response["output"] = [{**item, "id": ""} for item in response["output"]]
    return json.dumps({**row, "response": response}, sort_keys=True)


def test_the_seam_gives_the_same_rows_and_finds_the_poisoned_one(running: Running, tmp_path: Path) -> None:
    units = [unit(number, POISON if number == 2 else "") for number in range(6)]

    async def collect() -> dict[int, RolloutOutcome | RolloutError]:
        return {one.number: done async for one, done in collect_with_gym(running.backend, units, tmp_path)}

    found = running.loop(collect(), 90)
    assert found.keys() == set(range(6))
    failed = found.pop(2)
    assert isinstance(failed, RolloutError)
    assert "500" in str(failed)
    ours = running.roll([one for one in units if one.number != 2])
    for one, direct in zip(sorted(found), ours, strict=True):
        seam = found[one]
        assert isinstance(seam, RolloutOutcome)
        assert isinstance(direct, RolloutOutcome)
        assert canonical(seam.row) == canonical(direct.row)


def test_two_instances_at_once_and_a_killed_server_is_noticed(running: Running, tmp_path: Path) -> None:
    second = running.another(tmp_path)

    async def both() -> str:
        await second.open()
        outcomes = await asyncio.gather(running.backend.roll(unit(1)), second.roll(unit(1)))
        assert canonical(outcomes[0].row) == canonical(outcomes[1].row)
        hanging = asyncio.create_task(second.roll(unit(2, "[[hang]]")))
        await asyncio.sleep(0.5)
        shell = psutil.Process(next(one.pid for one in second.servers.instances if one.name == "mcqa"))
        began = time.monotonic()
        next(one for one in shell.children(recursive=True) if "app.py" in words_of(one)).kill()
        with pytest.raises(ServersGoneError, match="server mcqa died"):
            await hanging
        assert time.monotonic() - began < 20, "Gym itself looks every 60 s"
        private = str(second.servers.private.root)
        await second.close()
        return private

    private = running.loop(both())
    assert not Path(private).exists()
    assert isinstance(running.roll([unit(3)])[0], RolloutOutcome)


def test_kill_9_of_the_driver_leaves_nothing(python: str, running: Running, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.rollouts.gym_instance", python, running.stub.url, str(tmp_path)]
    where = {**os.environ, "PYTHONPATH": str(Path(gym_instance.__file__).parents[2]), "TMPDIR": "/tmp"}
    driver = subprocess.Popen(words, env=where, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "ready\n"
        below = psutil.Process(driver.pid).children(recursive=True)
        private = next(word for one in below for word in words_of(one) if "st-gym-" in word and "=" not in word)
    finally:
        driver.kill()
        driver.communicate()
    assert len(below) > 8
    stops = time.monotonic() + 60
    while (left := alive(below)) and time.monotonic() < stops:
        time.sleep(0.1)
    assert left == []
    assert not Path(private).exists()


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; one that nobody has collected yet does not."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if process.is_running() and process.status() != psutil.STATUS_ZOMBIE else []
    return found
