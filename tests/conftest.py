"""What no test is about, and every one would pay for."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from seatrial.report import html


@pytest.fixture(scope="session", autouse=True)
def spared() -> Iterator[None]:
    """The template of the page is compiled once, a new repository gets no sample hooks, and nothing reaches the user's history or cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "environment", functools.cache(html.environment))
        patch.setenv("GIT_TEMPLATE_DIR", "")
        patch.setenv("SEATRIAL_HISTORY", "off")
        patch.setenv("SEATRIAL_BASE_CACHE", "off")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: one of minutes that begins last leaves the other processes without work.

    Those of a cluster mostly wait. They are spread among those that compute: all processes in them at once would leave the cores idle.
    """
    real, slow = ({item.path for item in items if item.get_closest_marker(mark)} for mark in ("real", "slow"))
    places = spread(sorted(real))
    items.sort(key=lambda item: (item.path not in real, item.path not in slow, places.get(item.path, 0.0)))


def spread(files: Sequence[Path]) -> dict[Path, float]:
    """A place between 0 and 1 for each file, so that both kinds are distributed evenly."""
    kinds = [[file for file in files if ("slurm" in file.parts) is waits] for waits in (False, True)]
    return {file: (index + 0.5) / len(kind) for kind in kinds for index, file in enumerate(kind)}
