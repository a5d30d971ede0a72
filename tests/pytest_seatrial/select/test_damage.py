"""A state file with wrong bytes in it selects no less, and breaks nothing."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from pytest_seatrial.select import selection_state
from pytest_seatrial.select.selection_state import Known
from pytest_seatrial.select.source_digests import Version

GIVEN = {"Python": "3", "root": "/r"}


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    place = tmp_path / "whole.sqlite"
    outcomes = [
        selection_state.RecordedOutcome(
            f"test_{test}",
            (frozenset({("a.py", "f", "1"), (f"m{test}.py", "", "2")}), frozenset({(f"data/{test}.txt", "*", "3")})),
        )
        for test in range(60)
    ]
    selection_state.save_state(place, GIVEN, "c", outcomes, lambda path, block: "1")
    return place.read_bytes()


def records(known: Known) -> set[tuple[str, frozenset[Version]]]:
    """What each record says, with nothing left to look up."""
    return {
        (test, frozenset(known.versions[version] for number in sets for version in known.sets[number]))
        for test, some in known.records.items()
        for sets in some
    }


def test_no_wrong_byte_makes_a_record_claim_less(tmp_path: Path, whole: bytes) -> None:
    place = tmp_path / "state.sqlite"
    place.write_bytes(whole)
    right = records(selection_state.load_state(place, GIVEN).known)
    assert len(right) == 60
    rng = random.Random(10)
    noticed = 0
    for _ in range(300):
        data = bytearray(whole)
        at = rng.randrange(len(data))
        for offset in range(rng.choice([1, 1, 16])):
            data[(at + offset) % len(data)] ^= 1 << rng.randrange(8)
        place.write_bytes(data)
        loaded = selection_state.load_state(place, GIVEN)
        noticed += bool(loaded.told)
        for test, some in records(loaded.known):
            assert (test, some) in right
        selection_state.save_state(place, GIVEN, "d", [], lambda path, block: "1")
        assert selection_state.load_state(place, GIVEN).told == ""
    assert noticed > 10


@pytest.mark.parametrize(
    "damage",
    [
        "update records set sets = '1 2' where test = 'test_5'",
        "update sets set members = (select members from sets where id = 3) where id = 1",
        "delete from versions where id = 1",
        "delete from sets where id = 1",
        "delete from records where test = 'test_5'",
        "insert into records select id + 1000, 'test_x', commit_id, sets from records where test = 'test_5'",
        "insert into failed values ('test_5')",
        "update versions set digest = '9' where id = 1",
        "delete from meta where key = 'seal'",
    ],
)
def test_a_row_that_was_changed_by_another_hand_is_noticed(tmp_path: Path, whole: bytes, damage: str) -> None:
    place = tmp_path / "state.sqlite"
    place.write_bytes(whole)
    with sqlite3.connect(place) as base:
        base.execute(damage)
    base.close()
    loaded = selection_state.load_state(place, GIVEN)
    assert "damaged" in loaded.told
    assert not loaded.known.records
    assert list(tmp_path.glob("state.sqlite.damaged-*"))
