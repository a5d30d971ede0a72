"""`python -m tests.rollouts.kills --points 200`: kill -9 at random points of collection and merge; nothing lost, nothing twice.

- Real processes run the real collector, with a backend that answers from the unit alone, and the real merge. Several collectors work
  at the same time, on shards that overlap. Some records are megabytes large, so that a kill tears them.
- Some collectors take over shards from others that are alive: the same unit is then rolled out twice, and counts once.
- A point is a process that was alive when it was killed. After a kill the end of its file may be cut off, as when a node is lost with
  what it had not synced.
- A campaign goes on until it is complete; its merge is killed too, until one is let through. Then all is compared, byte for byte, with
  the merge of a campaign that nobody killed. Campaigns follow each other until all points are used.
- In a killed run the times that a record holds differ; they are set to zero here, as is nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from seatrial.rollouts import dispatcher
from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.collect_engine import Collector
from seatrial.rollouts.journal import attempts
from seatrial.rollouts.journal.attempts import attempt_files
from seatrial.rollouts.journal.journal_scan import Scanner
from seatrial.rollouts.manifest import Units
from seatrial.rollouts.results.campaign_merge import MergeResult, merge_campaign, read_result
from seatrial.rollouts.rollout_record import FailureKind, Head, RolloutError, RolloutOutcome, Unit, check, encode, unit_of
from seatrial.runtime.process_tree import die_with_parent

ROWS, REPEATS, SHARDS, AT_ONCE = 36, 4, 6, 3
DEADLINE_S = 120.0
"""For one campaign to become complete."""


class Steady:
    """A backend whose answers depend on the unit alone."""

    async def open(self) -> None:
        """Nothing to do."""

    async def roll(self, unit: Unit) -> RolloutOutcome:
        """A rollout: mostly small, now and then megabytes; one in thirty fails for good."""
        source = random.Random(unit.seed)
        await asyncio.sleep(source.random() * 0.05)
        if source.random() < 1 / 30:
            raise RolloutError(FailureKind.PARSE, "never an answer", heals=False)
        size = source.choices((100, 4000, 100_000, 4_000_000), weights=(10, 20, 6, 2))[0]
        reward = source.random()
        row = {"reward": reward, "text": "x" * size, "_ng_task_index": unit.row.index, "_ng_rollout_index": unit.repeat}
        return RolloutOutcome(row=row, reward=reward)

    async def alive(self) -> str | None:
        """Always."""
        return None

    async def close(self) -> None:
        """Nothing to do."""


def timeless(head: Head, row: Mapping[str, Any]) -> bytes:
    """A record without the times of its making."""
    return encode(replace(head, latency_s=0.0, ended=0.0), row)


def make(root: Path) -> CampaignDir:
    """A campaign directory; the same one each time, of the same file, since failures name it."""
    root.mkdir(parents=True)
    rows = root.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"question {number}", "answer": ""}) + "\n" for number in range(ROWS)))
    said = {
        "name": "kills",
        "datasets": [{"name": "questions", "path": str(rows)}],
        "work": {"repeats": REPEATS, "shards": SHARDS},
        "policy": {"url": "http://127.0.0.1:9/v1", "model": "none"},
        "requests": {"concurrency": 8, "backoff_s": 0.0},
        "failures": {"max_share": 1.0},
        "verifier": "exact",
    }
    place = CampaignDir(root / "campaign")
    manifests.create_campaign(Campaign.model_validate(said), root, place)
    return place


def collecting(place: CampaignDir, shards: Sequence[int], rash: bool = False) -> None:
    """One collector, to its end. A rash one takes over from holders that live, so that a shard really runs twice."""
    if rash:
        attempts.STALE_S, attempts._POLL_S = 0.02, 0.01
    dispatcher.encode = timeless  # type: ignore[attr-defined]
    campaign = manifests.load_campaign(place)
    with Units(place, manifests.load_manifest(place)) as units:

        async def collect() -> None:
            await Collector(place, campaign, units, shards, Steady(), stop=lambda: None, progress=lambda _: None).run()

        asyncio.run(collect())


def merging(place: CampaignDir) -> MergeResult:
    """One merge."""
    manifest = manifests.load_manifest(place)
    with Units(place, manifest) as units:
        return merge_campaign(place, manifest, units)


def start(work: Callable[..., object], *words: object) -> int:
    """Run some work in a process of its own, which dies with this one; 0 or 1 is its exit code."""
    bind = die_with_parent()
    if pid := os.fork():
        return pid
    code = 1
    try:
        bind()
        work(*words)
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


class Killer:
    """Counts points, and ends processes without warning."""

    def __init__(self, points: int, source: random.Random) -> None:
        self.left = points
        self.source = source
        self.killed: Counter[str] = Counter()

    def kill(self, pid: int, what: str) -> bool:
        """Kill and collect one process; False when it had ended by itself, which must have been in order."""
        os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == -signal.SIGKILL:
            self.killed[what] += 1
            self.left -= 1
            return True
        assert status == 0, f"{what} ended with {status}"
        return False

    def nap(self, most_s: float) -> None:
        time.sleep(self.source.random() * most_s)


def collect_with_kills(place: CampaignDir, killer: Killer) -> None:
    """Collectors over random shards, killed at random, until nothing is owed."""
    stops = time.monotonic() + DEADLINE_S
    running: list[int] = []
    with Units(place, manifests.load_manifest(place)) as units:
        # One scanner all the way, as a status that is watched: it must see files that grow, come and shrink.
        scanner = Scanner(place, units)
        try:
            while scanner.update().owed:
                assert time.monotonic() < stops, f"{place.root}: not complete within {DEADLINE_S:.0f} s"
                while len(running) < AT_ONCE:
                    running.append(start(collecting, place, killer.source.sample(range(SHARDS), 3), killer.source.random() < 0.4))
                killer.nap(0.1)
                if killer.left > 0:
                    kill_one(place, running, killer)
                else:
                    running = [pid for pid in running if not ended(pid)]
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def kill_one(place: CampaignDir, running: list[int], killer: Killer) -> None:
    """Kill a collector; sometimes its machine is lost with it."""
    if killer.kill(running.pop(killer.source.randrange(len(running))), "collector") and killer.source.random() < 0.3:
        lose_a_node(place, killer)


def lose_a_node(place: CampaignDir, killer: Killer) -> None:
    """Cut off the end of one file that nobody writes any more."""
    files = [file.path for shard in range(SHARDS) for file in attempt_files(place.shard(shard)) if file.path.stat().st_size]
    path = killer.source.choice(files) if files else None
    if path and not is_open(path):
        os.truncate(path, max(0, path.stat().st_size - killer.source.randrange(200_000)))
        killer.killed["node"] += 1


def is_open(path: Path) -> bool:
    """Whether a process of ours still writes it."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.readlink() == path:
                return True
        except OSError:
            continue
    return False


