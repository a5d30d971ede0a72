"""Environments of a bisect, really built: once per lock, never poisoned, and nothing of one commit in the run of another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import EnvironmentPlan
from seatrial.bisect.environment_cache import BisectEnvironments, Complete, ReadyEnvironment, contents
from seatrial.bisect.lockfile import BuildFailed
from seatrial.core import files
from seatrial.core.errors import BlockedError, UserError
from seatrial.runtime.filelock import exclusive
from tests.runtime.wheels import make_wheel, only_local

pytestmark = pytest.mark.slow  # nearly every test here lets pip build something

PIP = EnvironmentPlan(kind="pip", lock="requirements.lock")
SHOW = "import tiny, demo; print(tiny.VERSION, tiny.__file__, demo.__file__)"


@dataclass
class House:
    """A cache, trees of commits, and the lines that were said."""

    tmp: Path
    said: list[str] = field(default_factory=list)
    trees: int = 0

    def __post_init__(self) -> None:
        self.cache = BisectEnvironments(self.tmp / "cache")

    def tree(self, lock: str, **contents: str) -> Path:
        self.trees += 1
        tree = self.tmp / f"tree{self.trees}"
        (tree / "demo").mkdir(parents=True)
        for name, text in {"requirements.lock": lock, "demo/__init__.py": "", **contents}.items():
            (tree / name).write_text(text)
        return tree

    def ensure(self, tree: Path, plan: EnvironmentPlan = PIP, deadline_s: float = 120) -> ReadyEnvironment:
        return self.cache.ensure(tree, plan, self.said.append, deadline_s)

    def built(self) -> int:
        return sum(line.endswith(": creating") or line.endswith(": syncing") for line in self.said)

    def left(self) -> set[str]:
        """What the cache holds, without lock files."""
        return {path.name for path in (self.tmp / "cache").iterdir() if path.suffix != ".lock"}


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    for version in ("1.0", "2.0"):
        make_wheel(tmp_path / "wheels", "tiny", version)
    only_local(tmp_path / "wheels", monkeypatch)
    return House(tmp_path)


def output(ready: ReadyEnvironment, *argv: str) -> str:
    env = {**os.environ, **ready.variables}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True, cwd="/").stdout


def test_one_environment_per_lock_whatever_the_tree(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/home/me/checkout")
    monkeypatch.setenv("PIP_TARGET", str(house.tmp / "target"))
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    trees = [house.tree("tiny==1.0\n"), house.tree("# again\ntiny==1.0\n"), house.tree("tiny==2.0\n")]
    first, again, other = [house.ensure(tree) for tree in trees]
    assert [ready.built for ready in (first, again, other)] == [True, False, True]
    assert first.key == again.key != other.key
    assert first.python == again.python != other.python
    for tree, ready, version in zip(trees, (first, again, other), ("1.0", "1.0", "2.0"), strict=True):
        assert ready.python is not None
        venv = ready.python.parent.parent
        shown = output(ready, "python", "-c", SHOW).split()
        assert shown[0] == version
        assert Path(shown[1]).is_relative_to(venv)
        assert shown[2] == str(tree / "demo" / "__init__.py")
        assert ready.variables["VIRTUAL_ENV"] == str(venv)
        assert ready.variables["PYTHONNOUSERSITE"] == "1"
        assert "checkout" not in ready.variables["PYTHONPATH"]
    assert BisectEnvironments(house.tmp / "cache").ensure(trees[1], PIP, house.said.append, 60) == again
    assert house.built() == 2


def test_a_failed_build_leaves_its_log_only_and_is_not_repeated(house: House) -> None:
    tree = house.tree("tiny==1.0\nnowhere==1.0\n")
    with pytest.raises(BuildFailed, match=r"requirements\.lock: .*No matching distribution found for nowhere==1\.0") as first:
        house.ensure(tree)
    assert not first.value.transient
    (log,) = house.left()
    assert log.endswith(".failed.log")
    assert log in first.value.message
    with pytest.raises(BuildFailed) as second:
        house.ensure(house.tree("tiny==1.0\nnowhere==1.0\n"))
    assert second.value.message == first.value.message
    assert house.built() == 1
    # The failure says nothing of other locks, nor of the same one another day.
    assert house.ensure(house.tree("tiny==1.0\n")).built
    make_wheel(house.tmp / "wheels", "nowhere", "1.0")
    assert BisectEnvironments(house.tmp / "cache").ensure(tree, PIP, house.said.append, 60).built


def test_a_failure_of_the_machine_is_tried_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = house.tree("tiny==1.0\n")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(BuildFailed) as caught:
        house.ensure(tree)
    assert caught.value.transient
    monkeypatch.delenv("PIP_INDEX_URL")
    only_local(house.tmp / "wheels", monkeypatch)
    assert house.ensure(tree).built


@pytest.mark.parametrize("damage", ["marker", "torn", "interpreter", "installed", "removed", "unfinished"])
def test_a_broken_environment_is_built_from_scratch(house: House, damage: str) -> None:
    tree = house.tree("tiny==1.0\n")
    ready = house.ensure(tree)
    assert ready.python is not None
    venv = ready.python.parent.parent
    packages = next(venv.glob("lib/python*/site-packages"))
    match damage:
        case "marker":
            (venv.parent / "complete.json").unlink()
        case "torn":
            (venv.parent / "complete.json").write_text("{torn")
        case "interpreter":
            ready.python.unlink()
        case "installed":
            (packages / "extra-1.dist-info").mkdir()
        case "removed":
            shutil.rmtree(packages / "tiny-1.0.dist-info")
        case _:
            shutil.rmtree(venv)
    (venv.parent / "stray").touch()
    again = house.ensure(tree)
    assert again.built
    assert output(again, "python", "-c", SHOW).startswith("1.0 ")
    assert not (venv.parent / "stray").exists()
    assert not house.ensure(tree).built


def test_what_is_in_use_is_not_rebuilt(house: House) -> None:
    tree = house.tree("")
    ready = house.ensure(tree)
    assert ready.python is not None
    (ready.python.parents[2] / "complete.json").unlink()
    with subprocess.Popen([str(ready.python), "-c", "input()"], stdin=subprocess.PIPE) as user:
        with pytest.raises(BuildFailed, match=f"process {user.pid} runs in") as caught:
            house.ensure(tree)
        assert caught.value.transient
        user.kill()
    assert house.ensure(tree).built


def test_threads_and_processes_share_one_build(house: House) -> None:
    trees = [house.tree("tiny==1.0\n") for _ in range(4)]
    ready: list[ReadyEnvironment] = []
    others = [BisectEnvironments(house.tmp / "cache"), house.cache, house.cache]
    threads = [
        threading.Thread(target=lambda cache=cache, tree=tree: ready.append(cache.ensure(tree, PIP, house.said.append, 120)))
        for cache, tree in zip(others, trees, strict=False)
    ]
    program = (
        "import sys; from pathlib import Path; from seatrial.bisect.environment_cache import *; "
        "from seatrial.bisect.bisect_records import EnvironmentPlan as P; "
        "print(BisectEnvironments(Path(sys.argv[1])).ensure(Path(sys.argv[2]), P(kind='pip', lock='requirements.lock'), str, 120).built)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(house.tmp / "cache"), str(trees[3])], stdout=subprocess.PIPE, text=True
    ) as process:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        said, _ = process.communicate(timeout=120)
    assert [one.built for one in ready].count(True) + (said == "True\n") == 1
    assert len({one.key for one in ready}) == 1
    assert house.built() <= 1


def test_a_thread_that_waited_for_a_failed_build_does_not_repeat_it(house: House) -> None:
    trees = [house.tree("nowhere==1.0\n") for _ in range(2)]
    failures: list[str] = []

    def ask(tree: Path) -> None:
        try:
            house.ensure(tree)
        except BuildFailed as error:
            failures.append(error.message)

    threads = [threading.Thread(target=ask, args=(tree,)) for tree in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(failures), len(set(failures)), house.built()) == (2, 1, 1)


def test_a_build_has_a_deadline(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = house.tmp / "python"
    slow.write_text("#!/bin/sh\nsleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr("seatrial.bisect.environment_cache.find_python", lambda _: str(slow))
    with pytest.raises(BuildFailed, match="creating took too long"):
        house.ensure(house.tree("tiny==1.0\n"), deadline_s=0.2)
    monkeypatch.undo()
    with pytest.raises(BlockedError, match=r"python3\.99"):
        house.ensure(house.tree("tiny==1.0\n"), PIP.model_copy(update={"python": "3.99"}))


def test_a_build_installs_into_the_tree_and_not_into_what_is_shared(house: House) -> None:
    plain = house.ensure(house.tree("tiny==1.0\n"))
    plan = PIP.model_copy(update={"build": ("pip", "install", "--no-deps", "--force-reinstall", "tiny==2.0")})
    tree = house.tree("tiny==1.0\n-e .\n")
    ready = house.ensure(tree, plan)
    assert (ready.key, ready.built) == (plain.key, False)
    house.cache.build(tree, plan, ready, house.tmp / "build.log", 1)
    assert output(ready, "python", "-c", SHOW).startswith("2.0 ")
    assert output(ready, "python", "-m", "pip", "list", "--format=freeze").split() == ["tiny==2.0"]
    assert output(plain, "python", "-c", SHOW).startswith("1.0 ")
    assert house.ensure(house.tree("tiny==1.0\n")) == ReadyEnvironment(
        plain.python, {**plain.variables, "PYTHONPATH": str(house.tmp / "tree3")}, plain.key
    )
    # A tree that is made again has nothing of the last build.
    assert output(house.ensure(tree, plan), "python", "-c", SHOW).startswith("1.0 ")


def test_programs_of_the_shared_environment_see_what_the_tree_built(house: House) -> None:
    plan = PIP.model_copy(update={"build": ("true",)})
    shared = house.ensure(house.tree("tiny==1.0\n"))
    assert shared.python is not None
    program = shared.python.with_name("show")
    program.write_text(f"#!{shared.python}\nimport sys\nprint(sys.prefix)\n")
    program.chmod(0o755)
    marker = shared.python.parents[2] / "complete.json"
    record = files.read_model(marker, Complete)
    files.write_json(marker, record.model_copy(update={"contents": contents(shared.python.parents[1])}))
    tree = house.tree("tiny==1.0\n")
    ready = house.ensure(tree, plan)
    assert output(ready, "show").strip() == ready.variables["VIRTUAL_ENV"] == str(tree / ".seatrial-venv")


def test_a_build_command_that_fails_is_told_with_its_last_line(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, log = house.tree(""), house.tmp / "build.log"
    monkeypatch.setenv("MY_SECRET", "hunter2hunter2")
    house.cache = BisectEnvironments(house.tmp / "cache")

    def run(*command: str, minutes: float = 1) -> BuildFailed:
        plan = PIP.model_copy(update={"build": command})
        with pytest.raises(BuildFailed) as caught:
            house.cache.build(tree, plan, house.ensure(tree, plan), log, minutes)
        return caught.value

    failed = run("sh", "-c", "echo $MY_SECRET; echo error: no rule for target >&2; exit 3")
    assert failed.message == "the build command failed: error: no rule for target"
    assert not failed.transient
    assert "hunter2hunter2" not in log.read_text()
    log.unlink()
    assert run("sh", "-c", "echo cc1: No space left on device; exit 1").transient
    log.unlink()
    assert "cannot start no-such-program" in run("no-such-program").message
    assert "took too long" in run("sleep", "60", minutes=0.003).message


KILLED = """
import os, sys
from pathlib import Path
from seatrial.bisect.environment_cache import BisectEnvironments
from seatrial.bisect.bisect_records import EnvironmentPlan
tell = lambda line: os.kill(os.getpid(), 9) if "installing" in line else None
BisectEnvironments(Path(sys.argv[1])).ensure(Path(sys.argv[2]), EnvironmentPlan(kind="pip", lock="requirements.lock"), tell, 60)
"""


def test_a_build_that_was_killed_is_never_used(house: House) -> None:
    tree = house.tree("tiny==1.0\n")
    done = subprocess.run([sys.executable, "-c", KILLED, str(house.tmp / "cache"), str(tree)], timeout=120, check=False)
    assert done.returncode == -9
    (begun,) = house.left()
    assert (house.tmp / "cache" / begun / "venv" / "bin" / "python").exists()
    ready = house.ensure(tree)
    assert ready.built
    assert output(ready, "python", "-c", SHOW).startswith("1.0 ")


def test_clean_up_removes_what_a_killed_build_left_and_remove_everything(house: House) -> None:
    whole, broken = house.ensure(house.tree("")), house.tmp / "cache" / "pip-0123456789abcdef"
    (broken / "venv").mkdir(parents=True)
    with exclusive(broken.with_name(f"{broken.name}.lock"), "a build", house.said.append, 1):
        assert house.cache.clean_up() == ()
    assert house.cache.clean_up() == (broken,)
    assert not house.ensure(house.tree("")).built
    assert whole.python is not None
    with pytest.raises(BuildFailed):
        house.ensure(house.tree("nowhere==1.0\n"))
    with subprocess.Popen([str(whole.python), "-c", "input()"], stdin=subprocess.PIPE) as user:
        with pytest.raises(UserError, match=f"process {user.pid} runs in"):
            house.cache.remove()
        user.kill()
    assert house.cache.remove() == (whole.python.parents[2],)
    assert house.left() == set()
    assert BisectEnvironments(house.tmp / "no cache yet").clean_up() == ()


@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH (pip install uv)")
def test_uv_environment_without_the_packages_of_the_tree(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(house.tmp / "uv-cache"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", str(house.tmp / "the-callers-own"))
    uv, plan = str(shutil.which("uv")), EnvironmentPlan(kind="uv", lock="uv.lock", python=f"3.{sys.version_info.minor}")
    trees = []
    for version, tiny in (("1", "1.0"), ("2", "1.0"), ("3", "2.0")):
        project = (
            f'[project]\nname = "demo"\nversion = "{version}"\nrequires-python = ">=3.11"\ndependencies = ["tiny=={tiny}", "part"]\n'
            '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
            f'[tool.uv]\nno-index = true\nfind-links = ["{house.tmp / "wheels"}"]\n'
            '[tool.uv.sources]\npart = { path = "libs/part", editable = true }\n'
        )
        tree = house.tree("", **{"pyproject.toml": project})
        (tree / "libs" / "part" / "part").mkdir(parents=True)
        (tree / "libs" / "part" / "part" / "__init__.py").touch()
        (tree / "libs" / "part" / "pyproject.toml").write_text('[project]\nname = "part"\nversion = "1"\n')
        subprocess.run([uv, "lock"], cwd=tree, check=True, capture_output=True, timeout=120)
        trees.append(tree)
    before = sorted(trees[0].rglob("*"))
    first, again, other = [house.ensure(tree, plan) for tree in trees]
    assert [ready.built for ready in (first, again, other)] == [True, False, True]
    shown = output(again, uv, "run", "--project", str(trees[1]), "python", "-c", f"{SHOW}; import part; print(part.__file__)").split()
    assert [shown[0], *shown[2:]] == ["1.0", f"{trees[1]}/demo/__init__.py", f"{trees[1]}/libs/part/part/__init__.py"]
    assert output(other, "python", "-c", SHOW).startswith("2.0 ")
    assert sorted(trees[0].rglob("*")) == before
    assert not (house.tmp / "the-callers-own").exists()
    lock = trees[0] / "uv.lock"
    lock.write_text(lock.read_text().replace('version = "1.0"', 'version = "9.0"').replace("tiny-1.0", "tiny-9.0"))
    with pytest.raises(BuildFailed, match=r"uv\.lock: syncing failed"):
        house.ensure(trees[0], plan)
