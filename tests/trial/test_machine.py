"""What of this machine is in the way of a trial."""

from __future__ import annotations

import locale
import os
import resource
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import psutil
import pytest

from seatrial.core.errors import FindingCode, Severity
from seatrial.core.loop import Footprint
from seatrial.core.verdict import Boundary
from seatrial.trial import preflight
from tests.trial.fake import FakeLoop


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs on this machine."""
    monkeypatch.setattr(psutil, "process_iter", lambda _: iter(()))


def test_git_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.git_here().severity is Severity.OK
    monkeypatch.setattr(shutil, "which", lambda _: None)
    found = preflight.git_here()
    assert (found.severity, found.code, bool(found.fix)) == (Severity.WARNS, FindingCode.GIT, True)


@pytest.mark.parametrize(("name", "count"), [("UTF-8", 0), ("utf8", 0), ("ISO-8859-1", 1), ("ANSI_X3.4-1968", 1)])
def test_a_locale_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    monkeypatch.setattr(locale, "getpreferredencoding", lambda _: name)
    assert [found.severity for found in preflight.encoding()] == [Severity.WARNS] * count


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


def test_a_directory_for_temporary_files_that_is_none(tmp_path: Path) -> None:
    warning, _ = preflight.variables({"TMPDIR": str(tmp_path / "none")})
    assert (warning.severity, warning.path) == (Severity.WARNS, str(tmp_path / "none"))
    assert len(preflight.variables({"TMPDIR": str(tmp_path)})) == 1


@pytest.mark.parametrize(("hard", "count"), [(4096, 1), (8192, 0), (resource.RLIM_INFINITY, 0)])
def test_too_few_open_files_for_ray(monkeypatch: pytest.MonkeyPatch, hard: int, count: int) -> None:
    loop = FakeLoop()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    assert list(preflight.open_files(loop)) == []
    loop.footprint = Footprint(ray=True)
    assert [found.severity for found in preflight.open_files(loop)] == [Severity.WARNS] * count


@pytest.mark.usefixtures("no_ray")
def test_a_ray_that_runs_already_warns(tmp_path: Path) -> None:
    known = {"RAY_TMPDIR": str(tmp_path)}
    place = tmp_path / "ray" / "ray_current_cluster"
    assert list(preflight.running_ray(known)) == []
    place.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        place.write_text(address)
        (found,) = preflight.running_ray(known)
        assert (found.severity, found.code, found.fix) == (Severity.WARNS, FindingCode.RAY, "ray stop")
        assert (address in found.message, found.path) == (True, str(place))
        assert list(preflight.running_ray({**known, preflight.RAY_NODES: "2"})) == [], "the trial's own job started it"
        (named,) = preflight.running_ray({**known, "RAY_ADDRESS": address})
        assert named.fix == "unset RAY_ADDRESS"
        assert "nothing answers" not in named.message
    assert list(preflight.running_ray(known)) == [], "it has ended"
    (dead,) = preflight.running_ray({**known, "RAY_ADDRESS": f"ray://{address}"})
    assert "nothing answers" in dead.message
    for odd in ("no address", "", "host:99999999999999", "\x00:1"):
        place.write_text(odd)
        assert list(preflight.running_ray(known)) == []
    place.unlink()
    os.mkfifo(place)
    assert list(preflight.running_ray(known)) == [], "and no pipe is waited for"
    assert list(preflight.running_ray({**known, "RAY_ADDRESS": "local"})) == [], "that starts a new one"


@pytest.mark.parametrize(
    ("name", "uid", "status", "count"),
    [
        ("raylet", os.getuid(), psutil.STATUS_SLEEPING, 1),
        ("gcs_server", os.getuid(), psutil.STATUS_RUNNING, 1),
        ("raylet", os.getuid() + 1, psutil.STATUS_SLEEPING, 0),
        ("raylet", os.getuid(), psutil.STATUS_ZOMBIE, 0),
        ("python3", os.getuid(), psutil.STATUS_SLEEPING, 0),
    ],
)
def test_processes_of_a_ray_of_this_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, uid: int, status: str, count: int
) -> None:
    process = SimpleNamespace(pid=7, info={"name": name, "uids": SimpleNamespace(real=uid), "status": status})
    monkeypatch.setattr(psutil, "process_iter", lambda _: iter([process]))
    found = list(preflight.running_ray({"RAY_TMPDIR": str(tmp_path)}))
    assert [(item.severity, "process 7" in item.message) for item in found] == [(Severity.WARNS, True)] * count
