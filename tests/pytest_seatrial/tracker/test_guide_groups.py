"""The four configurations of the guide, on a project with a test of each kind: which run, which are Skipped, which are deselected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytest_seatrial.tracker.guarded import project, pytest_in

pytestmark = pytest.mark.slow

CONFIGURATIONS = [
    ([], {"test_plain"}, {"test_gated", "test_mcore", "test_both"}, 0),
    (["--hf-gated"], {"test_plain", "test_gated"}, {"test_mcore", "test_both"}, 0),
    (["--mcore-only"], {"test_mcore"}, {"test_both"}, 2),
    (["--mcore-only", "--hf-gated"], {"test_mcore", "test_both"}, set(), 2),
]


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
@pytest.mark.parametrize(("options", "passed", "skipped", "deselected"), CONFIGURATIONS)
def test_the_configuration_runs_exactly_its_tests(
    tmp_path: Path, options: list[str], passed: set[str], skipped: set[str], deselected: int, workers: str
) -> None:
    ran = pytest_in(project(tmp_path), workers, *options)
    assert ran.code == 0, ran.text
    assert ran.tests("PASSED") == passed
    assert ran.tests("SKIPPED") == skipped
    assert len(passed) + len(skipped) + deselected == 4
    assert (f"{deselected} deselected by seatrial: not in group mcore (--mcore-only)" in ran.text) == bool(deselected)
    assert (f"{len(skipped)} skipped by seatrial: " in ran.text) == bool(skipped)


def test_the_four_configurations_together_run_every_test(tmp_path: Path) -> None:
    assert set[str]().union(*(passed for _, passed, _, _ in CONFIGURATIONS)) == {"test_plain", "test_gated", "test_mcore", "test_both"}
