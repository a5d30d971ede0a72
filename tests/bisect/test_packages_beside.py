"""Packages beside a lock (`--with`): they are there, and change nothing of what the lock pins."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from seatrial.bisect.bisect_records import EnvironmentPlan
from seatrial.bisect.lockfile import BuildFailed
from tests.bisect.test_environments import PIP, SHOW, House, house, output
from tests.runtime.wheels import make_wheel

__all__ = ["house"]

pytestmark = pytest.mark.slow


def test_packages_beside_the_lock_change_nothing_of_it(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found where the lock says that packages are, which nothing else knows here."""
    (house.tmp / "more").mkdir()
    for version in ("1.0", "2.0"):
        make_wheel(house.tmp / "more", "extra", version)
    lock = f"--find-links {house.tmp / 'more'}\ntiny==1.0\n"
    plain, plan = house.ensure(house.tree(lock)), PIP.model_copy(update={"packages": ("extra<2", "tiny")})
    tree = house.tree(lock)
    ready = house.ensure(tree, plan)
    assert ready.built
    assert ready.key != plain.key
    assert output(ready, "python", "-c", f"{SHOW}; import extra; print(extra.VERSION)").split()[::3] == ["1.0", "1.0"]
    assert not house.ensure(tree, plan.model_copy(update={"packages": ("tiny", "extra<2")})).built
    with pytest.raises(subprocess.CalledProcessError):
        output(plain, "python", "-c", "import extra")
    with pytest.raises(BuildFailed, match=r"installing tiny==2\.0 beside it \(--with\) failed"):
        house.ensure(tree, PIP.model_copy(update={"packages": ("tiny==2.0",)}))


def test_uv_is_given_the_packages_beside_the_lock(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for uv that notes its words: what is installed after the lock comes with its versions as constraints."""
    (house.tmp / "bin").mkdir()
    uv = house.tmp / "bin" / "uv"
    uv.write_text(
        f'#!/bin/sh\necho "$PWD $@" >> {house.tmp}/words\n[ "$1" = sync ] && exec {sys.executable} -m venv "$UV_PROJECT_ENVIRONMENT"\n'
        f'while [ "$1" != --constraint ]; do shift; done; cp "$2" {house.tmp}/constraints\n'
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{uv.parent}:{os.environ['PATH']}")
    tree = house.tree("", **{"uv.lock": "version = 1\n", "pyproject.toml": '[project]\nname = "demo"\n'})
    ready = house.ensure(tree, EnvironmentPlan(kind="uv", lock="uv.lock", packages=("pytest<9",)))
    _, added = (house.tmp / "words").read_text().splitlines()
    assert added.startswith(f"{tree} pip install --no-progress --python {ready.python} ")
    assert added.endswith(" pytest<9")
    assert "pip==" in (house.tmp / "constraints").read_text()
