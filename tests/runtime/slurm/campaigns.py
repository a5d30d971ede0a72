"""Rollout campaigns on the private Slurm: a policy that is as slow as a test wants, the command, and what must hold in the end."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from seatrial.core.jobs import Result
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.campaign_rounds import Round, list_rounds, round_dir
from seatrial.rollouts.journal.attempts import LeaseFile, holder_of
from seatrial.runtime.jobdir import JobDir, job_dir
from tests.cli.command import SEATRIAL, Answer, environ
from tests.rollouts.served import serving
from tests.rollouts.stub import Stub
from tests.runtime.slurm.cluster import PrivateSlurm
from tests.runtime.slurm.harness import processes_with, until

ROOT = Path(__file__).parents[3]
PROFILES = """
[slurm.low]
partition = "low"
time = "0:10:00"
[slurm.main]
time = "0:10:00"
[slurm.nowhere]
partition = "nowhere"
"""
CAMPAIGN = """
name = "many"
verifier = "box"
[verifiers.box]
kind = "exact"
pattern = 'boxed\\{(\\w)\\}'
[[datasets]]
name = "rows"
path = "rows.jsonl"
[requests]
concurrency = 1
backoff_s = 0.0
dead_s = 5.0
"""
SERVE = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from tests.rollouts.served import serving
from tests.rollouts.stub import Stub
async def main():
    stub = Stub(latency_s=0.3, port=int(sys.argv[2]))
    await stub.start()
    while os.environ["SEATRIAL_INDEX"] != "1" or stub.calls < 3 or os.path.exists(sys.argv[3]):
        await asyncio.sleep(0.05)
    open(sys.argv[3], "w").close()
    os._exit(1)
asyncio.run(main())
"""
"""The stub as a server of its own; that of unit 1 dies at its third request, once."""


@contextmanager
def policy(latency_s: float = 0.0) -> Iterator[Stub]:
    """A policy server on loopback, which all nodes share with this process. Its latency may be changed at any time."""
    with serving(latency_s=latency_s, keep_bodies=False) as stub:
        yield stub


