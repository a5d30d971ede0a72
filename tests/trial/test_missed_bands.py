"""When a check is missed by more than on the unchanged side: the band scales from the baseline."""

from __future__ import annotations

import pytest

from seatrial.core.records import CheckResult
from seatrial.trial.compare import worse


def miss(value: float | str | None, threshold: str, missing: tuple[int, ...] = ()) -> CheckResult:
    return CheckResult(name="x", passed=False, value=value, threshold=threshold, missing=missing)


@pytest.mark.parametrize(
    ("before", "after", "threshold", "is_worse"),
    [
        (1.25, 1.25, "< 1.05", False),
        (1.25, 1.06, "<= 1.05", False),
        (1.25, 1.34, "< 1.05", False),
        (1.25, 1.36, "< 1.05", True),
        (0.2, 0.1, "> 0.5", False),
        (0.2, -1.0, ">= 0.5", True),
        (-2.0, -9.0, "> -1.0", True),
        (2.0, 4.0, "== 3", False),
        (2.0, 5.0, "== 3", True),
        (1.0, 1.5, "< 1.0", True),
        (1e-3, 1.0, "< 1e-4", True),
        (1.0, 9.0, "all finite", False),
        (1.0, "Infinity", "all finite", True),
        (1.0, None, "< 1", True),
        ("NaN", "NaN", "< 1", False),
        (None, 3.0, "< 1", False),
    ],
)
def test_a_miss_beside_that_of_the_baseline(before: float | str | None, after: float | str | None, threshold: str, is_worse: bool) -> None:
    found = worse(miss(before, threshold), miss(after, threshold))
    assert bool(found) == is_worse
    assert not found or found == f"x: measured {after!r}, on the baseline {before!r}"


def test_points_that_only_the_change_lacks_are_named() -> None:
    assert worse(miss("NaN", "< 1", (2,)), miss("NaN", "< 1", (2,))) == ""
    assert worse(miss("NaN", "< 1", (2,)), miss("NaN", "< 1", (1, 2, 3))) == "x: no finite point at step 1, 3, where the baseline has one"
