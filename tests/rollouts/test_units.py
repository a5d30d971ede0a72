"""Units: numbers, shards, seeds and rows, without the rows in memory."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from seatrial.core.errors import UserError
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.manifest import NO_SEED, Manifest, Units, create_campaign, derive_seed
from tests.rollouts.inputs_made import campaign, jsonl, made, plain


def two(folder: Path, shards: int) -> tuple[CampaignDir, Manifest]:
    """Five rows by repetitions 0-1 and 7, then two rows by two."""
    jsonl(folder / "a.jsonl", [plain(number) for number in range(5)])
    jsonl(folder / "b.jsonl", [plain(number) for number in range(2)])
    place = CampaignDir(folder / "campaign")
    whole = campaign({"name": "a"}, {"name": "b", "repeats": 2}, work={"seeds": "0-1,7", "shards": shards})
    return place, create_campaign(whole, folder, place)


def test_units_are_rows_by_repetitions(tmp_path: Path) -> None:
    place, manifest = two(tmp_path, 3)
    with Units(place, manifest) as units:
        assert (units.rows, units.total) == (7, 19)
        assert [units.row_of(number) for number in range(19)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 6]
        assert [units.repeat_of(number) for number in range(19)] == [0, 1, 7] * 5 + [0, 1] * 2
        assert [units.dataset_of(index) for index in range(7)] == ["a"] * 5 + ["b"] * 2
        assert [list(units.units_of_row(index)) for index in (0, 4, 5, 6)] == [[0, 1, 2], [12, 13, 14], [15, 16], [17, 18]]
        unit = units.unit(16)
        assert (unit.number, unit.repeat, unit.row.index, unit.row.dataset) == (16, 1, 5, "b")
        assert unit.row.data == plain(0)
        assert unit.row.source.endswith("b.jsonl:1")


@pytest.mark.parametrize(("shards", "deal"), [(3, "rows"), (7, "rows"), (8, "units"), (19, "units")])
def test_every_unit_is_in_one_shard(tmp_path: Path, shards: int, deal: str) -> None:
    place, manifest = two(tmp_path, shards)
    assert (manifest.shards, manifest.deal) == (shards, deal)
    with Units(place, manifest) as units:
        dealt = {shard: list(units.of_shard(shard)) for shard in range(shards)}
        assert sorted(number for numbers in dealt.values() for number in numbers) == list(range(19))
        assert all(numbers and numbers == sorted(numbers) for numbers in dealt.values())
        assert all(units.shard_of(number) == shard for shard, numbers in dealt.items() for number in numbers)
        if deal == "rows":
            assert all(len({units.shard_of(number) for number in units.units_of_row(row)}) == 1 for row in range(7))


def test_seeds_are_those_of_the_rule(tmp_path: Path) -> None:
    place, manifest = made(tmp_path, [plain(0), plain(1)], work={"repeats": 3, "seed": 5})
    with Units(place, manifest) as units:
        task = units.row(1).id
        first = int.from_bytes(hashlib.sha256(f"5:{task}:2".encode()).digest()[:4], "big") >> 1
        assert units.unit(5).seed == derive_seed(5, task, 2) == first
        assert len({units.unit(number).seed for number in range(6)}) == 6
        assert all(0 <= units.unit(number).seed < 1 << 31 for number in range(6))
    for rule, seeds in (("repeat", [0, 1, 2, 0, 1, 2]), ("none", [NO_SEED] * 6)):
        work = dict(manifest.identity["work"]) | {"seed_rule": rule}
        with Units(place, manifest.model_copy(update={"identity": {"work": work}})) as units:
            assert [units.unit(number).seed for number in range(6)] == seeds


def test_a_seed_does_not_depend_on_other_rows_or_shards(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    first, few = made(tmp_path / "x", [plain(0), plain(1)], work={"repeats": 2, "shards": 1})
    second, more = made(tmp_path / "y", [plain(9), plain(1), plain(0)], work={"repeats": 4, "shards": 3})
    with Units(first, few) as one, Units(second, more) as other:
        assert [one.unit(number).seed for number in (2, 3)] == [other.unit(number).seed for number in (4, 5)]


def test_rows_are_read_again_when_they_were_forgotten(tmp_path: Path) -> None:
    place, manifest = made(tmp_path, [plain(number) for number in range(100)])
    with Units(place, manifest) as units:
        assert [units.row(index).data for index in (*range(100), 3, 99)] == [plain(index) for index in (*range(100), 3, 99)]
        assert units.row(99) is units.row(99)
        assert [units.task_of(index) for index in range(100)] == [units.row(index).id for index in range(100)]


def test_numbers_outside_are_refused(tmp_path: Path) -> None:
    place, manifest = made(tmp_path, [plain(0)], work={"repeats": 2})
    with Units(place, manifest) as units:
        for wrong in (-1, 2):
            for ask in (units.row_of, units.repeat_of, units.shard_of, units.unit):
                with pytest.raises(IndexError):
                    ask(wrong)
        for look in (units.row, units.task_of, units.units_of_row, units.dataset_of, lambda shard: list(units.of_shard(shard))):
            with pytest.raises(IndexError):
                look(1)


def test_inputs_that_were_edited_are_not_believed(tmp_path: Path) -> None:
    place, manifest = made(tmp_path, [plain(0), plain(1)])
    whole = place.inputs.read_bytes()
    place.inputs.write_bytes(whole + b"{}\n")
    with pytest.raises(UserError, match="the manifest says 2 rows"):
        Units(place, manifest)
    place.inputs.write_bytes(whole.replace(b'{"id"', b'["id"'))
    with Units(place, manifest) as units:
        for ask in (units.row, units.task_of):
            with pytest.raises(UserError, match=r"inputs\.jsonl:2: not the row that was written"):
                ask(1)
    place.index.write_bytes(b"odd")
    with pytest.raises(UserError, match=r"inputs\.index: cannot read"):
        Units(place, manifest)
