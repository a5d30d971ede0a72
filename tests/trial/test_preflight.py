"""Findings before anything starts, and the environment of a loop's process."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import psutil
import pytest

from seatrial.model.loop import Context
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary
from seatrial.trial import preflight
from seatrial.trial.plan import make_plan, requested

from .fake import FakeLoop

Usage = namedtuple("Usage", "total used free")


def with_disk(monkeypatch: pytest.MonkeyPatch, free_mb: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, int(free_mb * 1e6)))


@pytest.mark.parametrize(("free", "ok"), [(299, False), (300, True), (0, False)])
def test_the_disk_needs_room_and_some_to_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, ok: bool) -> None:
    with_disk(monkeypatch, free)
    found = preflight.disk(tmp_path, 100)
    assert (found.ok, bool(found.fix)) == (ok, not ok)
    assert f"{free:.0f} MB free at {tmp_path}, 300 MB needed" in found.message
    assert found.boundary is Boundary.ENVIRONMENT


@pytest.mark.parametrize(("free", "ok"), [(899, False), (900, True)])
def test_the_largest_level_must_fit_into_memory(monkeypatch: pytest.MonkeyPatch, free: float, ok: bool) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free * 1e6))
    found = preflight.memory(900)
    assert (found.ok, bool(found.fix)) == (ok, not ok)


def test_a_port_that_cannot_be_bound_is_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> NoReturn:
        raise OSError(13, "Permission denied")

    assert preflight.ports().ok
    monkeypatch.setattr(preflight, "free_port", refuse)
    found = preflight.ports()
    assert (found.ok, found.boundary) == (False, Boundary.CLUSTER)


@pytest.mark.parametrize("name", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_variables_that_exclude_each_other_block(name: str) -> None:
    bad, note = preflight.variables({name: "0", "CUDA_VISIBLE_DEVICES": "0"})
    assert (bad.ok, bad.fix, note.ok) == (False, f"unset {name}", True)
    assert [found.ok for found in preflight.variables({name: "", "CUDA_VISIBLE_DEVICES": "0"})] == [True]
    assert [found.ok for found in preflight.variables({name: "0"})] == [True]


def test_variables_that_are_not_passed_on_are_mentioned() -> None:
    (note,) = preflight.variables({"PYTHONPATH": "/x", "RANK": "0", "HOME": "/h"})
    assert note.message == "not passed on to the loop: PYTHONPATH, RANK"
    assert preflight.variables({})[0].message == "no conflicting variables"


def test_a_process_gets_our_import_path_and_nobody_elses() -> None:
    caller = {
        "PYTHONPATH": "/evil",
        "PYTHONHOME": "/evil",
        "PYTHONSTARTUP": "/evil",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "HOME": "/h",
        "A": "1",
    }
    given = preflight.child_environment(caller, ("/checkout", "/instruments"), {"A": "2", "PYTHONPATH": "/other"})
    ours = {"PYTHONPATH": "/checkout:/instruments", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
    assert given == {"HOME": "/h", "A": "2"} | ours
    assert caller["A"] == "1"


def test_everything_is_found_and_the_loop_has_its_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Finding(name="model", ok=False, boundary=Boundary.DATA, message="none")
    loop = FakeLoop(finding=own)
    plan = make_plan(loop, requested(loop, (0, 1)), None)
    with_disk(monkeypatch, 201)
    context = Context(run_dir=tmp_path, python=Path("python"), model="m")
    found = preflight.preflight(loop, plan, context, {"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"})
    assert [(item.name, item.ok) for item in found] == [
        ("disk", False),  # two levels of 1 MB each, and 200 to spare
        ("memory", True),
        ("ports", True),
        ("variables", False),
        ("variables", True),
        ("model", False),
    ]
