"""What the container of a trial is given to see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.core.records import Plan, RepoState
from seatrial.trial.slurm_job import mounts


def plan(repo: Path | None = None, *arguments: str, model: str = "m", **options: str) -> Plan:
    changes = (RepoState(name="change", path=str(repo), commit="0" * 40, branch=None),) if repo else ()
    return Plan(loop="trl", levels=(), model=model, changes=changes, arguments=arguments, options=options)


def seen(wanted: Plan, run: Path, python: str = "python3", **environ: str) -> set[str]:
    """Places that are the same inside and outside."""
    found = mounts(wanted, run, python, environ)
    assert len(set(found)) == len(found)
    assert all(mount.split(":")[0] == mount.split(":")[1] for mount in found)
    return {mount.split(":")[0] for mount in found}


def made(*places: Path) -> tuple[Path, ...]:
    for place in places:
        place.mkdir(parents=True)
    return places


def git(where: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(where), *words], check=True, capture_output=True)


def test_the_run_directory_is_mounted_before_it_is_made(tmp_path: Path) -> None:
    assert str(tmp_path / "run") in seen(plan(), tmp_path / "run")


def test_caches_that_are_set_and_there_are_mounted(tmp_path: Path) -> None:
    (cache,) = made(tmp_path / "hf")
    found = seen(plan(), tmp_path / "run", HF_HOME=str(cache), HF_HUB_CACHE=str(tmp_path / "gone"), UV_CACHE_DIR="relative")
    assert str(cache) in found
    assert not {str(tmp_path / "gone"), "relative"} & found


def test_model_options_and_arguments_that_name_places_are_mounted(tmp_path: Path) -> None:
    model, option, override, config = made(*(tmp_path / name for name in ("model", "option", "override", "config")))
    words = ("--config", str(config), f"++policy.model_name={override}", "x=/no/such/place", f"y=/{'z' * 5000}")
    found = seen(plan(None, *words, model=str(model), nemo_rl=str(option), gpus="2"), tmp_path / "run")
    assert {str(model), str(option), str(override), str(config)} <= found
    assert "/no/such/place" not in found


def test_nothing_of_the_operating_system_is_mounted_over_the_containers_own(tmp_path: Path) -> None:
    found = seen(plan(None, "x=/", "y=/usr", "--config", "/etc"), tmp_path / "run", "/usr/bin/python3", HF_HOME="/")
    assert not {"/", "/usr", "/etc"} & found


def test_an_interpreter_of_the_users_own_comes_along(tmp_path: Path) -> None:
    (place,) = made(tmp_path / "venv" / "bin")
    found = seen(plan(), tmp_path / "run", str(place / "python"))
    assert {str(place.parent), sys.prefix} <= found


def test_the_python_below_seatrial_comes_along_unless_it_is_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (base,) = made(tmp_path / "python-3.11")
    monkeypatch.setattr(sys, "base_prefix", str(base))
    assert str(base) in seen(plan(), tmp_path / "run")


def test_a_path_with_dots_is_mounted_where_it_leads(tmp_path: Path) -> None:
    made(tmp_path / "desk", tmp_path / "checkout")
    found = seen(plan(None, nemo_rl=f"{tmp_path}/desk/../checkout"), tmp_path / "run")
    assert str(tmp_path / "checkout") in found
    assert not any(".." in place for place in found)


def test_a_worktree_brings_the_repository_that_it_belongs_to(tmp_path: Path) -> None:
    (main,) = made(tmp_path / "main")
    git(main, "init", "-q")
    git(main, "commit", "-q", "--allow-empty", "-m", "a")
    git(main, "worktree", "add", "-q", str(tmp_path / "tree"))
    assert {str(tmp_path / "tree"), str(main / ".git")} <= seen(plan(tmp_path / "tree"), tmp_path / "run")
    assert str(main / ".git") not in seen(plan(main), tmp_path / "run"), "it lies in the checkout"


def test_a_place_that_cannot_be_mounted_is_refused(tmp_path: Path) -> None:
    (cache,) = made(tmp_path / "a,b")
    with pytest.raises(UserError, match="cannot be mounted"):
        mounts(plan(), tmp_path / "run", "python3", {"HF_HOME": str(cache)})
