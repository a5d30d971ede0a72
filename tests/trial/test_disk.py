"""Room on disks: too little is noticed before anything is written, enough raises no alarm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from seatrial.core.errors import BlockedError, FindingCode, Severity
from seatrial.core.files import room_at
from seatrial.core.loop import Footprint
from seatrial.core.records import Finding
from seatrial.core.verdict import Boundary
from seatrial.trial import preflight
from seatrial.trial.plan import make_plan, requested
from seatrial.trial.preflight import DiskNeed
from seatrial.trial.staging import stage
from tests.cli.command import inside
from tests.trial.fake import FakeLoop

RAY = Footprint(tmp_mb=300, shm_mb=200, ray=True)


def with_room(
    monkeypatch: pytest.MonkeyPatch,
    free_mb: float = 10_000,
    inodes: int = 10**6,
    files: int = 10**7,
    read_only: bool = False,
    total_mb: float = 1e6,
) -> None:
    """Every filesystem has this much room."""
    flag = os.ST_RDONLY if read_only else 0
    found = SimpleNamespace(f_blocks=int(total_mb), f_frsize=10**6, f_bavail=free_mb, f_favail=inodes, f_files=files, f_flag=flag)
    monkeypatch.setattr(os, "statvfs", lambda _: found)


def need(path: Path, mb: float = 100) -> DiskNeed:
    return DiskNeed("run directory", path, mb, 2_000, "choose another place")


def bad(path: Path) -> list[Finding]:
    return [found for found in preflight.room_findings([need(path)]) if not found.ok]


@pytest.mark.parametrize(("free", "ok"), [(99, False), (100, True), (0, False)])
def test_room_is_measured_where_it_will_be_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, ok: bool) -> None:
    with_room(monkeypatch, free)
    (found,) = preflight.room_findings([need(tmp_path / "not" / "yet")])
    assert (found.ok, bool(found.fix), found.code, found.boundary) == (ok, not ok, FindingCode.DISK, Boundary.ENVIRONMENT)
    assert found.message == f"{free:.0f} MB free at {tmp_path}, 100 MB needed"
    assert found.path == str(tmp_path)


def test_places_on_one_disk_share_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_room(monkeypatch, 150)
    (found,) = preflight.room_findings([need(tmp_path / "a"), need(tmp_path / "b")])
    assert not found.ok
    assert "200 MB needed (run directory 100, run directory 100)" in found.message


def test_inodes_run_out_before_space_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_room(monkeypatch, inodes=1_999)
    assert [found.code for found in bad(tmp_path)] == [FindingCode.INODES]
    with_room(monkeypatch, inodes=2_000)
    assert bad(tmp_path) == []
    with_room(monkeypatch, inodes=0, files=0)
    assert bad(tmp_path) == [], "this filesystem does not count them"


def test_a_disk_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_room(monkeypatch, read_only=True)
    (found,) = bad(tmp_path)
    assert (found.code, "read-only" in found.message) == (FindingCode.NOT_WRITABLE, True)
    with_room(monkeypatch)
    assert bad(tmp_path) == []
    monkeypatch.setattr(os, "access", lambda *_: False)
    (found,) = bad(tmp_path)
    assert (found.code, "may not write" in found.message) == (FindingCode.NOT_WRITABLE, True)


def test_a_trial_needs_its_run_directory_and_temporary_files(tmp_path: Path) -> None:
    loop = FakeLoop()
    loop.footprint = RAY
    plan = make_plan(loop, requested(loop, (0, 1)), None)
    run, temporary = preflight.needs(loop, plan, tmp_path, None, {"TMPDIR": "/var/tmp"})
    assert (run.path, run.mb) == (tmp_path, 202), "two levels of 1 MB each, and some to spare"
    assert (temporary.path, temporary.mb) == (Path("/var/tmp"), 300)


def test_an_environment_that_must_be_built_needs_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path))
    monkeypatch.setattr("seatrial.runtime.environments.Environments.unbuilt_mb", lambda *_: 1800)
    loop = FakeLoop()
    plan = make_plan(loop, requested(loop, (0,)), None)
    assert [item.mb for item in preflight.needs(loop, plan, tmp_path, None, {})][2:] == [1800]
    assert len(preflight.needs(loop, plan, tmp_path, Path("python"), {})) == 2, "the user's own is built already"


def test_ray_wants_shared_memory_and_a_disk_that_is_not_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = FakeLoop()
    monkeypatch.setattr(preflight, "SHARED", tmp_path)
    with_room(monkeypatch, free_mb=64, total_mb=64)
    assert list(preflight.shared_memory(loop)) == [], "it shares nothing"
    loop.footprint = RAY
    (found,) = preflight.shared_memory(loop)
    assert (found.severity, found.code) == (Severity.WARNS, FindingCode.SHARED_MEMORY)
    assert list(preflight.nearly_full(loop, {})) == []
    with_room(monkeypatch, free_mb=4_000, total_mb=100_000)
    assert list(preflight.shared_memory(loop)) == []
    (found,) = preflight.nearly_full(loop, {"RAY_TMPDIR": str(tmp_path)})
    assert (found.severity, found.path) == (Severity.WARNS, str(tmp_path))


def test_a_full_disk_blocks_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = FakeLoop()
    plan = make_plan(loop, requested(loop, (0,)), None)
    with_room(monkeypatch, 100)
    with pytest.raises(BlockedError, match=r"100 MB free at .*, 301 MB needed") as caught:
        preflight.require_room(loop, plan, tmp_path / "run", None, {})
    assert (caught.value.boundary, bool(caught.value.fix)) == (Boundary.ENVIRONMENT, True)
    with_room(monkeypatch)
    preflight.require_room(loop, plan, tmp_path / "run", None, {})


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of one megabyte, where one can be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_small_disk_is_left_as_it_was(small: Path) -> None:
    assert room_at(small).free_mb < 2
    answer = inside("run", "trl", "--level", "0", "--out", small / "run")
    assert answer.code == 99
    assert f"1 MB free at {small}" in answer.err
    assert list(small.iterdir()) == []


@pytest.mark.parametrize("room", [{"free_mb": 1}, {"inodes": 10}, {"read_only": True}])
def test_a_probe_stages_nothing_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: dict[str, int]) -> None:
    with_room(monkeypatch, **room)  # type: ignore[arg-type]
    with pytest.raises(BlockedError) as told:
        stage(tmp_path / "run")
    assert str(tmp_path) in told.value.message
    assert "--out" in told.value.fix
    assert list(tmp_path.iterdir()) == []
