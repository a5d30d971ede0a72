"""The cache of environments: what is complete, what is broken, and what happens when a build goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.verdict import Boundary
from seatrial.runtime.environments import Environment, Environments, default_root
from seatrial.runtime.interrupt import Interrupted, Interruptible
from seatrial.runtime.process import end_leftovers
from seatrial.runtime.venvs import find_uv, read_installed
from tests.runtime.wheels import make_wheel, only_local

pytestmark = pytest.mark.slow  # nearly every test here lets pip build something

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass
class House:
    """A cache, a lock with a layer, and the lines that were said."""

    tmp: Path
    said: list[str] = field(default_factory=list)

    @property
    def cache(self) -> Environments:
        return Environments(self.tmp / "cache", self.tmp / "layers")

    def lock(self, text: str = "", layer: str = "") -> Path:
        (self.tmp / "layers").mkdir(exist_ok=True)
        (self.tmp / "layers" / "base.lock").write_text(layer)
        path = self.tmp / "environment.lock"
        path.write_text(f"# python: {PYTHON}\n{text}")
        return path

    def build(self, lock: Path, rebuild: bool = False) -> Environment:
        return self.cache.build("loop", lock, self.said.append, rebuild=rebuild, deadline_s=60)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    only_local(tmp_path / "wheels", monkeypatch)
    return House(tmp_path)


def imported(environment: Environment, module: str) -> str:
    program = f"import {module}; print({module}.VERSION, {module}.__file__)"
    return subprocess.run([str(environment.python), "-c", program], capture_output=True, text=True, check=True).stdout


def test_environment_with_layer(house: House) -> None:
    make_wheel(house.tmp / "wheels", "big", "2.0+cpu", requires="extra")
    make_wheel(house.tmp / "wheels", "extra", "7.0")
    make_wheel(house.tmp / "wheels", "small", "1.0", requires="not_there")
    lock = house.lock("# layer: base\nsmall==1.0\n", "big==2.0\n")
    assert house.cache.find("loop", lock) is None
    environment = house.build(lock)
    assert house.cache.find("loop", lock) == environment
    assert imported(environment, "small").startswith(f"1.0 {environment.path}/")
    assert imported(environment, "big").startswith(f"2.0+cpu {house.tmp}/cache/layers/base-")
    assert imported(environment, "extra").startswith("7.0 ")
    assert all(finding.ok for finding in house.cache.check("loop", lock))
    assert any(line.startswith("base: installing 1 packages") for line in house.said)
    packages = {path.name for path in environment.path.glob("lib/*/site-packages/*")}
    assert packages - {"__pycache__"} == {"seatrial-layer.pth", "small.py", "small-1.0.dist-info"}


def test_a_package_for_another_python_is_taken_only_when_the_lock_says_so(house: House) -> None:
    make_wheel(house.tmp / "wheels", "newer", "1.0", python=">=99")
    with pytest.raises(BlockedError, match="newer"):
        house.build(house.lock("newer==1.0\n"))
    environment = house.build(house.lock("# requires-python: ignored\nnewer==1.0\n"), rebuild=True)
    assert imported(environment, "newer").startswith("1.0 ")


def test_life_of_an_environment_and_its_layer(house: House) -> None:
    lock = house.lock("# layer: base\n")
    environment = house.build(lock)
    assert house.said == ["base: creating", "loop: creating"]
    assert house.build(lock) == environment
    assert len(house.said) == 2
    env, layer = house.cache.list()
    assert (env.name, env.kind, env.complete, env.hash, env.used) == ("loop", "envs", True, environment.lock_hash[:12], None)
    assert (layer.name, layer.kind, layer.complete) == ("base", "layers", True)
    assert env.python_version is not None
    assert env.python_version.startswith(PYTHON)
    house.cache.find("loop", lock)
    assert house.cache.list()[0].used is not None

    # Without its layer an environment is broken, and building it again repairs that.
    shutil.rmtree(layer.path)
    assert house.cache.find("loop", lock) is None
    assert [entry.complete for entry in house.cache.list()] == [False]
    house.build(lock)
    assert house.cache.find("loop", lock) == environment

    strays = [environment.path / "stray", layer.path / "stray"]
    for stray in strays:
        stray.touch()
    house.build(lock, rebuild=True)
    assert not any(stray.exists() for stray in strays)
    assert house.cache.remove("loop") == (environment.path, layer.path)
    assert house.cache.list() == ()


def test_check_finds_missing_and_other_versions(house: House) -> None:
    for name in ("one", "two", "three"):
        make_wheel(house.tmp / "wheels", name, "1.0")
    lock = house.lock("one==1.0\ntwo==1.0\nthree==1.0\n")
    environment = house.build(lock)
    packages = next(environment.path.glob("lib/*/site-packages"))
    (packages / "one-1.0.dist-info").rename(packages / "gone")
    metadata = packages / "two-1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    shutil.copytree(packages / "three-1.0.dist-info", packages / "three-0.9.dist-info")
    other = packages / "three-0.9.dist-info" / "METADATA"
    other.write_text(other.read_text().replace("Version: 1.0", "Version: 0.9"))

    finding = house.cache.check("loop", lock)[-1]
    assert not finding.ok
    assert finding.fix == "seatrial env build loop --rebuild"
    assert "one 1.0 is missing" in finding.message
    assert "two is 1.1 instead of 1.0" in finding.message
    assert "three is" in finding.message


def test_incomplete_environment_is_rebuilt_from_scratch(house: House) -> None:
    lock = house.lock()
    environment = house.build(lock)
    marker, stray = environment.path / "complete.json", environment.path / "stray"
    for breakage in ("", "{torn", json.dumps({"name": "loop"})):
        stray.touch()
        marker.write_text(breakage)
        assert house.cache.find("loop", lock) is None
        assert [entry.complete for entry in house.cache.list()] == [False]
        assert [finding.ok for finding in house.cache.check("loop", lock)] == [True, False]
        house.build(lock)
        assert not stray.exists()


def test_broken_interpreter_is_found(house: House) -> None:
    lock = house.lock()
    environment = house.build(lock)
    environment.python.unlink()
    environment.python.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    environment.python.chmod(0o755)
    finding = house.cache.check("loop", lock)[-1]
    assert (finding.name, finding.ok) == ("interpreter runs", False)
    assert "broken" in finding.message
    environment.python.unlink()
    assert house.cache.find("loop", lock) is None


def test_check_before_any_build_names_what_is_there(house: House) -> None:
    old = house.build(house.lock())
    (finding,) = house.cache.check("loop", house.lock("a==1\n"))
    assert not finding.ok
    assert finding.fix == "seatrial env build loop"
    assert old.path.name in finding.message


def test_a_failed_build_blocks_with_pips_own_words(house: House) -> None:
    lock = house.lock("nowhere==1.0\n")
    with pytest.raises(BlockedError) as caught:
        house.build(lock)
    assert caught.value.boundary is Boundary.ENVIRONMENT
    assert "ERROR: No matching distribution found for nowhere==1.0" in caught.value.message
    assert "build.log" in caught.value.message
    assert "seatrial env build loop" in caught.value.fix
    assert house.cache.find("loop", lock) is None
    (broken,) = house.cache.list()
    assert not broken.complete


def test_uv_installs_where_it_is_and_pip_where_uv_fails(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(house.tmp / "wheels", "one", "1.0")
    monkeypatch.setenv("UV_CONSTRAINT", "/not/passed/on")
    with_pip = house.build(house.lock("one==1.0\n"))
    uv = house.tmp / "bin" / "uv"
    uv.parent.mkdir()
    # It leaves half a package, which pip would take for installed.
    half = '"${4%/bin/*}"/lib/python3.11/site-packages/one-1.0.dist-info'
    metadata = f"mkdir -p {half}; printf 'Metadata-Version: 2.1\\nName: one\\nVersion: 1.0\\n' > {half}/METADATA"
    lines = (f"env > {house.tmp}/uv.env", f'echo "$@" > {house.tmp}/uv.words', metadata, "echo error: not today; exit 2")
    uv.write_text("\n".join(("#!/bin/sh", *lines, "")))
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent), prepend=os.pathsep)
    environment = house.build(house.lock("one==1.0\n"), rebuild=True)
    assert environment == with_pip
    assert imported(environment, "one").startswith("1.0 ")
    assert "loop: installing 1 packages with uv failed: error: not today; pip tries" in house.said
    variables = (house.tmp / "uv.env").read_text().splitlines()
    assert {f"UV_FIND_LINKS={house.tmp}/wheels", "UV_NO_INDEX=1"} <= set(variables)
    assert not any(line.startswith("UV_CONSTRAINT") for line in variables)
    assert (house.tmp / "uv.words").read_text().split()[:2] == ["pip", "install"]


def test_uv_builds_what_pip_builds(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_uv() is None:
        pytest.skip("uv is neither on PATH nor importable (pip install uv)")
    make_wheel(house.tmp / "wheels", "big", "2.0+cpu", requires="extra")
    make_wheel(house.tmp / "wheels", "extra", "7.0")
    make_wheel(house.tmp / "wheels", "small", "1.0", requires="not_there")
    lock = house.lock("# layer: base\nsmall==1.0\n", "big==2.0\n")
    with_uv = house.build(lock)
    assert {"base: installing 1 packages with uv", "loop: installing 1 packages with uv"} <= set(house.said)
    assert "tries" not in " ".join(house.said)
    found = read_installed(with_uv.python)
    monkeypatch.setattr("seatrial.runtime.venvs.find_uv", lambda: None)
    assert house.build(lock) == with_uv  # which of the two built it is no part of the key
    assert read_installed(house.build(lock, rebuild=True).python) == found


def test_two_builds_at_once_make_one(house: House) -> None:
    lock = house.lock()
    made, waiting = list[Environment](), threading.Event()

    def second_says(line: str) -> None:
        house.said.append(line)
        waiting.set()

    second = threading.Thread(target=lambda: made.append(house.cache.build("loop", lock, second_says)))

    def first_says(line: str) -> None:
        assert line == "loop: creating"
        second.start()
        assert waiting.wait(20)

    made.append(house.cache.build("loop", lock, first_says))
    second.join()
    assert made[0] == made[1]
    assert len(house.said) == 1
    assert "waiting for the build of loop (process " in house.said[0]


def test_waiting_for_another_build_has_a_deadline_and_can_be_interrupted(house: House) -> None:
    holder = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print('held', flush=True); time.sleep(60)"
    (house.tmp / "cache").mkdir()
    target = str(house.tmp / "cache" / "build.lock")
    with subprocess.Popen([sys.executable, "-c", holder, target], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(BlockedError, match="waited 0 s for another build"):
            house.cache.build("loop", house.lock(), house.said.append, deadline_s=0.3)
        with Interruptible() as stop:
            stop.signal = 2
            with pytest.raises(Interrupted):
                house.build(house.lock())
        other.kill()
    assert house.build(house.lock()).python.exists()


def test_a_build_that_takes_too_long_blocks(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = house.tmp / "python"
    slow.write_text("#!/bin/sh\nsleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr("seatrial.runtime.venvs.find_python", lambda _: str(slow))
    with pytest.raises(BlockedError, match="creating took too long"):
        house.cache.build("loop", house.lock(), house.said.append, deadline_s=0.1)


def test_not_enough_disk_blocks_before_anything_is_built(house: House) -> None:
    with pytest.raises(BlockedError, match=r"loop needs 999999999 MB and .* MB free"):
        house.build(house.lock("# disk-mb: 999999999\n"))
    assert house.cache.list() == ()


def test_settings_of_the_caller_do_not_leak_in(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(house.tmp / "wheels", "one", "1.0")
    (house.tmp / "constraints").write_text("one==9\n")
    elsewhere = house.tmp / "elsewhere"
    (elsewhere / "one-1.0.dist-info").mkdir(parents=True)
    (elsewhere / "one-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: one\nVersion: 1.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(house.tmp / "constraints"))
    monkeypatch.setenv("PIP_TARGET", str(house.tmp / "target"))
    monkeypatch.setenv("PYTHONPATH", str(elsewhere))
    environment = house.build(house.lock("one==1.0\n"))
    assert str(environment.path) in imported(environment, "one")


def test_unknown_python_blocks_with_the_fix(house: House) -> None:
    path = house.tmp / "environment.lock"
    path.write_text("# python: 3.99\n")
    with pytest.raises(BlockedError, match=r"python3\.99") as caught:
        house.build(path)
    assert "install Python 3.99" in caught.value.fix


def test_an_environment_in_use_is_kept(house: House) -> None:
    lock = house.lock()
    environment = house.build(lock)
    program = "import time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([str(environment.python), "-c", program], stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"up\n"
        with pytest.raises(UserError, match=f"process {user.pid} runs in"):
            house.cache.remove("loop")
        with pytest.raises(UserError, match=f"process {user.pid} runs in"):
            house.build(lock, rebuild=True)
        user.kill()
    assert house.cache.find("loop", lock)


def test_remove_takes_the_named_one_only(house: House) -> None:
    lock = house.lock()
    house.build(lock)
    house.cache.build("loop-two", lock, house.said.append)
    with pytest.raises(UserError, match="there is no environment other") as caught:
        house.cache.remove("other")
    assert "loop, loop-two" in caught.value.fix
    house.cache.remove("loop")
    assert [entry.name for entry in house.cache.list()] == ["loop-two"]


def test_leftovers_of_a_killed_build_are_ended_before_the_next(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def record(path: Path) -> int:
        asked.append(path)
        return end_leftovers(path)

    monkeypatch.setattr("seatrial.runtime.environments.end_leftovers", record)
    environment = house.build(house.lock())
    assert asked == [environment.path / "build.log.pids"]


def test_default_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEATRIAL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_root() == Path.home() / ".cache" / "seatrial"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_root() == Path("/caches/seatrial")
    monkeypatch.setenv("SEATRIAL_CACHE", "/mine")
    assert default_root() == Path("/mine")
