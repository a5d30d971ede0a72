"""What no test is about, and every one would pay for."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

LONG = (
    *("test_verl_cpu.py", "test_levels.py", "test_faults.py", "test_verl_shadow.py", "test_attach_verl.py", "test_vllm.py"),
    *("test_change.py", "test_bridge.py", "test_step_faults.py", "test_bridge_faults.py", "test_interrupt.py", "test_bridge_change.py"),
    *("test_outages.py", "test_cluster.py", "test_ends.py", "test_rollouts.py"),
)
"""Files that take minutes, the longest first; of loops, and then of clusters."""


@pytest.fixture(scope="session", autouse=True)
def spared() -> Iterator[None]:
    """A new repository gets no sample hooks, and nothing reaches the user's history or cache.

    Memory is there for every level: what other tests take of it at the moment must not block a trial whose loop is a stand-in.
    """
    memory = psutil.virtual_memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: memory()._replace(available=64 << 30))
        patch.setenv("GIT_TEMPLATE_DIR", "")
        patch.setenv("SEATRIAL_HISTORY", "off")
        patch.setenv("SEATRIAL_BASE_CACHE", "off")
        yield


def pytest_configure() -> None:
    """Signals that whoever started the tests ignores, as a shell does for what it runs in the background, end processes here, too.

    What a test starts inherits that: an interrupt that nobody hears is a test that hangs.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: one of minutes that begins last leaves the other processes without work.

    Those of a cluster mostly wait. They are spread among those that compute: all processes in them at once would leave the cores idle.
    """
    real, slow = ({item.path for item in items if item.get_closest_marker(mark)} for mark in ("real", "slow"))
    real |= {path for path in slow if "slurm" in path.parts}
    places = spread(sorted(real, key=lambda path: (LONG.index(path.name) if path.name in LONG else len(LONG), path)))
    items.sort(key=lambda item: (places.get(item.path, 1.0), item.path not in slow))


def spread(files: Sequence[Path]) -> dict[Path, float]:
    """A place between 0 and 1 for each file, so that both kinds are distributed evenly, each in the order given."""
    kinds = [[file for file in files if ("slurm" in file.parts) is waits] for waits in (False, True)]
    return {file: (index + 0.5) / len(kind) for kind in kinds for index, file in enumerate(kind)}
