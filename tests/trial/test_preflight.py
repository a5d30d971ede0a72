"""All findings before anything starts, and the environment of a loop's process."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError, FindingCode, Severity, UserError, code_of
from seatrial.core.loop import Context, Footprint, gather
from seatrial.core.records import Finding, RepoState, SubmoduleState
from seatrial.core.verdict import Boundary
from seatrial.evidence.repos import repo_state
from seatrial.loops import get_loop
from seatrial.trial import preflight
from seatrial.trial import preflight as machine
from seatrial.trial.plan import make_plan, requested
from tests.trial.fake import FakeLoop
from tests.trial.test_disk import with_room


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
    with_room(monkeypatch, 201)
    context = Context(run_dir=tmp_path, python=Path("python"), model="m")
    found = preflight.preflight(loop, plan, context, {"ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"})
    bad = [(item.name, item.code) for item in found if not item.ok]
    assert bad == [("variables", FindingCode.VARIABLES), ("disk", FindingCode.DISK), ("model", FindingCode.MODEL)]
    assert {"git", "ports", "memory"} <= {item.name for item in found if item.ok}


def test_a_loop_without_ray_is_not_warned_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warning = Finding(name="Ray", ok=True, message="runs", warns=True)
    monkeypatch.setattr(machine, "running_ray", lambda _: [warning])
    loop = FakeLoop()
    plan, context = make_plan(loop, (), None), Context(run_dir=tmp_path, python=Path("python"), model="m")
    assert warning not in preflight.of_loop(loop, plan, context, {})
    loop.footprint = Footprint(ray=True)
    assert warning in preflight.of_loop(loop, plan, context, {})


def test_no_check_hides_another() -> None:
    def blocked() -> Finding:
        raise BlockedError(Boundary.CLUSTER, "no cluster", "start one")

    def refused() -> list[Finding]:
        raise UserError("bad file", "repair it")

    def unreadable() -> list[Finding]:
        raise PermissionError(13, "Permission denied")

    good = Finding(name="ports", ok=True, message="fine")
    found = gather(blocked, lambda: good, refused, unreadable, lambda: [good])
    assert [(item.ok, item.message, item.fix) for item in found[:3]] == [
        (False, "no cluster", "start one"),
        (True, "fine", ""),
        (False, "bad file", "repair it"),
    ]
    assert [item.boundary for item in found] == [Boundary.CLUSTER, Boundary.ENVIRONMENT, Boundary.CONFIG, Boundary.ENVIRONMENT]
    assert [item.code for item in found if not item.ok] == [FindingCode.CHECK_FAILED] * 3
    assert len(found) == 4, "what is found twice is said once"


def repo(path: Path, *modules: tuple[str, str]) -> RepoState:
    states = tuple(SubmoduleState.model_validate({"path": name, "commit": "0", "state": state}) for name, state in modules)
    return RepoState(name="r", path=str(path), commit="0", branch=None, submodules=states)


def test_empty_submodules_are_found(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "file").touch()
    there = repo(tmp_path, ("empty", "uninitialised"), ("absent", "uninitialised"), ("copied", "uninitialised"), ("full", "clean"))
    (found,) = preflight.submodules([there])
    assert (found.severity, found.code) == (Severity.WARNS, FindingCode.SUBMODULES)
    assert found.fix == f"git -C {tmp_path} submodule update --init --recursive"
    assert "2 of 4 submodules are empty: empty, absent" in found.message
    assert list(preflight.submodules([repo(tmp_path, ("copied", "uninitialised"), ("full", "clean"), ("x", "other-commit"))])) == []


def test_a_submodule_that_was_never_checked_out(tmp_path: Path) -> None:
    def git(place: Path, *words: str) -> None:
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(place), *who, *words], check=True, capture_output=True)

    for name in ("inner", "outer"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q", "-b", "main")
        (tmp_path / name / "file").write_text(name)
        git(tmp_path / name, "add", "-A")
        git(tmp_path / name, "commit", "-q", "-m", "all")
    git(tmp_path / "outer", "submodule", "add", "-q", str(tmp_path / "inner"), "3rdparty/inner")
    git(tmp_path / "outer", "commit", "-q", "-m", "with it")
    assert list(preflight.submodules([repo_state(tmp_path / "outer")])) == []
    git(tmp_path, "clone", "-q", str(tmp_path / "outer"), str(tmp_path / "clone"))
    (found,) = preflight.submodules([repo_state(tmp_path / "clone")])
    assert "1 of 1 submodules are empty: 3rdparty/inner" in found.message


def test_every_name_of_a_finding_has_a_code() -> None:
    """Scripts rely on codes: a new name needs one of its own."""
    source = Path(preflight.__file__).parents[1]
    text = "\n".join(path.read_text(encoding="utf-8") for path in source.rglob("*.py"))
    made = r'(?:Finding\(\s*name=|\bfinding\(\s*|partial\(finding, )"([^"]+)"|configured_wrong\([^\n]*, "(\w+)"\)'
    names = {one or other for one, other in re.findall(made, text)} - {get_loop(name).title for name in ("verl", "nemo-rl")}
    assert {"GPUs", "vendored Bridge", "scripts", "disk"} <= names
    assert [name for name in sorted(names) if code_of(name) is FindingCode.OTHER] == []
    assert code_of("level 3") is FindingCode.LEVEL
    assert code_of("ray import megatron.bridge") is FindingCode.RAY_IMPORT
