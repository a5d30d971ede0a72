"""The one sampler of this process, and what it and the Ray cluster say.

- Nothing runs before the first `read_peaks`. From then on every test begins with peaks of its own.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from seatrial.regress.unit import memory


class Peaks(NamedTuple):
    """Bytes by place, names of GPUs on other nodes, and what could not be read although nothing is there."""

    peaks: dict[str, int]
    gpus: list[str]
    notes: list[str]


class _Running:
    sampler: memory.Sampler | None = None
    cluster: object = None


def begin(marks: tuple[int, int]) -> None:
    """A test begins, with what the kernel remembers of this process until now."""
    if _Running.sampler is not None and _Running.sampler.root == os.getpid():
        _Running.sampler.reset(marks)


def read_peaks(test: str, marks: tuple[int, int]) -> Peaks:
    """Peaks since the test began, here and on every Ray node."""
    from seatrial.regress.unit.cluster import Cluster

    sampler = _Running.sampler
    if sampler is None or sampler.root != os.getpid():  # a forked child has no thread of ours
        sampler = _Running.sampler = memory.Sampler(os.getpid())
        sampler.reset(marks)
    if not isinstance(_Running.cluster, Cluster):
        _Running.cluster = Cluster()
    here = sampler.peaks()
    there = _Running.cluster.peaks(test)
    return Peaks(here | there.peaks, there.gpus, [*([sampler.problem] if sampler.problem else []), *there.notes])


def stop() -> None:
    """End the thread."""
    if _Running.sampler is not None:
        _Running.sampler.stop()
        _Running.sampler = None
