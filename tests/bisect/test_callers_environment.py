"""Builds without an environment of their own: the caller's is used, and nothing is ever installed into it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seatrial.bisect.bisect_records import EnvironmentPlan
from seatrial.bisect.environment_cache import BisectEnvironments, ReadyEnvironment
from seatrial.bisect.lockfile import BuildFailed
from tests.bisect.untouched import untouched
from tests.runtime.wheels import make_wheel, only_local

pytestmark = pytest.mark.slow  # pip installs something

PLAN = EnvironmentPlan(kind="none", build=("pip", "install", "--no-deps", "tiny==1.0"))
WHERE = "import sys, tiny; print(sys.prefix, tiny.__file__)"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_wheel(tmp_path / "wheels", "tiny", "1.0")
    only_local(tmp_path / "wheels", monkeypatch)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    # Whatever goes wrong here, it must not reach a pip of this machine.
    _write(tmp_path / "decoy" / "pip", f"#!/bin/sh\ntouch {tmp_path}/reached\nexit 1\n")
    monkeypatch.setenv("PATH", os.pathsep.join((str(tmp_path / "decoy"), str(Path(sys.executable).parent), "/usr/bin", "/bin")))
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


def _write(program: Path, text: str) -> None:
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)


def build(tree: Path, plan: EnvironmentPlan = PLAN) -> ReadyEnvironment:
    cache = BisectEnvironments(tree.parent / "cache")
    ready = cache.ensure(tree, plan, lambda _: None, 120)
    if plan.build:
        cache.build(tree, plan, ready, tree.parent / "build.log", 1)
    return ready


def output(ready: ReadyEnvironment, *argv: str) -> str:
    env = {**os.environ, **ready.variables}
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=True, cwd="/").stdout


def test_a_build_installs_nothing_into_the_callers_venv(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tree.parent / "mine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(mine)], check=True, timeout=60)
    _write(mine / "bin" / "show", f"#!{mine}/bin/python\n{WHERE}\n")
    monkeypatch.setenv("PATH", f"{mine / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with untouched(mine):
        ready = build(tree)
        assert ready.python == tree / ".seatrial-venv" / "bin" / "python"
        for argv in (("python", "-c", WHERE), ("show",)):
            prefix, place = output(ready, *argv).split()
            assert prefix == str(tree / ".seatrial-venv")
            assert Path(place).is_relative_to(prefix)


def test_a_build_installs_nothing_into_a_python_that_is_no_venv(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = subprocess.run([sys.executable, "-c", "import sys; print(sys._base_executable)"], capture_output=True, text=True, check=True)
    base = Path(told.stdout.strip()).resolve()
    programs, home = tree.parent / "programs", tree.parent / "home"
    programs.mkdir()
    (programs / "python").symlink_to(base)
    _write(home / ".local" / "bin" / "show", f"#!{base}\n{WHERE}\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    with untouched(home / ".local"):
        ready = build(tree)
        for argv in (("python", "-c", WHERE), ("show",)):
            prefix, file = output(ready, *argv).split()
            assert prefix == str(tree / ".seatrial-venv")
            assert Path(file).is_relative_to(prefix)
        output(ready, "pip", "install", "--no-deps", "--force-reinstall", "tiny==1.0")


def test_a_python_that_does_not_run_is_not_passed_over(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tree.parent / "broken" / "python"
    _write(broken, "#!/bin/sh\necho 'version 3.99 is not installed' >&2\nexit 127\n")
    monkeypatch.setenv("PATH", str(broken.parent))
    with pytest.raises(BuildFailed, match="does not run in this tree"):
        build(tree)
    assert build(tree, EnvironmentPlan(kind="none")).python is None  # without a build nothing is asked
    monkeypatch.setenv("PATH", "/nowhere")
    assert BisectEnvironments(tree.parent / "cache").ensure(tree, PLAN, lambda _: None, 1).python is None


def test_pip_in_a_shared_environment_is_never_the_callers(tree: Path) -> None:
    (tree / "requirements.txt").write_text("tiny==1.0\n", encoding="utf-8")
    ready = build(tree, EnvironmentPlan(kind="pip", lock="requirements.txt"))
    for name in ("pip", "pip3"):
        done = subprocess.run([name, "install", "x"], env={**os.environ, **ready.variables}, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "shared by commits" in done.stderr
    assert not (tree.parent / "reached").exists()
    assert build(tree, EnvironmentPlan(kind="pip", lock="requirements.txt")) == ReadyEnvironment(ready.python, ready.variables, ready.key)
