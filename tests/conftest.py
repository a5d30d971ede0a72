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
    """Long ones first: a file of minutes that begins last leaves the other processes without work."""
    items.sort(key=lambda item: (item.get_closest_marker("real") is None, item.get_closest_marker("slow") is None))
