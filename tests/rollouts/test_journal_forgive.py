"""`resume --retry-failed`: final failures are owed again, and later ones are final."""

from __future__ import annotations

from pathlib import Path

from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.journal.journal_scan import FAILED, OK, PENDING, Scanner, mark_for_retry
from seatrial.rollouts.manifest import Units
from tests.rollouts.profiled import attempt, campaign, failed, ok, questions, record


def test_final_failures_are_owed_again_and_later_ones_are_final(tmp_path: Path) -> None:
    place = campaign(tmp_path, {"q": questions(3)}, repeats=1, shards=1)
    attempt(place, 0, [record(place, 0, ok(1.0)), record(place, 1, failed()), record(place, 2, failed())])
    with Units(place, manifests.load_manifest(place)) as units:
        assert list(Scanner(place, units).update().settled) == [OK, FAILED, FAILED]
        mark_for_retry(place)
        scan = Scanner(place, units).update()
        assert list(scan.settled) == [OK, PENDING, PENDING]
        assert scan.failed_attempts == {1: 1, 2: 1}
        attempt(place, 0, [record(place, 1, ok(0.5)), record(place, 2, failed())], number=2)
        assert list(Scanner(place, units).update().settled) == [OK, OK, FAILED]
