"""What no test is about, and every one would pay for."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from seatrial.report import html


@pytest.fixture(scope="session", autouse=True)
def spared() -> Iterator[None]:
    """The template of the page is compiled once, a new repository gets no sample hooks, and nothing reaches the user's history."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "environment", functools.cache(html.environment))
        patch.setenv("GIT_TEMPLATE_DIR", "")
        patch.setenv("SEATRIAL_HISTORY", "off")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: one of minutes that begins last leaves the other processes without work."""
    long = [{item.path for item in items if item.get_closest_marker(mark)} for mark in ("real", "slow")]
    items.sort(key=lambda item: [item.path not in paths for paths in long])
