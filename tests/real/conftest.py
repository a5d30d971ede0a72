"""The loop's environment, and a checkout of the loop to change.

Without the environment these tests fail: a skip would look like success in the one place where the real loop is driven.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.mutants.harness import Server

from seatrial.loops import environments
from seatrial.runtime.environments import Environment, Environments

LOOP = "trl"
SECONDS = 1500
"""For a test that names no limit of its own: trials wait for each other on two cores, and the limit of all tests is for one process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests of this folder their limit."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="session", autouse=True)
def environment() -> Environment:
    """The environment that `seatrial env build` made. Building it takes minutes and is not a test's business."""
    cache = Environments()
    found = cache.find(LOOP, environments()[LOOP])
    if found is None:
        pytest.fail(f"the environment of {LOOP} is not built in {cache.root}: run `seatrial env build {LOOP}` first", pytrace=False)
    return found


@pytest.fixture(scope="session")
def server(environment: Environment) -> Iterator[Server]:
    """One process that has imported everything of the loop, and forks drivers and shadows."""
    made = Server(environment.python)
    yield made
    made.close()


@pytest.fixture(scope="session")
def installed(environment: Environment) -> Path:
    """The loop's own package as it is installed in the environment."""
    return next(environment.path.glob(f"lib/python*/site-packages/{LOOP}"))


@pytest.fixture(scope="module")
def upstream(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with the loop's package in src layout, at a path that careless quoting breaks."""
    root = tmp_path_factory.mktemp("upstream") / "päckage under test"
    shutil.copytree(installed, root / "src" / LOOP, ignore=shutil.ignore_patterns("__pycache__"))
    git(root, "init", "--quiet", "--initial-branch", "main")
    git(root, "add", "--all", "--force")
    git(root, "commit", "--quiet", "--message", "as released")
    return root


def git(root: Path, *words: str) -> str:
    """Run git in a repository as somebody, whatever this machine's configuration is."""
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, text=True).stdout
