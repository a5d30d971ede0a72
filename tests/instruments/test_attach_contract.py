"""What the adapters assume of upstream, against recorded signatures; and against a checkout, where one is given.

SEATRIAL_CHECK_VERL=/path/to/verl and SEATRIAL_CHECK_NEMO_RL=/path/to/RL compare with the source there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from seatrial.instruments.engines import nemo_rl_hooks, verl_hooks
from seatrial.instruments.engines.attach import GENERATOR, POLICY, Target
from tests.instruments.signatures import file_of, signature

DATA = Path(__file__).parents[1] / "data" / "refit"
STANDINS = Path(__file__).parent / "standins"
ADAPTERS = (verl_hooks, nemo_rl_hooks)
CHECKOUTS = {"verl": "SEATRIAL_CHECK_VERL", "nemo_rl": "SEATRIAL_CHECK_NEMO_RL"}


def framework(adapter: ModuleType) -> str:
    """Adapters are named after what they adapt."""
    return adapter.__name__.rpartition(".")[2].removesuffix("_hooks")


by_name = pytest.mark.parametrize("adapter", ADAPTERS, ids=framework)


def recorded(adapter: ModuleType) -> list[dict[str, Any]]:
    """The versions of upstream that were looked at, newest first."""
    found: list[dict[str, Any]] = json.loads((DATA / f"{framework(adapter)}.json").read_text())["versions"]
    return found


def targets(adapter: ModuleType) -> list[Target]:
    """All of an adapter, with what it treats in its own way."""
    return [*adapter.TARGETS, *([verl_hooks.SEND] if adapter is verl_hooks else [])]


def find(version: dict[str, Any], target: Target, name: str) -> dict[str, Any] | None:
    """One recorded signature."""
    path = target.module.replace(".", "/") + ".py"
    rows = [row for row in version["signatures"] if (row["path"], row["class"], row["name"]) == (path, target.owner, name)]
    return rows[0] if rows else None


@by_name
def test_every_entry_point_is_one_of_upstream(adapter: ModuleType) -> None:
    for target in targets(adapter):
        for name in target.calls:
            assert any(find(version, target, name) for version in recorded(adapter)), f"{target.module}: {name} is in no recorded version"


@by_name
def test_every_recorded_version_can_be_watched_on_the_side_that_generates(adapter: ModuleType) -> None:
    for version in recorded(adapter):
        mine = [target for target in targets(adapter) if target.extends]
        assert any(find(version, target, name) for target in mine for name in target.calls), version["ref"]


@by_name
def test_streams_are_where_the_adapter_looks_for_them(adapter: ModuleType) -> None:
    for version in recorded(adapter):
        for target in targets(adapter):
            if target.side == POLICY:
                for row in filter(None, (find(version, target, name) for name in target.calls)):
                    assert target.stream in row["parameters"], (version["ref"], row)
                    assert not target.mapped or target.mapped in row["parameters"], (version["ref"], row)
            elif stream := find(version, target, target.stream):
                assert stream["parameters"][:2] == ["self", "weights"], (version["ref"], stream)


@by_name
def test_entry_points_of_generators_are_not_asynchronous(adapter: ModuleType) -> None:
    rows = [find(version, target, name) for version in recorded(adapter) for target in targets(adapter) for name in target.calls
            if target.side == GENERATOR]  # fmt: skip
    assert not any(row["async"] for row in rows if row)


def test_conditions_on_who_sends_name_real_parameters() -> None:
    head = recorded(nemo_rl_hooks)[0]
    packed = next(target for target in nemo_rl_hooks.TARGETS if target.mapped)
    row = find(head, packed, "packed_broadcast_producer")
    assert row is not None
    assert {"group", "src"} <= set(row["parameters"])


@by_name
def test_stand_ins_have_the_signatures_of_upstream(adapter: ModuleType) -> None:
    head, compared = recorded(adapter)[0], 0
    for target in targets(adapter):
        file = file_of(STANDINS, target.module)
        for row in [row for row in head["signatures"] if file.is_file() and row["path"] == target.module.replace(".", "/") + ".py"]:
            made = signature(file.read_text(), row["class"], row["name"])
            if made is not None:
                compared += 1
                assert made["parameters"] == row["parameters"], row
    assert compared >= 4


@by_name
def test_a_given_checkout_is_as_recorded(adapter: ModuleType) -> None:
    place = os.environ.get(CHECKOUTS[framework(adapter)])
    if not place:
        pytest.skip(f"{CHECKOUTS[framework(adapter)]} names no checkout")
    for row in recorded(adapter)[0]["signatures"]:
        file = Path(place, row["path"])
        assert file.is_file(), f"{row['path']} is gone: look where {row['class'] or 'its functions'} went, and add a target"
        now = signature(file.read_text(), row["class"], row["name"])
        assert now is not None, f"{row['path']}: {row['class']} has no {row['name']} any more"
        assert now == {"parameters": row["parameters"], "async": row["async"]}, f"{row['path']}: {row['name']} is now {now}"
