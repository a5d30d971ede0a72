"""The scan: what counts, what is owed, and that neither order nor growth of the files changes the answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.journal.journal_scan import FAILED, OK, PENDING, Scan, Scanner
from seatrial.rollouts.manifest import Units
from tests.rollouts.profiled import attempt, campaign, failed, ok, questions, record


@pytest.fixture
def place(tmp_path: Path) -> CampaignDir:
    """Four rows, two repetitions, two shards: units 0, 1, 4, 5 are of shard 0."""
    return campaign(tmp_path, {"q": questions(4)}, repeats=2, shards=2)


@pytest.fixture
def units(place: CampaignDir) -> Iterator[Units]:
    with Units(place, manifests.load_manifest(place)) as units:
        yield units


def test_an_empty_journal_owes_everything(place: CampaignDir, units: Units) -> None:
    scanner = Scanner(place, units)
    scan = scanner.update()
    assert (scan.ok, scan.failed, scan.owed, scan.torn) == (0, 0, 8, 0)
    assert list(scanner.owed([0])) == [0, 1, 4, 5]
    assert list(scanner.owed([1, 0])) == [2, 3, 6, 7, 0, 1, 4, 5]


def test_what_settles_a_unit(place: CampaignDir, units: Units) -> None:
    lines = (record(place, 0, ok(1.0)), record(place, 1, failed("http-4xx")), record(place, 4, failed(final=False)))
    attempt(place, 0, lines)
    attempt(place, 0, [record(place, 4, failed(final=False))], number=2)
    scanner = Scanner(place, units)
    scan = scanner.update()
    assert list(scan.settled) == [OK, FAILED, PENDING, PENDING, PENDING, PENDING, PENDING, PENDING]
    assert (scan.ok, scan.failed, scan.owed, scan.reward_sum) == (1, 1, 6, 1.0)
    assert scan.by_kind == {"http-4xx": 1, "timeout": 2}
    assert scan.failed_attempts == {4: 2}
    assert list(scanner.owed([0])) == [4, 5]


def test_torn_lines_are_counted_once_and_owed(place: CampaignDir, units: Units) -> None:
    whole = record(place, 0, ok(1.0))
    attempt(place, 0, [whole[:50] + b"\n", b"\n", b"garbage\n", record(place, 1, ok(1.0)), b"\0" * 100, b"\n"])
    scanner = Scanner(place, units)
    for _ in range(2):
        scan = scanner.update()
        assert (scan.ok, scan.torn, scan.tails) == (1, 4, 0)
    assert list(scanner.owed([0])) == [0, 4, 5]


def test_a_result_without_a_reward_is_torn(place: CampaignDir, units: Units) -> None:
    attempt(place, 0, [record(place, 0, {"outcome": "ok"})])
    scan = Scanner(place, units).update()
    assert (scan.ok, scan.torn) == (0, 1)


def test_a_last_line_that_grows_is_read_when_it_is_whole(place: CampaignDir, units: Units) -> None:
    first, second = record(place, 0, ok(1.0)), record(place, 1, ok(0.0))
    scanner = Scanner(place, units)
    for length in range(0, len(first + second) + 1, 7):
        attempt(place, 0, [(first + second)[:length]])
        scan = scanner.update([0])
        assert (scan.ok, scan.torn) == (length >= len(first), 0)
        assert scan.tails == (length not in (0, len(first)))
    attempt(place, 0, [first + second])
    scan = scanner.update([0])
    assert (scan.ok, scan.torn, scan.tails) == (2, 0, 0)


def test_only_what_was_appended_is_read(place: CampaignDir, units: Units, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [record(place, unit, ok(1.0)) for unit in (0, 1)]
    attempt(place, 0, lines[:1])
    scanner = Scanner(place, units)
    scanner.update()
    taken: list[bytes] = []
    take = scanner._take

    def watched(line: bytes, *rest: Any) -> None:
        taken.append(line)
        take(line, *rest)

    monkeypatch.setattr(scanner, "_take", watched)
    attempt(place, 0, lines)
    assert scanner.update().ok == 2
    assert scanner.update().ok == 2
    assert taken == lines[1:]


def test_foreign_records_never_count(place: CampaignDir, units: Units, tmp_path: Path) -> None:
    other = campaign(tmp_path / "other", {"q": [{"prompt": f"else {number}", "answer": ""} for number in range(6)]}, repeats=2)
    attempt(place, 0, [record(place, 2, ok(1.0)), record(other, 0, ok(1.0)), record(other, 11, ok(1.0)), record(place, 0, ok(0.5))])
    attempt(place, 7, [record(place, 0, ok(1.0))])  # there is no such shard
    scan = Scanner(place, units).update()
    assert (scan.ok, scan.foreign, scan.reward_sum, scan.torn) == (1, 4, 0.5, 0)


def test_duplicates_and_conflicts_are_told_apart(place: CampaignDir, units: Units) -> None:
    attempt(place, 0, [record(place, 0, ok(1.0)), record(place, 1, ok(1.0)), record(place, 4, failed())])
    attempt(
        place, 0, [record(place, 0, ok(1.0)), record(place, 1, ok(0.0)), record(place, 4, ok(1.0)), record(place, 4, failed())], number=2
    )
    scan = Scanner(place, units).update()
    assert (scan.ok, scan.failed, scan.duplicates, scan.conflicts) == (3, 0, 4, 1)
    assert scan.conflicting == {1}
    assert scan.reward_sum == 3.0


def comparable(scan: Scan) -> Scan:
    """Without the one figure that says who came first."""
    return replace(scan, reward_sum=0.0)


def test_counts_do_not_depend_on_the_order_of_updates(place: CampaignDir, units: Units) -> None:
    results: list[Mapping[str, Any]] = [ok(1.0), ok(0.0), failed(), failed(final=False)]
    lines = [record(place, unit, result) for unit in (0, 1) for result in results]
    files = [attempt(place, 0, [], number) for number in (1, 2)]
    expected = None
    source = random.Random(3)
    for order in itertools.islice(itertools.permutations(lines), 0, 40_000, 2500):
        for file in files:
            file.write_bytes(b"")
        scanner = Scanner(place, units)
        for line in order:
            with source.choice(files).open("ab") as stream:
                stream.write(line)
            if source.random() < 0.4:
                scanner.update()
        scan = comparable(scanner.update())
        expected = expected or scan
        assert scan == expected == comparable(Scanner(place, units).update())
    assert expected is not None
    assert (expected.ok, expected.failed, expected.duplicates, expected.conflicts) == (2, 0, 4, 2)


@pytest.mark.parametrize("gone", [False, True])
def test_a_file_that_lost_records_makes_them_owed_again(place: CampaignDir, units: Units, gone: bool) -> None:
    first = attempt(place, 0, [record(place, 0, ok(1.0)), record(place, 1, ok(1.0))])
    attempt(place, 1, [record(place, 2, ok(1.0))])
    scanner = Scanner(place, units)
    assert scanner.update().ok == 3
    if gone:
        first.unlink()
    else:
        first.write_bytes(record(place, 0, ok(1.0)))
    assert scanner.update([1]).ok == 3
    scan = scanner.update([0])
    assert list(scanner.owed([0])) == ([0, 1, 4, 5] if gone else [1, 4, 5])
    assert (scan.ok, scan.duplicates) == (1 if gone else 2, 0)  # shard 1 was read again as well


def test_only_some_shards(place: CampaignDir, units: Units) -> None:
    attempt(place, 0, [record(place, 0, ok(1.0))])
    attempt(place, 1, [record(place, 2, ok(1.0))])
    ticks: list[None] = []
    scanner = Scanner(place, units)
    assert scanner.update([1], tick=lambda: ticks.append(None)).ok == 1
    assert len(ticks) == 1
    attempt(place, 1, [record(place, 2, ok(1.0)), record(place, 3, ok(1.0))])
    assert scanner.update([0]).ok == 2  # what came to shard 1 meanwhile was not asked for
    assert scanner.update().ok == 3
