"""The directory of a campaign: how much was collected, and the figures of its reward profile.

- Metrics are `collected/<count>` of the merge, and `<group>/mean`, `<group>/pass@k`, … of the profile; `overall` is the group of all.
- It passed when every rollout that was asked for is there. A campaign names no commit: to be a baseline, one must be stated.
- A campaign that goes on takes the place of its earlier import.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from seatrial.model.errors import UserError
from seatrial.regress.history.importers.draft import Draft, digest_of, parse, read_bytes
from seatrial.regress.history.record import Kind, Point, point

_COUNTS = ("expected", "ok", "failed", "missing", "coverage", "duplicates", "conflicts", "torn", "foreign")
_AT = {"pass": "pass_at", "best": "best_at", "majority": "majority_at"}
_NUMBERS = ("reward", "input_tokens", "output_tokens", "turns", "latency_s")


def read(path: Path) -> Draft:
    """What the campaign collected; its files are read as data, since this room knows nothing of campaigns."""
    merge, profile = path / "merged" / "merge.json", path / "profile" / "profile.json"
    content = read_bytes(path / "manifest.json")
    manifest = parse(path / "manifest.json", content)
    parts, points, complete = [content], list[Point](), list[bool]()
    if merge.is_file():
        parts.append(read_bytes(merge))
        data = parse(merge, parts[-1])
        points += [point(f"collected/{name}", data[name]) for name in _COUNTS]
        complete.append(data["missing"] == 0 and data["conflicts"] == 0)
    if profile.is_file():
        data = parse(profile, read_bytes(profile))
        points += [one for group in data["groups"] for one in _group(group)]
        complete.append(data["groups"][0]["missing"] == 0 and data["journal"]["conflicts"] == 0)
        parts.append(repr(data | {"made": ""}).encode())
    if not points:
        raise UserError(f"{path}: neither merged/merge.json nor profile/profile.json", f"seatrial rollouts merge {path}")
    return Draft(
        kind=Kind.CAMPAIGN,
        project=manifest["name"],
        name=f"{manifest['name']} {manifest['inputs_sha256'][:8]}",
        time=datetime.fromisoformat(manifest["made"]).timestamp(),
        passed=all(complete),
        source=path,
        digest=digest_of(Kind.CAMPAIGN, *parts),
        points=points,
        again=True,
    )


def _group(group: dict[str, Any]) -> list[Point]:
    """The figures of one group; those that are unknown stay so (null)."""
    start = "overall" if group["by"] == "overall" else f"{group['by']}/{group['name']}"
    found = {"mean": group["mean"]["value"], **{name: group[name] for name in ("coverage", "truncated", "never", "always")}}
    for what, key in _AT.items():
        found |= {f"{what}@{one['k']}": one["value"] for one in group[key]}
    for what in _NUMBERS:
        if group[what] is not None:
            found |= {f"{what}/mean": group[what]["mean"], f"{what}/p95": group[what]["p95"]}
    found |= {f"metrics/{name}": numbers["mean"] for name, numbers in group["metrics"].items()}
    return [point(f"{start}/{name}", value) for name, value in found.items()]
