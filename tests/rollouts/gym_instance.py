"""What the tests of Gym share: rows for mcqa, a campaign, an event loop in a thread, and a driver that can be killed."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from seatrial.rollouts.backends import gym_backend, gym_install, gym_servers
from seatrial.rollouts.backends.gym_install import Generation
from seatrial.rollouts.backends.gym_servers import GymServers, PolicyEndpoint
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.rollout_record import InputRow, Unit
from seatrial.runtime import process
from seatrial.runtime import servers as ready

T = TypeVar("T")

KEY = "sk-0123456789-not-for-logs"
AGENT = "mcqa_simple_agent"
_OPTIONS = [{"A": "first"}, {"B": "second"}, {"C": "third"}, {"D": "fourth"}]


class Loop:
    """An event loop in a thread, so that servers and backends outlive a test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __call__(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 400) -> T:
        """Run it there and wait."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module", autouse=True)
def hurry() -> Iterator[None]:
    """Look more often: nobody else is waiting. A module that imports this has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ready, "_ASK_EVERY_S", 0.05)
        patch.setattr(ready, "_LOOK_S", 0.02)
        patch.setattr(gym_servers, "_LOOK_S", 0.02)
        patch.setattr(gym_backend, "_LOOK_S", 0.02)
        patch.setattr(process, "_TICK_S", 0.05)
        patch.setattr(gym_backend, "_WATCH_S", 0.05)
        yield


def campaign(url: str, *, gym: dict[str, Any] | None = None, **more: Any) -> Campaign:
    """A campaign whose only dataset is `d`."""
    given = {"resources": ["mcqa"], "shared_environments": True, "deadline_s": 300, **(gym or {})}
    requests = {"timeout_s": 20, "concurrency": 16, **more.pop("requests", {})}
    datasets = [{"name": "d", "path": "d.jsonl"}]
    return Campaign.model_validate({"name": "c", "datasets": datasets, "policy": {"url": url}, "gym": given, "requests": requests, **more})


def row(index: int, mark: str = "", agent: str = AGENT) -> InputRow:
    """A row of mcqa; `mark` is for the stub."""
    prompt = f"Answer in \\boxed{{}}. {mark} Question {index} [[gold=C p=0.5]]\nA: first\nB: second\nC: third\nD: fourth"
    params = {"input": [{"role": "user", "content": prompt}]}
    data = {"responses_create_params": params, "options": _OPTIONS, "expected_answer": "C", "grading_mode": "lenient_boxed"}
    return InputRow(index, f"t{index}", "d", data, agent=agent, source=f"d.jsonl:{index + 1}")


def unit(number: int, mark: str = "", agent: str = AGENT, repeats: int = 1) -> Unit:
    """A unit; with `repeats` several of one row, whose seeds are their numbers as Gym's are."""
    return Unit(number, row(number // repeats, mark, agent), number % repeats, number % repeats)


NEWER = Generation("0.4.9")
OLDER = Generation("0.2.9", modern=False, liveness=False, lacks=("disable_aggregation",))


def fake_installation(root: Path, generation: Generation = NEWER) -> gym_install.Installation:
    """A Gym that is a stand-in, below `root`."""
    configs = ("resources_servers/mcqa/configs/mcqa.yaml", "responses_api_models/vllm_model/configs/vllm_model.yaml")
    for name in ("bin/activate", *(f"site/{config}" for config in configs)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (root / "bin" / "python").symlink_to(sys.executable)
    for name in ("gym",) if generation.modern else ("ng_run", "ng_collect_rollouts"):
        (root / "bin" / name).symlink_to(Path(__file__).with_name("fake_gym.py"))
    return gym_install.Installation(root / "bin" / "python", root, Path(sys.base_prefix), root / "site", generation)


def drive(python: str, url: str, logs: str) -> None:
    """Start Gym, say so, and wait to be killed."""
    about = campaign(url, gym={"python": python}).gym
    assert about is not None
    GymServers(about, gym_install.find_gym(about), PolicyEndpoint((url,), "stub", KEY), Path(logs), lambda _: None).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    drive(*sys.argv[1:])