def ended(pid: int) -> bool:
    """Collect a process if it has ended; it must have ended in order."""
    done, status = os.waitpid(pid, os.WNOHANG)
    assert not done or status == 0, f"a collector ended with {os.waitstatus_to_exitcode(status)}"
    return bool(done)


def merge_with_kills(place: CampaignDir, killer: Killer, times: int) -> MergeResult:
    """Kill some merges, now and then one of two, then let one through; what lies under the final names is whole at any time."""
    for _ in range(min(times, killer.left)):
        other = start(merging, place) if killer.source.random() < 0.3 else None
        pid = start(merging, place)
        killer.nap(0.1)
        killer.kill(pid, "merge")
        if other:
            status = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
            assert status == 0, f"a merge beside one that was killed ended with {status}"
        if (found := read_result(place)) is not None:
            digest = hashlib.sha256((place.merged / "rollouts.jsonl").read_bytes()).hexdigest()
            assert digest == found.sha256, "merge.json does not belong to rollouts.jsonl"
    return merging(place)


def compare(place: CampaignDir, reference: CampaignDir) -> None:
    """Nothing lost, nothing twice, the same bytes."""
    found: Counter[int] = Counter()
    for name in ("rollouts.jsonl", "failures.jsonl"):
        data = (place.merged / name).read_bytes()
        assert data == (reference.merged / name).read_bytes(), f"{place.merged / name} differs from {reference.merged / name}"
        for line in data.splitlines(keepends=True):
            check(line)
            found[unit_of(line)] += 1
    assert found == Counter(range(ROWS * REPEATS)), "units are lost, or there twice"
    assert not [path for path in place.merged.glob(".*") if path.is_file()], "a killed merge left files"


def run(root: Path, points: int, seed: int) -> str:
    """Use up all points; what happened, in one line."""
    began, killer = time.monotonic(), Killer(points, random.Random(seed))
    reference = make(root / "reference")
    collecting(reference, range(SHARDS))
    merging(reference)
    campaigns, totals = 0, Counter[str]()
    while killer.left > 0:
        place = make(root / f"killed-{campaigns}")
        collect_with_kills(place, killer)
        result = merge_with_kills(place, killer, 5)
        assert (result.missing, result.conflicts, result.foreign) == (0, 0, 0)
        compare(place, reference)
        campaigns += 1
        totals.update(attempts=len(result.sources), torn=result.torn, duplicates=result.duplicates)
    said = ", ".join(f"{count} {what}" for what, count in (*sorted(killer.killed.items()), *totals.items()))
    return f"{points} kill points over {campaigns} campaigns in {time.monotonic() - began:.0f} s: 0 lost, 0 twice, same bytes ({said})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seatrial-kills-") as folder:
        sys.stdout.write(run(Path(folder), options.points, options.seed) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
