"""The profile of a large campaign beside Gym's own profiler, on the same rows.

    python bench/rollouts_profile.py [--rows 320000] [--gym-python PATH]

Makes the campaign of bench/rollouts_merge.py, with its duplicate, torn and failed records, and profiles it straight from the journal
in a process of its own: once to the figures, once to all files. With --gym-python, a Python that has nemo-gym, Gym's RewardProfiler
and its pass@k and majority@k read the merged rows, whose merge is not counted. Prints seconds, CPU seconds, rows/s, peak memory and
the ratio, and compares every task's mean, spread and median, and the pass@k and maj@k over all tasks. Nothing is asserted about speed.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peak import peak_kib
from rollouts_merge import fill, make_campaign

from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.manifest import Units
from seatrial.rollouts.results.campaign_merge import merge_campaign
from seatrial.rollouts.results.profile_build import make_profile
from seatrial.rollouts.results.profile_writer import write_profile

REPEATS = 16
FIGURES = ("mean", "std", "min", "max", "median")

PEER = """
import json, resource, sys, time
import orjson
from nemo_gym.reward_profile import RewardProfiler, compute_pass_majority_metrics
began, start = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
rows, results, tasks = [], [], {}
with open(sys.argv[1], "rb") as stream:
    for line in stream:
        result = orjson.loads(line)
        results.append(result)
        rows.append({key: result[key] for key in ("_ng_task_index", "_ng_rollout_index", "agent_ref", "responses_create_params")})
        answer = result["_seatrial"].get("answer")
        tasks.setdefault(result["_ng_task_index"], []).append({"reward": result["reward"], "answer": answer})
profiled, _ = RewardProfiler().profile_from_data(rows, results, allow_partial_rollouts=True)
metrics = compute_pass_majority_metrics(list(tasks.values()), answer_key="answer")[0]
wall, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
figures = [[task[f"{name}/reward"] for name in ("mean", "std", "min", "max", "median")] for task in profiled]
over = {key: value for key, value in metrics.items() if key.endswith("/accuracy")}
cpu = used.ru_utime + used.ru_stime - start.ru_utime - start.ru_stime
marks = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps({"wall": wall, "cpu": cpu, "kib": int(marks[0]), "tasks": figures, "over": over}))
"""


def one(root: str, out: str) -> int:
    """Profile in this process; write the files when a directory for them is named."""
    began, start = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    found = make_profile(CampaignDir(Path(root)))
    if out:
        write_profile(found, Path(out))
    wall, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime - start.ru_utime - start.ru_stime
    rewards = [task.reward for task in found.tasks if task.reward]
    overall = found.overall
    over = {
        f"{name}@{at.k}/accuracy": None if at.value is None else 100 * at.value
        for name, figures in (("pass", overall.pass_at), ("majority", overall.majority_at))
        for at in figures
        if at.tasks == overall.tasks
    }
    figures = [[getattr(reward, name) for name in FIGURES] for reward in rewards]
    print(json.dumps({"wall": wall, "cpu": cpu, "kib": peak_kib(), "rows": overall.ok, "tasks": figures, "over": over}))
    return 0


def measured(command: list[str], what: str, rows: int | None = None) -> dict[str, Any]:
    """What a process says on its last line; prints what it cost."""
    said: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    count = said["rows"] if rows is None else rows
    rates = f"{count / said['wall']:,.0f} rows/s, {count / said['cpu']:,.0f} per CPU-s"
    print(f"{what}: {said['wall']:.2f} s, {said['cpu']:.2f} CPU-s, {rates}, peak {said['kib'] / 1024:,.0f} MiB", flush=True)
    return said


def close(ours: float | None, theirs: float | None) -> bool:
    """Equal but for rounding."""
    return ours is not None and theirs is not None and math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-9)


def agree(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Every figure of every task, and those over all tasks that use all tasks."""
    pairs = zip(ours["tasks"], theirs["tasks"], strict=True)
    tasks = all(close(mine, other) for row, peer in pairs for mine, other in zip(row, peer, strict=True))
    wrong = [key for key, value in ours["over"].items() if not close(value, theirs["over"][key])]
    print(f"figures of {len(ours['tasks']):,} tasks: {'equal' if tasks else 'DIFFERENT'}")
    print(f"over all tasks, {', '.join(ours['over'])}: {'DIFFERENT: ' + ', '.join(wrong) if wrong else 'equal'}")
    return tasks and bool(ours["over"]) and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=320_000, help="rollouts")
    parser.add_argument("--gym-python", help="a Python that has nemo-gym")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one(*options.one)
    with tempfile.TemporaryDirectory(prefix="seatrial-bench-") as folder:
        place = CampaignDir(Path(folder) / "campaign")
        manifest = make_campaign(place, options.rows // REPEATS)
        with Units(place, manifest) as units:
            fill(place, units, manifest.shards)
            print(f"campaign: {manifest.units:,} units in {manifest.shards} shards", flush=True)
            mine = [sys.executable, __file__, "--one", str(place.root)]
            ours = measured([*mine, ""], "profile, figures (bar: 70,000 rows/s, 300 MiB)")
            measured([*mine, str(place.profile)], "profile, all files")
            if options.gym_python is None:
                print("Gym RewardProfiler: not measured (give --gym-python)")
                return 0
            merge_campaign(place, manifest, units)
        peer = measured([options.gym_python, "-c", PEER, str(place.merged / "rollouts.jsonl")], "Gym RewardProfiler", ours["rows"])
        print(f"ratio: {peer['cpu'] / ours['cpu']:.0f} in CPU seconds, {peer['kib'] / ours['kib']:.0f} in memory")
        return 0 if agree(ours, peer) else 1


if __name__ == "__main__":
    sys.exit(main())
