"""Whether what generators received is what policies sent, from the facts of all processes of an attached run. Standard library only.

`problems` is empty only if something was sent, something was received, and all of it agrees: processes are paired by the number of
the refit, so a generator that missed one, got one twice or was started again does not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
SHOWN = 3


def problems(rows: Iterable[Row]) -> list[str]:
    """One sentence for each thing that is not proven."""
    kept = list(rows)
    hashes = [row for row in kept if row.get("fact") == "hashes"]
    sides = {side: [row for row in hashes if row.get("side") == side] for side in ("sent", "relayed", "received")}
    found = [f"the probe met an error in {row.get('where')}: {row.get('error')}" for row in kept if row.get("fact") == "probe_error"]
    found += _attachments([row for row in kept if row.get("fact") == "attached"])
    found += [f"map of {row['replica']}: {text}" for row in kept if row.get("fact") == "map" for text in _map(row)]
    found += _uncovered(kept)
    found += [f"{_who(row)}: {text}" for side in sides.values() for row in side for text in row["problems"]]
    found += [f"nothing was {side}" for side in ("sent", "received") if not sides[side]]
    exported = {row["version"] for row in sides["sent"]}
    for version in sorted(exported | {row["version"] for row in [*sides["received"], *sides["relayed"]]}):
        found += _version(version, *([row for row in side if row["version"] == version] for side in sides.values()))
    return found + _counts(sides["sent"], sides["received"])


def _attachments(rows: list[Row]) -> list[str]:
    """Both sides must have been found, and whatever was found must have had what is watched."""
    found = []
    for side in ("generator", "policy"):
        mine = [row for row in rows if row["side"] == side]
        if not any(row["found"] for row in mine):
            found.append(f"no process has a {side} whose entry points are known here")
    for row in rows:
        if not row["optional"] and not row["found"]:
            what = "has no " + (", ".join(row["missing"]) or "entry point") if row["owner_found"] else "is not there"
            found.append(f"{row['module']}: {row['owner'] or 'the module'} {what} in this version")
    return list(dict.fromkeys(found))


def _map(row: Row) -> list[str]:
    """What the coordinate map itself shows to be wrong."""
    made = [] if row["restored"] else ["the weights were not restored bit for bit after it was learned"]
    return made + [f"{name}: {text}" for name, text in row.get("misplaced", {}).items()]


def _uncovered(rows: list[Row]) -> list[str]:
    """Replicas that learned their map again (another model, another export) without a refit after it, which shows the coverage:
    what was written before speaks of the model that was there before.
    """
    maps: dict[str, int] = {}
    waiting: set[str] = set()
    for row in rows:
        if row.get("fact") == "map":
            maps[row["replica"]] = maps.get(row["replica"], 0) + 1
            waiting.add(row["replica"])
        elif row.get("fact") == "coverage":
            waiting.discard(row["replica"])
    return [f"map of {name}: learned again, and no refit after that shows the coverage" for name in sorted(waiting) if maps[name] > 1]


def _version(version: int, sent: list[Row], relayed: list[Row], received: list[Row]) -> list[str]:
    """One refit: every name that arrived has the hash with which it was sent, and every name that was sent arrived."""
    origin: dict[str, set[str]] = {}
    for row in sent:
        for name, value in row["hashes"].items():
            origin.setdefault(name, set()).add(value)
    found = [f"refit {version}: senders disagree on {name}" for name, values in origin.items() if len(values) > 1][:SHOWN]
    for row in [*relayed, *received]:
        off = [name for name, value in row["hashes"].items() if value not in origin.get(name, ())]
        if off:
            found.append(
                f"refit {version}: {_who(row)} got {len(off)} of {len(row['hashes'])} names otherwise than sent: {', '.join(off[:SHOWN])}"
            )
    arrived = {name for row in received for name in row["hashes"]}
    lost = [name for name in origin if name not in arrived]
    if received and lost:
        found.append(f"refit {version}: {len(lost)} names were sent and reached no generator: {', '.join(lost[:SHOWN])}")
    return found


def _counts(sent: list[Row], received: list[Row]) -> list[str]:
    """Every generator got as many refits as the policy sent, each once."""
    last = max((row["version"] for row in sent), default=0)
    got: dict[str, list[int]] = {}
    for row in received:
        got.setdefault(row["incarnation"], []).append(row["version"])
    off = {name: seen for name, seen in got.items() if len(seen) != last or any(a != b for a, b in enumerate(seen, 1))}
    return [f"generator {name}: refits {seen}, although {last} were sent" for name, seen in off.items()]


def _who(row: Row) -> str:
    return f"{row['side']} by {row.get('replica') or row['process']}"
