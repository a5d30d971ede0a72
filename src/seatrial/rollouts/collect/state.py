"""state-NNNN-<token>.json: where an attempt of a shard stands, for status, the viewer, and the budgets of other collectors.

- It is rewritten every two seconds and says `ended` at the end. A killed attempt never says so: then its file's age tells.
- Counts are of the shard, earlier attempts included, except `failed_now`: units that this attempt gave up and that are owed again.
- Nothing is derived from it that matters: which units are done, the journal says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from pydantic import Field

from seatrial.files import read_model, write_json
from seatrial.model.errors import UserError
from seatrial.model.record import Record
from seatrial.rollouts.place import Place

_NAME = re.compile(r"state-(\d{4,})-[0-9a-f]+\.json")


class ShardState(Record):
    """Where an attempt stands."""

    shard: int
    attempt: int
    token: str
    host: str
    pid: int
    slurm: Mapping[str, str] = Field(default_factory=dict)
    started: float
    """Seconds since 1970, as all times here."""
    updated: float
    ended: str | None = None
    """How the attempt ended: done, stopped, budget, servers, fenced, error."""
    units: int
    owed: int
    """Not settled yet."""
    ok: int
    failed: int
    """For good."""
    failed_now: int = 0
    """Given up by this attempt, owed again."""
    kinds: Mapping[str, int] = Field(default_factory=dict)
    """Units that failed in this attempt, by class of failure."""
    collected: int = 0
    """Rollouts of this attempt."""
    reward_sum: float = 0.0
    """Over `ok`."""
    open: int = 0
    """Requests of the whole collector."""
    concurrency: int = 0
    """What the collector lets itself open now."""
    rate: float = 0.0
    """Settled units per second, lately."""
    message: str = ""
    """Of the last failure."""


def write_state(place: Place, state: ShardState) -> float:
    """Replace the state of an attempt; gives the time at which that was, by the file system's clock."""
    path = place.shard(state.shard) / f"state-{state.attempt:04d}-{state.token}.json"
    write_json(path, state)
    return path.stat().st_mtime


def newest_states(place: Place, shards: Iterable[int]) -> dict[int, tuple[ShardState, float]]:
    """The state of each shard's newest attempt, with the time at which its file was written by the file system's own clock."""
    found: dict[int, tuple[ShardState, float]] = {}
    for shard in shards:
        directory = place.shard(shard)
        try:
            names = [match for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
            if names:
                file = directory / max(names, key=lambda match: int(match[1]))[0]
                found[shard] = (read_model(file, ShardState), file.stat().st_mtime)
        except (FileNotFoundError, UserError):
            continue  # none yet, or of another version: a picture with a gap
    return found
