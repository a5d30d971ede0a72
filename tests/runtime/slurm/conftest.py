"""A private Slurm for the tests of this folder.

- `cluster` and `accounting_cluster` come up when the first test asks for them and serve the whole session; they must be left
  as they were found. A test that kills daemons or wants other settings makes its own with `make_cluster`.
- Where Slurm is not installed these tests are skipped, with the command that installs it.
- Under pytest-xdist each worker has its own clusters, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.slurm.cluster import PrivateSlurm, missing

MakeCluster = Callable[..., PrivateSlurm]


def bring_up(root: Path, **options: Any) -> PrivateSlurm:
    """A cluster that is up, or a skip that says what to run."""
    namespaces = options.get("network") == "namespaces"
    command = missing(options.get("accounting", False), options.get("pyxis", True), namespaces)
    if command:
        pytest.skip(f"no private Slurm here: {command}")
    cluster = PrivateSlurm(root, **options)
    cluster.up()
    return cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    """Four nodes with 8 CPUs and 8 fake GPUs each, fake pyxis, no accounting."""
    made = bring_up(tmp_path_factory.mktemp("slurm"))
    yield made
    made.down()


@pytest.fixture(scope="session")
def accounting_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSlurm]:
    """The same with slurmdbd: sacct works."""
    made = bring_up(tmp_path_factory.mktemp("sacct"), accounting=True)
    yield made
    made.down()


@pytest.fixture
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeCluster]:
    """`make_cluster(nodes=2, min_job_age=2, ...)`: clusters of one test's own, torn down after it."""
    made: list[PrivateSlurm] = []

    def make(**options: Any) -> PrivateSlurm:
        made.append(bring_up(tmp_path_factory.mktemp("own"), **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.down()
