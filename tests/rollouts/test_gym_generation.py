"""Both generations of Gym: which one is found, what it is told, what is refused, and that the older one is driven like the newer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.backends import gym_install
from seatrial.rollouts.backends.gym_backend import GymBackend, collect_with_gym
from seatrial.rollouts.backends.gym_install import Generation, find_generation
from seatrial.rollouts.backends.gym_servers import Block, PolicyEndpoint, Private, collect_words, start_words
from seatrial.rollouts.campaign import Gym
from seatrial.rollouts.rollout_record import RolloutError, RolloutOutcome
from tests.rollouts.gym_instance import KEY, NEWER, OLDER, Loop, campaign, fake_installation, hurry, unit
from tests.rollouts.stub import Stub

pytestmark = pytest.mark.slow

__all__ = ["hurry"]

BETWEEN = Generation("0.3.9", modern=False)
"""As 0.3: the older programs, and a collector that can be used."""
SEAM = "resume_from_cache: bool\ndisable_aggregation: bool\n_failures.jsonl"


def about(**gym: Any) -> Gym:
    found = campaign("http://h/v1", gym=gym).gym
    assert found is not None
    return found


def programs(root: Path, *names: str, **code: str) -> Path:
    """An interpreter that says where its nemo_gym is, the programs beside it, and that package's code."""
    (root / "bin").mkdir(parents=True)
    (root / "nemo_gym").mkdir()
    python = root / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho \'["{root}", "/base", "{root}/nemo_gym/__init__.py", "0.3.1rc0"]\'\n')
    python.chmod(0o755)
    for name in names:
        (root / "bin" / name).touch()
    for name, text in code.items():
        (root / "nemo_gym" / f"{name}.py").write_text(text)
    return python


def test_gym_is_taken_where_it_is_though_the_older_programs_are_there_too(tmp_path: Path) -> None:
    found = gym_install.find_gym(about(python=str(programs(tmp_path, "gym", "ng_run"))))
    assert found.generation == Generation("0.3.1rc0")
    assert (found.root, found.prefix) == (tmp_path, tmp_path)
    assert str(found.generation) == "NeMo Gym 0.3.1rc0, gym env start"


@pytest.mark.parametrize(
    ("collector", "servers", "lacks", "liveness"),
    [
        (SEAM, "def setup_liveness(self", (), True),
        ("resume_from_cache", "", ("disable_aggregation", "_failures.jsonl"), False),
        ("", "", ("resume_from_cache", "disable_aggregation", "_failures.jsonl"), False),
    ],
)
def test_what_an_older_one_lacks_is_read_in_its_code(
    tmp_path: Path, collector: str, servers: str, lacks: tuple[str, ...], liveness: bool
) -> None:
    python = programs(tmp_path, "ng_run", "ng_collect_rollouts", rollout_collection=collector, server_utils=servers)
    found = gym_install.find_gym(about(python=str(python))).generation
    assert (found.modern, found.liveness, found.lacks) == (False, liveness, lacks)
    assert str(found) == "NeMo Gym 0.3.1rc0, ng_run"


def test_a_package_without_programs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither gym nor ng_run is in"):
        gym_install.find_gym(about(python=str(programs(tmp_path, "ng_status"))))


def test_a_version_that_is_not_known_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "ng_run").touch()
    assert str(find_generation(tmp_path, tmp_path, None)) == "NeMo Gym of unknown version, ng_run"


@pytest.mark.parametrize(
    ("gym", "message"),
    [
        ({"driver": "collector"}, r"NeMo Gym 0.2.9, ng_run: its collector has no disable_aggregation, so"),
        ({"run_arguments": ["--verbose"]}, r"run_arguments: --verbose: ng_run of NeMo Gym 0.2.9 takes no flags"),
    ],
)
def test_what_an_older_one_cannot_do_is_refused_and_a_newer_one_does_it(tmp_path: Path, gym: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        gym_install.check_gym(about(**gym), fake_installation(tmp_path / "older", OLDER))
    assert caught.value.fix
    gym_install.check_gym(about(**gym), fake_installation(tmp_path / "newer", NEWER))
    gym_install.check_gym(about(), fake_installation(tmp_path / "agents", OLDER))


def test_flags_are_no_words_for_the_older_collector(tmp_path: Path) -> None:
    gym = about(driver="collector", collect_arguments=["--concurrency", "4"])
    with pytest.raises(UserError, match=r"collect_arguments: --concurrency: ng_collect_rollouts of NeMo Gym 0.3.9"):
        gym_install.check_gym(gym, fake_installation(tmp_path, BETWEEN))


def test_the_older_programs_are_told_the_same(tmp_path: Path) -> None:
    newer, older = fake_installation(tmp_path / "newer"), fake_installation(tmp_path / "older", BETWEEN)
    programs = tmp_path / "older" / "bin"
    with closing(Block()) as block:
        given = (block, PolicyEndpoint(("http://h:1/v1",), "m", KEY), Private(tmp_path / "p"))
        words = start_words(about(), older, *given)
        assert words[:2] == (str(programs / "python"), str(programs / "ng_run"))
        assert words[2:] == start_words(about(), newer, *given)[4:]
    output = tmp_path / "o.jsonl"
    words = collect_words(about(), older, 7, output, 64)
    assert words[1:3] == (str(programs / "ng_collect_rollouts"), "+resume_from_cache=true")
    assert words[3:] == collect_words(about(), newer, 7, output, 64)[6:]


def test_an_older_one_is_driven_both_ways_and_said_to_be_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    which = Generation("0.3.9", modern=False, liveness=False)
    installation, loop, stub, said = fake_installation(tmp_path / "gym", which), Loop(), Stub(), list[str]()
    monkeypatch.setattr(gym_install, "find_gym", lambda _: installation)
    loop(stub.start())
    about = campaign(stub.url, gym={"driver": "collector"})
    backend = GymBackend(about, [stub.url], KEY, tmp_path / "logs", agents=("other_agent",), progress=said.append)

    async def drive() -> tuple[RolloutOutcome, dict[int, RolloutOutcome | RolloutError]]:
        await backend.open()
        units = [unit(0), unit(1, agent="other_agent"), unit(2, "boom")]
        return await backend.roll(units[0]), {one.number: done async for one, done in collect_with_gym(backend, units, tmp_path)}

    try:
        rolled, collected = loop(drive())
    finally:
        loop(backend.close())
        loop(stub.die())
        loop.close()
    assert rolled.reward == 1.0
    assert {number: type(done) for number, done in collected.items()} == {0: RolloutOutcome, 1: RolloutOutcome, 2: RolloutError}
    assert said[0].startswith("NeMo Gym 0.3.9, ng_run (")
    log = (tmp_path / "logs" / "gym.log").read_text()
    assert f"[seatrial] {said[0]}" in log.splitlines()[0]
    assert KEY not in log