@dataclass(frozen=True, slots=True)
class Desk:
    """A working directory of somebody who has access to the cluster, with one campaign."""

    where: Path
    cluster: PrivateSlurm

    @classmethod
    def make(cls, where: Path, cluster: PrivateSlurm, more: str, rows: int) -> Desk:
        """`more` is the rest of the campaign's file."""
        (where / "seatrial.toml").write_text(PROFILES)
        (where / "campaign.toml").write_text(CAMPAIGN + more)
        lines = [{"prompt": f"question {number} [[gold=C p=0.5]]", "answer": "C"} for number in range(rows)]
        (where / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return cls(where, cluster)

    @property
    def place(self) -> CampaignDir:
        return CampaignDir(self.where / "c")

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """`seatrial rollouts …`, which goes on while the test does; what it says comes in one stream."""
        return subprocess.Popen(
            [str(SEATRIAL), "rollouts", *words],
            cwd=self.where,
            env=environ(**self.cluster.env, OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, *words: str, deadline_s: float = 90) -> Answer:
        """The same, awaited."""
        return ended(self.begin(*words), deadline_s)

    def start(self, *words: str, profile: str = "low") -> tuple[str, ...]:
        """Words of a start."""
        return ("start", "campaign.toml", "--out", "c", "--on", f"slurm:{profile}", *words)

    def rounds(self) -> tuple[Round, ...]:
        return list_rounds(self.place)

    def job(self, number: int, name: str = "collect") -> JobDir:
        return job_dir(round_dir(self.place, number), name)

    def slurm_id(self, number: int, name: str = "collect") -> str:
        sent = self.job(number, name).submission()
        assert sent is not None
        assert sent.slurm is not None
        return sent.slurm

    def results(self, number: int) -> list[Result | None]:
        """Of the tasks of a round."""
        return [self.job(number).result(task) for task in range(len(self.rounds()[number - 1].tasks))]

    def lingered(self, number: int) -> list[float]:
        """Seconds between the result of each task of a round and the end of its Slurm job."""
        said = self.cluster.run("squeue", "-h", "-a", "-r", "-t", "all", "-j", self.slurm_id(number), "-o", "%K %e").stdout.splitlines()
        ends = {int(task): datetime.fromisoformat(end).timestamp() for task, end in map(str.split, said)}
        return [ends[task] - result.ended for task, result in enumerate(self.results(number)) if result]

    def merge_ended(self, number: int) -> tuple[Result, str]:
        """The merge job of a round, awaited, and its log."""
        job = self.job(number, "merge")
        result = until(lambda: job.result(0), f"merge of round {number}", 60)
        return result, job.log("client", 0, None).read_text()

    def settled(self, shard: int) -> int:
        """Whole lines in the journal of a shard."""
        return sum(path.read_bytes().count(b"\n") for path in self.place.shard(shard).glob("attempt-*.jsonl"))

    def working(self, shards: Sequence[int]) -> None:
        """Wait until each of these shards has a record, and is still being collected."""

        def look() -> bool | None:
            return all(self.settled(shard) for shard in shards) or None

        until(look, lambda: f"collectors at work: {[self.settled(shard) for shard in shards]}", 60)
        assert not any(self.lease(shard).released for shard in shards)

    def lease(self, shard: int) -> LeaseFile:
        found = holder_of(self.place.shard(shard))
        assert found is not None
        return found

    def node(self, number: int, task: int) -> str:
        """Where a task runs."""
        return self._asked(number, task, "%N")

    def left(self, number: int, task: int) -> None:
        """Wait until Slurm has ended a task that ran."""
        until(lambda: self._asked(number, task, "%T") != "RUNNING" or None, f"end of task {task}", 20)

    def _asked(self, number: int, task: int, form: str) -> str:
        return self.cluster.run("squeue", "-h", "-j", f"{self.slurm_id(number)}_{task}", "-o", form).stdout.strip()

    def log(self, number: int, task: int) -> str:
        """What the collector of a task has said."""
        return self.job(number).log("client", 0, task).read_text()

    def nothing_left(self) -> None:
        """No process of the campaign lives any more."""
        until(lambda: not list(processes_with(str(self.place.root))) or None, lambda: str(list(processes_with(str(self.place.root)))), 30)


def ended(process: subprocess.Popen[str], deadline_s: float = 90) -> Answer:
    """The end of a command; one that does not end is killed and the test fails."""
    with process:
        try:
            out, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            raise AssertionError(f"not ended within {deadline_s:g} s: {out}") from None
    return Answer(process.returncode, out, "")


def complete(place: CampaignDir, units: int) -> dict[str, Any]:
    """The merge has each unit exactly once, byte for byte as in the journal, by other means than Seatrial's own; gives merge.json."""
    journal: dict[int, list[bytes]] = {}
    for path in sorted(place.shards.glob("*/attempt-*.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n") and (head := json.loads(line)["_seatrial"])["outcome"] == "ok":
                journal.setdefault(head["unit"], []).append(line)
    merged = (place.merged / "rollouts.jsonl").read_bytes()
    lines = merged.splitlines(keepends=True)
    said: dict[str, Any] = json.loads((place.merged / "merge.json").read_text())
    assert [json.loads(line)["_seatrial"]["unit"] for line in lines] == list(range(units))
    assert merged == b"".join(journal[unit][0] for unit in range(units))
    assert (said["expected"], said["ok"], said["missing"], said["failed"]) == (units, units, 0, 0)
    assert (said["rollouts"]["bytes"], said["rollouts"]["sha256"]) == (len(merged), hashlib.sha256(merged).hexdigest())
    assert said["duplicates"] == sum(len(found) - 1 for found in journal.values())
    return said


def stub_server(mark: Path) -> str:
    """[policy.server] of a campaign: the stub, in each task."""
    command = json.dumps([sys.executable, "-c", SERVE, str(ROOT), "{port}", str(mark)])
    return f'[policy]\nmodel = "stub"\n[policy.server]\nkind = "command"\nready_path = "/v1/models"\ndeadline_s = 60\ncommand = {command}\n'
