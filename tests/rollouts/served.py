"""The stub model server in a thread, and rounds whose collectors run in this process: a command can be tested without others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError
from seatrial.core.jobs import Batch
from seatrial.rollouts import campaign_runner
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.campaign_rounds import collect_task
from seatrial.runtime import jobdir
from tests.rollouts.stub import Stub

QUICK = ("--set", "requests.backoff_s=0", "--set", "requests.dead_s=0.2", "--set", "requests.tries=1")
"""So that a command waits for nothing."""


@contextmanager
def serving(**options: Any) -> Iterator[Stub]:
    """The stub on loopback."""
    stub, loop = Stub(**options), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(stub.start(), loop).result(10)
    try:
        yield stub
    finally:
        asyncio.run_coroutine_threadsafe(stub.die(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def write_rows(path: Path, prompts: list[str]) -> Path:
    """Plain rows whose answer is C."""
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "C"}) + "\n" for prompt in prompts))
    return path


def halves(count: int) -> list[str]:
    """Prompts that are answered well in about half of all seeds."""
    return [f"question {number} [[gold=C p=0.5]]" for number in range(count)]


def run_in_process(patch: pytest.MonkeyPatch) -> None:
    """Rounds on this machine start no process: their tasks are collected here, one after another."""
    patch.setattr(campaign_runner, "run_batch", _run_batch)


def _run_batch(batch: Batch, directory: Path, say: Callable[[str], None], _: object = None) -> None:
    jobdir.save(directory, batch)
    (job,) = batch.jobs
    for task in job.units():
        try:
            collect_task(CampaignDir(directory.parents[1]), int(directory.name), task, (), None, say)
        except BlockedError as error:
            say(f"task {task}: {error.message}")
