"""A small campaign on disk, a backend that does as it is told, and a collector run over both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from seatrial.rollouts import manifest
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.collect_engine import CollectEnd, Collector
from seatrial.rollouts.manifest import Units
from seatrial.rollouts.rollout_record import (
    Backend,
    FailureKind,
    Head,
    InputRow,
    RolloutError,
    RolloutOutcome,
    Score,
    Unit,
    check,
    head_of,
    row_of,
)

QUICK = {"backoff_s": 0.0, "dead_s": 0.2, "connect_s": 2.0}
"""Of [requests], so that tests wait for nothing."""


def make(folder: Path, prompts: Sequence[str], *, gold: str = "C", **tables: Any) -> tuple[CampaignDir, Campaign]:
    """A started campaign whose rows are these prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": prompt, "expected_answer": gold, "id": index} for index, prompt in enumerate(prompts)]
    (folder / "rows.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    requests = {**QUICK, **tables.pop("requests", {})}
    said = {
        "name": "small",
        "datasets": [{"name": "rows", "path": "rows.jsonl"}],
        "policy": {"url": "http://127.0.0.1:9/v1", "model": "stub"},
        "verifier": "exact",
        "work": {"shards": 1},
        **tables,
    }
    campaign = Campaign.model_validate({**said, "requests": requests})
    place = CampaignDir(folder / "campaign")
    manifest.create_campaign(campaign, folder, place)
    return place, campaign


@dataclass
class Told:
    """A backend whose `roll` is a function; counts what it is asked."""

    act: Callable[[Unit], Awaitable[RolloutOutcome]]
    dead: Callable[[], str | None] = lambda: None
    opened: int = 0
    closed: int = 0
    open_now: int = 0
    most_open: int = 0
    rolled: list[int] = field(default_factory=list)

    async def open(self) -> None:
        self.opened += 1

    async def roll(self, unit: Unit) -> RolloutOutcome:
        self.rolled.append(unit.number)
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            return await self.act(unit)
        finally:
            self.open_now -= 1

    async def alive(self) -> str | None:
        return self.dead()

    async def close(self) -> None:
        self.closed += 1


def prompts(count: int) -> list[str]:
    return [f"question {number}" for number in range(count)]


def failing(kind: FailureKind, *numbers: int, heals: bool | None = None, times: int = 10**9) -> Told:
    """A backend in which these units fail, so many times each."""
    seen: dict[int, int] = {}

    async def act(unit: Unit) -> RolloutOutcome:
        if unit.number in numbers and (count := seen.get(unit.number, 0)) < times:
            seen[unit.number] = count + 1
            raise RolloutError(kind, f"made to fail {unit.number}", heals=heals, row={"kept": unit.number})
        return await fine(unit)

    return Told(act)


async def fine(unit: Unit) -> RolloutOutcome:
    """Every rollout works; its reward is its number."""
    return RolloutOutcome({"reward": float(unit.number), "_ng_task_index": unit.row.index}, float(unit.number), "C", 1, 2, 1, "stop")


class Boxed:
    """A verifier: whether the letter in the box is the expected one."""

    closed = 0

    async def score(self, row: InputRow, text: str, output: Sequence[Mapping[str, Any]]) -> Score:
        got = text.rpartition("boxed{")[2].rstrip("}")
        return Score(float(got == row.data["expected_answer"]), got or None, {"extracted_answer": got})

    async def close(self) -> None:
        self.closed += 1


def run(
    place: CampaignDir,
    campaign: Campaign,
    backend: Backend,
    *,
    shards: Sequence[int] = (0,),
    stop: Callable[[], str | None] = lambda: None,
    beside: Callable[[], Awaitable[None]] | None = None,
    said: list[str] | None = None,
    **more: Any,
) -> CollectEnd:
    """Collect; `beside` runs at the same time."""

    async def main() -> CollectEnd:
        other = asyncio.ensure_future(beside()) if beside else None
        with Units(place, manifest.load_manifest(place)) as units:
            progress = (said if said is not None else []).append
            ended = await asyncio.wait_for(
                Collector(place, campaign, units, shards, backend, stop=stop, progress=progress, **more).run(), timeout=20
            )
        if other is not None:
            await other
        return ended

    return asyncio.run(main())


def lines(place: CampaignDir) -> list[bytes]:
    """Every record of the campaign, in the order of files."""
    return [line for path in sorted(place.shards.glob("*/attempt-*.jsonl")) for line in path.read_bytes().splitlines(keepends=True)]


def heads(place: CampaignDir) -> list[Head]:
    """Their heads."""
    return [head_of(line, check(line)) for line in lines(place)]


def rows(place: CampaignDir) -> dict[int, dict[str, Any]]:
    """Rows by unit; a unit that was written twice is an error."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines(place):
        head = head_of(line, check(line))
        if head.settled:
            assert head.unit not in found
            found[head.unit] = row_of(line)
    return found
