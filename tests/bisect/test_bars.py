"""The first bar of issue 9 with real processes: 500 commits, submodules, five locks, 12 % that cannot be built.

Two seeds here, one with one job and one with two; `bench/bisect_git.py` does all twenty.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from seatrial.runtime.environments import MARKER
from tests.bisect.big import big_repository
from tests.bisect.driven import Driven, drive
from tests.bisect.untouched import untouched

pytestmark = pytest.mark.slow


def test_two_seeds(tmp_path: Path) -> None:
    cache, done = tmp_path / "cache", list[Driven]()
    for seed in range(2):
        root = tmp_path / str(seed)
        big = big_repository(root, seed)
        with untouched(big.path):
            one = drive(big, root / "out", cache, jobs=1 + seed % 2)
        assert one.right, one.said
        assert one.rounds <= one.allowed, one.said
        # Also a lock that cannot be installed is tried only once in a bisect.
        assert set(one.builds.values()) <= {1}, one.said
        assert not [row for row in one.rows if row.exit_code == 200]
        assert not list((root / "out" / "steps").glob("*/tree"))
        done.append(one)
    # All seeds have the same five locks: what one bisect built the others find.
    built = sum((one.built for one in done), Counter[str]())
    assert set(built.values()) == {1}
    assert len(built) <= 5
    assert len(list((cache / "bisect").glob(f"pip-*/{MARKER}"))) == len(built)
