"""Collection on an instant stub: ours (journal and exact match included), a bare aiohttp client, and Gym, on the same rows.

    python bench/rollouts_collect.py [--rows 20000] [--flat 100000] [--gym-python PATH]

The stub server has a process of its own; so has each measured side, best of several alternating runs, since timings on shared
machines are noisy. Printed are rollouts per second, CPU milliseconds per rollout of the client alone, and peak memory; then our
memory at 1,000 rows and at --flat rows. With --gym-python, a Python that has nemo-gym, bench/gym_collect.py measures Gym's own
collection of --gym-rows rows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import orjson
from peak import peak_kib

from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.backends.direct_backend import DirectBackend
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.collect_engine import CollectEnd, Collector
from seatrial.rollouts.manifest import Units
from seatrial.rollouts.verifiers import make_verifier
from seatrial.runtime.servers import free_port

HERE = Path(__file__).parent
ROUNDS = 3
OPEN = 64
PADDING = 500
BAR = 2000
OPTIONS = [{"A": "first"}, {"B": "second"}, {"C": "third"}, {"D": "fourth"}]


class Measured(NamedTuple):
    """What one side took."""

    rows: int
    wall_s: float
    cpu_s: float
    peak_kib: int

    def __str__(self) -> str:
        per = f"{self.rows / self.wall_s:,.0f} rollouts/s, {1000 * self.cpu_s / self.rows:.3f} CPU-ms each"
        return f"{per}, peak {self.peak_kib / 1024:.0f} MiB"

    @property
    def per_s(self) -> float:
        """Rollouts a second."""
        return self.rows / self.wall_s


def write_rows(path: Path, count: int) -> None:
    """Rows that Gym's mcqa takes as well."""
    with path.open("wb") as stream:
        for number in range(count):
            prompt = f"Answer inside \\boxed{{}}. Question {number} [[gold=C p=0.5]]\nA: first\nB: second\nC: third\nD: fourth"
            params = {"input": [{"role": "user", "content": prompt}]}
            row = {"responses_create_params": params, "options": OPTIONS, "expected_answer": "C", "grading_mode": "lenient_boxed"}
            stream.write(orjson.dumps(row) + b"\n")


