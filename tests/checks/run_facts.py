"""Facts of a small clean run, written by hand: two replicas, three updates, every transport. Tests falsify one of them at a time."""

from __future__ import annotations

from typing import Any

from seatrial.checks.probe_facts import Facts, Row
from seatrial.checks.refit_judge import TRANSPORTS, JudgedRefitProbe, RefitRequest

NAMES = ("model.embed.weight", "model.layers.0.q.weight", "model.layers.1.q.weight", "model.layers.2.q.weight", "model.norm.weight")
REPLICAS = ("0", "1")
STEPS = 3
DRIVER = RefitRequest(source="driver", engine="vllm", model="tiny-llama", steps=STEPS, transports=TRANSPORTS)
FOREIGN = RefitRequest(source="facts", model="facts.jsonl")


def hashes(version: int) -> dict[str, str]:
    """What the policy holds at a version; the first refit brings what was there before, and the norm never changes."""
    return {name: f"{name}@{version if name != 'model.norm.weight' else 1}" for name in NAMES}


def clean() -> list[Row]:
    """The rows of the run, in the order in which a driver writes them."""
    rows: list[Row] = []
    for index in range(STEPS + 1):
        rows += _refit(index)
        if index < STEPS:
            rows += [sample(f"{index}-{n}", index + 1, REPLICAS[n % 2]) for n in range(4)]
            rows.append({**of(rows, "mismatch", step=index)[0], "of": "sampled", "sequences": 4})
    for replica in REPLICAS:
        rows.append({"fact": "map", "replica": replica, "elements": 640, "runs": 5, "duplicates": {}, "restored": True, "misplaced": {}})
        rows.append(
            {
                **{"fact": "coverage", "replica": replica, "tensors": 8, "written": list(NAMES), "shared": {"head.weight": NAMES[0]}},
                **{
                    "derived": {"rope.cos": "recomputed"},
                    "recomputed": ["rope.cos"],
                    "moved": {},
                    "constant": ["rope.inv_freq"],
                    "idle": [],
                },
                **{"never_changed": [], "unexported": []},
                **{"unconsumed": {}, "opaque": {}, "unwritten": {"rope.inv_freq": 8, NAMES[0]: 64}},
                "padding": {NAMES[0]: {"elements": 64, "constant": True}},
            }
        )
    return rows


def sample(name: str, version: int, replica: str) -> Row:
    """One sample."""
    return {"fact": "sample", "id": name, "version": version, "replica": replica, "incarnation": f"life-{replica}"}


def _refit(index: int) -> list[Row]:
    version, moved = index + 1, 0 if index == 0 else len(NAMES) - 1
    rows: list[Row] = [{"fact": "hashes", "side": "sent", "version": version, "step": index, "hashes": hashes(version)}]
    for replica in REPLICAS:
        held = {"replica": replica, "incarnation": f"life-{replica}", "version": version}
        rows.append({"fact": "hashes", "side": "received", "step": index, **held, "hashes": hashes(version)})
        rows.append({"fact": "hashes", "side": "live", "step": index, **held, "hashes": hashes(version), "zeros": [], "nans": {}})
        rows.append({"fact": "version", **held, "root": f"root{version}"})
        row: dict[str, Any] = {"fact": "refit", "index": index, "step": index, **held, "names": len(NAMES), "bytes": 1280}
        row |= {
            "transport": TRANSPORTS[index % 3],
            "kind": "difference" if index % 3 == 2 else "overwrite",
            "changed": 6 if moved else 0,
            "elements": 640,
        }
        row |= {"produced": f"root{version}", "consumed": f"root{version}", "wrong_names": [], "refused": None, "committed": True}
        row |= {
            "stale_names": moved,
            "touched_names": moved,
            "stale_max_dlogp": 0.2,
            "fresh_max_dlogp": 1e-7,
            "methods": {"read": 4, "forward": 1},
        }
        rows.append(row)
    figures = {"p50": 1.0, "p90": 1.0, "p99": 1.001, "max_sequence": 1.001, "outlier_share": 0.0, "max_abs": 0.001}
    rows.append({"fact": "mismatch", "step": index, "value": 1.0001, "tokens": 96, "sequences": 8, "nonfinite": 0, **figures})
    return rows


def hooked() -> list[Row]:
    """The clean run as hooks in a policy and two generators write it."""
    rows = [row for row in clean() if row["fact"] not in ("sample", "mismatch")]
    for row in of(rows, "refit"):
        row.update(transport="update_weights_from_ipc", kind=None, step=row["version"], changed=None, elements=None)
        del row["committed"]
        row.update({"stale_max_dlogp": None, "fresh_max_dlogp": None, "methods": {"read": len(NAMES)}})
    for row in of(rows, "refit", index=0):
        row.update(stale_names=len(NAMES), touched_names=len(NAMES))
    for row in of(rows, "hashes"):
        row.update(process=f"host:{row.get('replica')}", problems=[], complete=True)
        row.setdefault("incarnation", "policy")
    for row in of(rows, "coverage"):
        del row["unexported"]  # hooks see no policy, only what it sends
    runtime = dict.fromkeys([*NAMES, "head.weight", "rope.cos", "rope.inv_freq"], "bits")
    for row in of(rows, "hashes", side="received"):
        row["runtime"] = runtime
    for side in ("policy", "generator"):
        found = {"module": "m", "owner": "W", "owner_found": True, "found": ["f"], "missing": [], "optional": False}
        rows.append({"fact": "attached", "side": side, **found})
    return rows


def of(rows: list[Row], fact: str, **match: Any) -> list[Row]:
    """The rows of one kind, to be falsified in place."""
    found = [row for row in rows if row["fact"] == fact and all(row.get(key) == value for key, value in match.items())]
    assert found, f"no fact {fact} with {match}"
    return found


def facts(rows: list[Row]) -> Facts:
    """The rows as the judge reads them."""
    return Facts(tuple(rows))


def missed(judged: JudgedRefitProbe) -> set[str]:
    """Names of the checks that were not met."""
    return {check.name for check in judged.checks if not check.passed}
