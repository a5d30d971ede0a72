"""What workers on every node of a running Ray cluster import, from where. Runs in the loop's interpreter.

- One task is pinned to each node that is alive, with the variables that training gives its workers. It brings its own code along. A node
  that does not answer before the deadline, or whose task fails, stands in the facts with its error.
- The exit code is 0 when the expected nodes all answered, else 1; what they answered is judged elsewhere.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.instruments import provenance

_POLL_S = 0.5


def here(packages: Sequence[str], expected: Mapping[str, str]) -> dict[str, Any]:
    rows = provenance.found(packages, f"ray worker on {socket.gethostname()}")
    for row in rows:
        root = expected.get(row["package"])
        row["expected"] = root
        row["ok"] = row["file"] is not None and (root is None or provenance.comes_from(row["file"], row["package"], root))
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": sys.executable,
        "python_version": platform.python_version(),
        "pythonpath": os.environ.get("PYTHONPATH", ""),
        "imports": rows,
    }


def collect(
    packages: Sequence[str], expected: Mapping[str, str], nodes: int, variables: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    """The facts of the cluster at RAY_ADDRESS; waits at most so long for `nodes` nodes and their answers."""
    ray = importlib.import_module("ray")
    ends = time.monotonic() + seconds
    facts: dict[str, Any] = {"expected_nodes": nodes, "nodes": [], "dead": [], "error": ""}
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), runtime_env={"env_vars": dict(variables)}, log_to_driver=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        facts["error"] = f"cannot connect to Ray: {error}"
        return facts
    try:
        alive = _alive(ray, nodes, ends)
        facts["dead"] = [_name(node) for node in ray.nodes() if not node["Alive"]]
        facts["nodes"] = _ask(ray, alive, packages, expected, ends)
    finally:
        ray.shutdown()
    return facts


def _alive(ray: Any, nodes: int, ends: float) -> list[dict[str, Any]]:
    """Nodes that are alive, as soon as there are enough, or at the deadline."""
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        if len(alive) >= nodes or time.monotonic() > ends:
            return alive
        time.sleep(_POLL_S)


def _ask(ray: Any, alive: list[dict[str, Any]], packages: Sequence[str], expected: Mapping[str, str], ends: float) -> list[dict[str, Any]]:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    ray.cloudpickle.register_pickle_by_value(provenance)
    task = ray.remote(num_cpus=0, max_retries=0)(here)
    asked = {}
    for node in alive:
        pinned = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[task.options(scheduling_strategy=pinned).remote(list(packages), dict(expected))] = node
    ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=max(1.0, ends - time.monotonic())) if asked else ([], [])
    rows = []
    for reference, node in asked.items():
        row = {**_name(node), "error": ""}
        if reference not in ready:
            row["error"] = "no answer before the deadline"
        else:
            try:
                row.update(ray.get(reference))
            except ray.exceptions.RayError as error:
                row["error"] = f"the task failed: {error}"
        rows.append(row)
    return rows


def _name(node: Mapping[str, Any]) -> dict[str, Any]:
    return {"node_id": node["NodeID"], "host": node["NodeManagerHostname"], "address": node["NodeManagerAddress"]}


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r}: NAME=VALUE is meant")
    return key, value


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a worker on every node of a Ray cluster where it imports packages from.")
    parser.add_argument("--out", required=True, help="file for the facts")
    parser.add_argument("--nodes", required=True, type=int, help="nodes that the cluster must have")
    parser.add_argument("--package", dest="packages", action="append", default=[], metavar="NAME", help="package to locate")
    pairs: dict[str, Any] = {"action": "append", "default": [], "type": _pair}
    parser.add_argument("--root", dest="roots", **pairs, metavar="PACKAGE=DIR", help="where it must come from")
    parser.add_argument("--env", dest="variables", **pairs, metavar="NAME=VALUE", help="variable of the workers")
    parser.add_argument("--deadline", type=float, default=300.0, metavar="SECONDS")
    words = parser.parse_args()
    expected = dict(words.roots)
    packages = list(dict.fromkeys((*words.packages, *expected)))
    facts = collect(packages, expected, words.nodes, dict(words.variables), words.deadline)
    temporary = Path(f"{words.out}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    temporary.replace(words.out)
    silent = [node for node in facts["nodes"] if node["error"]]
    print(f"ray_nodes: {len(facts['nodes'])} of {words.nodes} nodes, {len(silent)} silent; facts in {words.out}", file=sys.stderr)
    return 0 if len(facts["nodes"]) == words.nodes and not silent and not facts["error"] else 1


if __name__ == "__main__":
    sys.exit(main())
