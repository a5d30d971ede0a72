"""The ledger of version stamps: clean runs are silent, every break of the order is named."""

from __future__ import annotations

import pytest

from seatrial.instruments.refit.agreement import Ledger


def running(*replicas: str, version: int = 1) -> Ledger:
    """A ledger whose replicas all hold this version."""
    ledger = Ledger()
    for replica in replicas:
        ledger.report(replica, version, f"root{version}", f"{replica}-1")
    return ledger


def test_a_clean_run_is_silent_and_says_how_much_it_saw() -> None:
    ledger = Ledger()
    for version in range(1, 21):
        for replica in ("a", "b"):
            ledger.report(replica, version, f"root{version}", f"{replica}-1")
        for index in range(5):
            ledger.dispatch(f"{version}.{index}", version)
    assert ledger.problems() == []


def test_replicas_are_refitted_one_after_the_other_without_alarm() -> None:
    ledger = running("a", "b")
    ledger.report("a", 2, "root2", "a-1")
    ledger.report("b", 2, "root2", "b-1")
    assert ledger.problems() == []


def test_a_version_that_falls_is_named() -> None:
    ledger = running("a", "b", version=3)
    ledger.report("b", 2, "root2", "b-1")
    problems = ledger.problems()
    assert problems[0] == "replica b went back to version 2 after version 3"
    assert problems[1] == "replica b is behind: version 2, the newest is 3"


def test_a_restarted_replica_is_found() -> None:
    ledger = running("a", "b", version=7)
    ledger.report("b", 0, "root0", "b-2")
    ledger.dispatch("s", 7)
    problems = ledger.problems()
    assert problems[0] == "replica b restarted and came back with version 0 after version 7"
    assert problems[1] == "replica b held version 0 when version 7 was dispatched (first at sample s, 1 samples)"


def test_a_restart_that_was_synced_before_it_reported_is_fine() -> None:
    ledger = running("a", "b", version=7)
    ledger.report("b", 7, "root7", "b-2")
    ledger.dispatch("s", 7)
    assert ledger.problems() == []


def test_a_late_replica_is_named_once_with_the_number_of_samples() -> None:
    ledger = running("a", "b")
    ledger.report("a", 2, "root2", "a-1")
    for index in range(50):
        ledger.dispatch(f"s{index}", 2)
    assert ledger.problems() == [
        "replica b held version 1 when version 2 was dispatched (first at sample s0, 50 samples)",
        "replica b is behind: version 1, the newest is 2",
    ]


def test_other_weights_under_the_same_version_are_found() -> None:
    ledger = running("a", "b")
    ledger.report("b", 2, "other", "b-1")
    ledger.report("a", 2, "root2", "a-1")
    assert ledger.problems() == ["replica a holds root root2 as version 2, replica b holds other"]


def test_weights_that_change_without_a_new_version_are_found() -> None:
    ledger = running("a")
    ledger.report("a", 1, "other", "a-1")
    assert ledger.problems() == ["replica a holds other weights than before under version 1"]


def test_samples_without_a_version_are_counted() -> None:
    ledger = running("a")
    ledger.dispatch("x", None)
    ledger.dispatch("y", None)
    assert ledger.problems() == ["2 samples, the first x, are without a version"]


def test_a_version_that_no_replica_held_at_dispatch_is_found() -> None:
    ledger = running("a")
    ledger.dispatch("early", 2)
    ledger.report("a", 2, "root2", "a-1")
    assert ledger.problems() == ["sample early is stamped with version 2, which no replica held"]


def test_stamps_that_fall_and_samples_that_come_twice_are_found() -> None:
    ledger = running("a", version=2)
    ledger.dispatch("s", 2)
    ledger.dispatch("s", 1)
    assert ledger.problems() == [
        "sample s was dispatched twice",
        "sample s is stamped with version 1 after version 2",
        "sample s is stamped with version 1, which no replica held",
    ]


def test_a_dispatch_before_any_report_is_a_problem() -> None:
    ledger = Ledger()
    ledger.dispatch("s", 1)
    assert ledger.problems() == ["sample s is stamped with version 1, which no replica held"]


@pytest.mark.parametrize("version", [-1, True, 1.0, "1"])
def test_what_is_no_version_is_refused(version: object) -> None:
    ledger = running("a")
    with pytest.raises(ValueError, match="is no version"):
        ledger.report("a", version, "root", "a-1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"sample s: .* is no version"):
        ledger.dispatch("s", version)  # type: ignore[arg-type]
