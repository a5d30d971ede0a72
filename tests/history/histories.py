"""Runs and files of runs, for tests of the history."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial.core.errors import UserError
from seatrial.history.metric_gate import Gate, GateSettings, gate_run
from seatrial.history.store import Kind, Point, Store, StoredRun, point
from tests.cli.command import inside

COMMIT = "f1062bd3fd95fc64443e2d9ee4a35fc654ba897e"
TEST = "test_hf_ray_policy::test_lm_policy_generation"


def run(number: int, **other: Any) -> StoredRun:
    """A trusted run, the `number`-th."""
    plain: dict[str, Any] = {
        "project": "p",
        "kind": Kind.TEST,
        "name": "unit",
        "commit": f"{number:040x}",
        "branch": "main",
        "time": 1e9 + number,
        "machine": "m",
        "passed": True,
        "trusted": True,
        "digest": f"d{number}",
    }
    return StoredRun(**(plain | other))


def points(metric: str, *values: Any) -> list[Point]:
    """Values at the steps 1, 2, …"""
    return [point(metric, value, step) for step, value in enumerate(values, start=1)]


def filled(path: Path, count: int = 10, metric: str = "loss") -> Store:
    """A store with runs whose metric is their number."""
    store = Store(path, write=True)
    for number in range(count):
        store.add(run(number), [point(metric, float(number))])
    return store


def gate(store: Store, key: int, *, patterns: Sequence[str] = (), exclude: Sequence[str] = (), **settings: Any) -> Gate:
    """Judge the run of that number, as `seatrial history gate RUN` does."""
    how = GateSettings(**settings)
    tested = store.run(key)
    if tested is None:
        raise UserError(f"no run {key} in {store.path}", "seatrial history runs lists them")
    return gate_run(store, tested, store.of_run(key, take=how.take), how, patterns, exclude)


def results(path: Path, **other: Any) -> Path:
    """A unit_results.json of the older schema, with `other` keys beside or instead."""
    data: dict[str, Any] = {
        "exit_status": 0,
        "git_commit": COMMIT,
        "start_time": "2025-03-24 23:34:12",
        "metrics": {TEST: {"avg_prob_mult_error": 1.0000039339065552, "_elapsed": 3.1}},
        "gpu_types": ["NVIDIA H100 80GB HBM3"],
        "coverage": "[n/a] run with --cov=p",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data | other), encoding="utf-8")
    return path


def history(*words: str, store: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`seatrial history …` as a process would answer. It is called in this one: hundreds of calls, a third of a second each."""
    answer = inside("history", *words, "--store", store, cwd=cwd)
    return subprocess.CompletedProcess(words, answer.code, answer.out, answer.err)
