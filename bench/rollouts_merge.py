"""Merge and resume scan of a large campaign.

    python bench/rollouts_merge.py [--rows 320000]

Makes a campaign of 320,000 rollouts of 3.5 to 4 KB in 400 shards, with duplicate, torn and failed records; then scans it as `resume`
does and merges it twice, each in a process of its own, and prints seconds, CPU seconds, rows/s and peak memory. Nothing is asserted
about speed. What Gym makes of the same rows: bench/rollouts_profile.py.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from peak import peak_kib

from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.journal.attempts import Attempt, Lease, LeaseHolder
from seatrial.rollouts.journal.journal_scan import Scanner
from seatrial.rollouts.manifest import Manifest, Units
from seatrial.rollouts.results.campaign_merge import merge_campaign
from seatrial.rollouts.rollout_record import Head, encode

REPEATS = 16
SHARDS = 400
TEXT = "".join(random.Random(0).choices("abcdefgh ijklm nopqr ", k=4000))


def make_campaign(place: CampaignDir, rows: int) -> Manifest:
    """The directory of a campaign that was collected, with everything that can go wrong on the way."""
    base = place.root.parent
    with (base / "rows.jsonl").open("w", encoding="utf-8") as stream:
        for number in range(rows):
            stream.write(json.dumps({"prompt": f"question {number}", "answer": str(number)}) + "\n")
    campaign = Campaign.model_validate(
        {
            "name": "bench",
            "datasets": [{"name": "questions", "path": "rows.jsonl"}],
            "work": {"repeats": REPEATS, "shards": min(SHARDS, rows)},
            "policy": {"url": "http://127.0.0.1:9/v1", "model": "stub"},
            "verifier": "exact",
        }
    )
    return manifests.create_campaign(campaign, base, place)


def line_of(units: Units, number: int, source: random.Random, *, fails: bool = False) -> bytes:
    """A record as the collector writes it."""
    unit = units.unit(number)
    reward, repeat = float(source.random() < unit.row.index % 10 / 9), unit.repeat
    if fails:
        return encode(Head(unit.number, unit.row.id, repeat, unit.seed, "failed", kind="timeout", final=source.random() < 0.1), {})
    answer = str(unit.row.index if reward else source.randrange(9))
    head = Head(unit.number, unit.row.id, repeat, unit.seed, "ok", reward, answer, 120, 700, 1, 3.25, "stop", ended=1.7e9 + number)
    text = TEXT[: source.randint(2700, 3200)]
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": unit.row.data["prompt"]}], "temperature": 1.0},
        "response": {
            "id": f"resp_{number}",
            "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]}],
            "usage": {"input_tokens": 120, "output_tokens": 700, "total_tokens": 820},
        },
        "reward": reward,
        "_ng_task_index": unit.row.index,
        "_ng_rollout_index": repeat,
        "agent_ref": {"name": "seatrial_direct"},
        "task_id": unit.row.id,
    }
    return encode(head, row)


def fill(place: CampaignDir, units: Units, shards: int) -> int:
    """Write every shard's journal, in the order in which rollouts end: two attempts in every fourth; gives the number of lines."""
    source, lines = random.Random(1), 0
    for shard in range(shards):
        numbers = list(units.of_shard(shard))
        numbers.sort(key=lambda number: number + source.uniform(0, 64))
        cut = len(numbers) // 2 if shard % 4 == 0 else len(numbers)
        again = source.sample(numbers[:cut], len(numbers) // 100)
        for part in filter(None, (numbers[:cut], numbers[cut:] + again)):
            with Lease.acquire(place.shard(shard), LeaseHolder.here(), 0) as lease, Attempt.open(lease.directory, lease.holder) as attempt:
                for number in part:
                    if source.random() < 0.002:
                        attempt.append(line_of(units, number, source, fails=True))
                    attempt.append(line_of(units, number, source))
                if shard % 16 == 8:
                    attempt.append(line_of(units, part[0], source)[:-300] + b"\n")
                if shard % 16 == 0:
                    attempt.append(line_of(units, part[0], source)[:-300])
            lines += len(part)
    return lines


def apart(name: str, place: CampaignDir, what: str) -> str:
    """Run one of WORK in a process of its own, print what it cost, and give back what it says."""
    command = [sys.executable, __file__, "--one", name, str(place.root)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    wall, cpu, peak, rows, word = json.loads(done.stdout)
    rate = f"{rows / wall:,.0f} rows/s, {rows / cpu:,.0f} per CPU-s"
    print(f"{what}: {wall:.2f} s, {cpu:.2f} CPU-s, {rate}, peak {peak / 1024:.0f} MiB")
    return str(word)


def one(name: str, root: str) -> int:
    """The other side of `apart`."""
    began = time.monotonic()
    rows, word = WORK[name](CampaignDir(Path(root)))
    wall, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([wall, used.ru_utime + used.ru_stime, peak_kib(), rows, word]))
    return 0


def scanned(place: CampaignDir) -> tuple[int, str]:
    """What resume does first."""
    with Units(place, manifests.load_manifest(place)) as units:
        scan = Scanner(place, units).update()
    return scan.ok, f"{scan.ok} ok, {scan.failed} failed, {scan.owed} owed, {scan.torn} torn, {scan.tails} tails, {scan.duplicates} twice"


def merged(place: CampaignDir) -> tuple[int, str]:
    """A merge, to disk."""
    manifest = manifests.load_manifest(place)
    with Units(place, manifest) as units:
        result = merge_campaign(place, manifest, units)
    return result.ok, f"{result.ok} rows of {result.expected}, {result.rollouts.bytes / 1e9:.2f} GB, sha256 {result.sha256[:16]}"


WORK: dict[str, Callable[[CampaignDir], tuple[int, str]]] = {work.__name__: work for work in (scanned, merged)}
"""Each gives rows, and a word about them."""


def measure(place: CampaignDir, rows: int) -> int:
    """All figures; the exit code."""
    manifest = make_campaign(place, rows // REPEATS)
    with Units(place, manifest) as units:
        lines = fill(place, units, manifest.shards)
    print(f"campaign: {manifest.units:,} units in {manifest.shards} shards, {lines:,} rollouts in the journal")
    print(f"  {apart('scanned', place, 'resume scan')} (bar: 5 s)")
    first = apart("merged", place, "merge, sorted, hashed, synced")
    print(f"  {first} (bar: 40,000 rows/s, 300 MiB)")
    same = first == apart("merged", place, "merge again")
    print(f"  {'the same bytes' if same else 'OTHER BYTES'}")
    return 0 if same else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=320_000, help="rollouts")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one(*options.one)
    with tempfile.TemporaryDirectory(prefix="seatrial-bench-") as folder:
        return measure(CampaignDir(Path(folder) / "campaign"), options.rows)


if __name__ == "__main__":
    sys.exit(main())