@contextmanager
def stub() -> Iterator[str]:
    """The stub server's base URL, while it runs."""
    port = free_port()
    command = [sys.executable, str(HERE / "stub_server.py"), str(port), str(PADDING)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            if server.stdout.readline().strip() != "ready":
                sys.exit("the stub server did not start")
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.stdin.close()


def make_campaign(folder: Path, count: int, url: str) -> None:
    """A campaign directory with so many rows."""
    folder.mkdir()
    write_rows(folder / "rows.jsonl", count)
    campaign = Campaign.model_validate(
        {
            "name": "bench",
            "datasets": [{"name": "rows", "path": "rows.jsonl"}],
            "policy": {"url": url},
            "sampling": {"temperature": 1.0, "max_output_tokens": 1024},
            "verifier": "exact",
            "requests": {"concurrency": OPEN},
            "work": {"shards": 1},
        }
    )
    manifests.create_campaign(campaign, folder, CampaignDir(folder / "campaign"))


def ours(folder: Path) -> int:
    """Collect a campaign with the real collector, backend, verifier and journal; gives the rollouts."""
    place = CampaignDir(folder / "campaign")
    campaign = manifests.load_campaign(place)
    datasets = {dataset.name: dataset for dataset in campaign.datasets}
    verify = campaign.verifier_of(campaign.datasets[0])

    async def main() -> CollectEnd:
        verifier = make_verifier(verify, campaign.sandbox, folder, None, datasets)
        backend = DirectBackend(campaign, [str(campaign.policy.url)], {"rows": verifier}, None)
        with Units(place, manifests.load_manifest(place)) as units:
            return await Collector(place, campaign, units, [0], backend, stop=lambda: None, progress=lambda _: None).run()

    ended = asyncio.run(main())
    if ended.owed or ended.failed:
        sys.exit(f"not everything was collected: {ended}")
    return ended.ok


def bare(folder: Path) -> int:
    """The least that a client can do: post, read, match, write a line."""
    boxed = re.compile(r"\\boxed\{(\w+)\}")
    url = str(manifests.load_campaign(CampaignDir(folder / "campaign")).policy.url)
    done = 0

    async def main() -> None:
        with (folder / "rows.jsonl").open("rb") as rows, (folder / "bare.jsonl").open("wb") as out:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

                async def work() -> None:
                    nonlocal done
                    for line in rows:
                        row = orjson.loads(line)
                        asked = {"model": "stub", "messages": row["responses_create_params"]["input"], "temperature": 1.0}
                        async with session.post(f"{url}/chat/completions", json=asked) as answer:
                            said = orjson.loads(await answer.read())
                        found = boxed.findall(said["choices"][0]["message"]["content"])
                        row.update(response=said, reward=float(found[-1:] == [row["expected_answer"]]))
                        out.write(orjson.dumps(row) + b"\n")
                        out.flush()
                        done += 1

                await asyncio.gather(*(work() for _ in range(OPEN)))

    asyncio.run(main())
    return done


def measure(side: str, folder: Path) -> Measured:
    """One side in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    return Measured(*json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def run_side(side: str, folder: Path) -> None:
    """In that process: do it, and print what it took."""
    began, used = time.monotonic(), time.process_time()
    rows = {"ours": ours, "bare": bare}[side](folder)
    wall, cpu = time.monotonic() - began, time.process_time() - used
    print(json.dumps([rows, wall, cpu, peak_kib()]))


def gym(python: str | None, folder: Path, url: str) -> Measured | None:
    """Gym's own collection."""
    if python is None:
        print("Gym: not measured (say --gym-python)")
        return None
    command = [sys.executable, str(HERE / "gym_collect.py"), str(folder / "rows.jsonl"), url, python]
    return Measured(*json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]))


def main() -> None:
    """Print all figures and their ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--flat", type=int, default=100000)
    parser.add_argument("--gym-python")
    parser.add_argument("--gym-rows", type=int, default=1000)
    parser.add_argument("--side")
    parser.add_argument("--folder", type=Path)
    said = parser.parse_args()
    if said.side:
        return run_side(said.side, said.folder)
    with tempfile.TemporaryDirectory() as name, stub() as url:
        folder = Path(name)
        for size, count in (("small", 1000), ("large", said.flat), ("gym", said.gym_rows)):
            make_campaign(folder / size, count, url)
        pairs = []
        for number in range(ROUNDS):
            make_campaign(folder / str(number), said.rows, url)
            pairs.append([measure(side, folder / str(number)) for side in ("ours", "bare")])
            print(*(f"{side.rows} rows in {side.wall_s:.2f} s ({side.cpu_s:.2f} CPU-s)" for side in pairs[-1]), sep=", bare ")
        mine, least = (min((pair[place] for pair in pairs), key=lambda side: side.wall_s) for place in (0, 1))
        small, large = measure("ours", folder / "small"), measure("ours", folder / "large")
        peer = gym(said.gym_python, folder / "gym", url)
    print(f"collection, ours: {mine} (bar: {BAR:,}/s)")
    print(f"collection, bare aiohttp client without journal and checks: {least}; ours / bare {mine.per_s / least.per_s:.2f}")
    if peer:
        print(f"collection, Gym: {peer}; ours / Gym {mine.per_s / peer.per_s:.0f}")
    grown = (large.peak_kib - small.peak_kib) / 1024
    print(f"memory, ours: {small.peak_kib / 1024:.0f} MiB at {small.rows:,} rows, {large.peak_kib / 1024:.0f} MiB at {large.rows:,} rows")
    print(f"memory grows by {grown:+.0f} MiB (bar: 50 MB); {large.per_s:,.0f} rollouts/s over {large.rows:,} rows")
    return None


if __name__ == "__main__":
    main()
