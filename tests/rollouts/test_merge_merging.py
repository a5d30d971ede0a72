"""The merge: complete or refused, ordered, byte for byte the same, whole or not there."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any

import pytest

from seatrial.core.errors import BlockedError, UserError
from seatrial.rollouts import manifest as manifests
from seatrial.rollouts.campaign_dir import CampaignDir
from seatrial.rollouts.journal.attempts import Lease, LeaseHeldError, LeaseHolder, LeaseLostError
from seatrial.rollouts.manifest import Units
from seatrial.rollouts.results import campaign_merge
from seatrial.rollouts.results.campaign_merge import MergeRefusedError, MergeResult, merge_campaign, read_result
from seatrial.rollouts.rollout_record import check, head_of, unit_of
from tests.rollouts.profiled import attempt, campaign, failed, ok, questions, record


@pytest.fixture
def place(tmp_path: Path) -> CampaignDir:
    """Four rows, two repetitions, two shards: units 0, 1, 4, 5 are of shard 0."""
    return campaign(tmp_path, {"q": questions(4)}, repeats=2, shards=2)


def merged(place: CampaignDir, **options: Any) -> MergeResult:
    manifest = manifests.load_manifest(place)
    with Units(place, manifest) as units:
        return merge_campaign(place, manifest, units, **options)


def fill(place: CampaignDir, skip: tuple[int, ...] = ()) -> None:
    """All units in some order; the last one failed for good."""
    for shard, units in ((0, (5, 0, 4, 1)), (1, (6, 3, 7, 2))):
        attempt(place, shard, [record(place, unit, ok(unit / 8) if unit < 7 else failed("parse")) for unit in units if unit not in skip])


def files_of(place: CampaignDir) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.merged.iterdir() if path.is_file()}


def test_a_complete_campaign(place: CampaignDir) -> None:
    fill(place)
    said: list[str] = []
    result = merged(place, progress=said.append)
    assert (result.expected, result.ok, result.failed, result.missing, result.coverage) == (8, 7, 1, 0, 7 / 8)
    assert (result.duplicates, result.conflicts, result.torn, result.foreign, result.partial) == (0, 0, 0, 0, False)
    assert result.failed_by_kind == {"parse": 1}
    data = (place.merged / "rollouts.jsonl").read_bytes()
    assert data == b"".join(record(place, unit, ok(unit / 8)) for unit in range(7))
    assert (place.merged / "failures.jsonl").read_bytes() == record(place, 7, failed("parse"))
    assert result.sha256 == hashlib.sha256(data).hexdigest()
    assert [source.path for source in result.sources] == [f"shards/0000{shard}/attempt-0001-00ff.jsonl" for shard in (0, 1)]
    assert sum(source.records for source in result.sources) == 8
    assert read_result(place) == result
    assert said == ["reading the journal", "writing 7 rollouts"]


def test_an_incomplete_one_is_refused_with_what_to_do(place: CampaignDir) -> None:
    fill(place, skip=(1, 2, 3))
    with pytest.raises(MergeRefusedError) as refused:
        merged(place)
    with Units(place, manifests.load_manifest(place)) as units:
        task = units.row(0).id
    assert "incomplete: 3 of 8 units have no result (4 ok, 1 failed for good)" in refused.value.message
    assert f"the first: {task}/1" in refused.value.message
    assert f"seatrial rollouts resume {place.root}, or" in refused.value.fix
    assert refused.value.fix.endswith(f"seatrial rollouts merge {place.root} --partial")
    assert isinstance(refused.value, BlockedError)
    assert files_of(place) == {}
    assert read_result(place) is None


def test_partial_says_what_is_missing(place: CampaignDir) -> None:
    fill(place, skip=(1, 2))
    result = merged(place, partial=True)
    assert (result.missing, result.coverage, result.partial, result.rollouts.rows) == (2, 5 / 8, True, 5)
    with Units(place, manifests.load_manifest(place)) as units:
        assert result.missing_ids == (f"{units.row(0).id}/1", f"{units.row(1).id}/0")
    fill(place)
    assert not merged(place, partial=True).partial
    assert read_result(place) == merged(place)


def test_a_refusal_leaves_the_last_merge_alone(place: CampaignDir) -> None:
    fill(place)
    merged(place)
    before = files_of(place)
    fill(place, skip=(0,))
    with pytest.raises(MergeRefusedError):
        merged(place)
    assert files_of(place) == before


def test_winners(place: CampaignDir) -> None:
    fill(place)
    attempt(place, 0, [record(place, 0, ok(0.9)), record(place, 1, failed()), record(place, 0, ok(0.8))], number=2)
    attempt(place, 1, [record(place, 7, ok(0.7)), record(place, 7, ok(0.6))], number=2)
    result = merged(place)
    assert (result.ok, result.failed, result.duplicates, result.conflicts) == (8, 0, 5, 2)
    with Units(place, manifests.load_manifest(place)) as units:
        assert result.conflict_ids == (f"{units.row(0).id}/0", f"{units.row(3).id}/1")
    lines = (place.merged / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    assert [unit_of(line) for line in lines] == list(range(8))
    rewards = [head_of(line, check(line)).reward for line in lines]
    assert rewards == [0.0, *(unit / 8 for unit in range(1, 7)), 0.7]


def test_torn_and_foreign_records_are_counted_and_left_out(place: CampaignDir) -> None:
    fill(place)
    line = record(place, 0, ok(0.0))
    attempt(place, 0, [line[:30] + b"\n", record(place, 2, ok(0.5)), line[:60]], number=2)
    result = merged(place)
    assert (result.torn, result.foreign, result.ok, result.duplicates) == (2, 1, 7, 0)
    assert result.sources[1].torn == 2


def test_the_same_journal_gives_the_same_bytes(place: CampaignDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(place)
    merged(place)
    first = files_of(place)
    monkeypatch.setattr(campaign_merge, "_WINDOW", 300)  # smaller than two records
    merged(place)
    assert files_of(place) == first
    monkeypatch.setattr(campaign_merge, "_WINDOW", 1)  # smaller than one
    merged(place)
    assert files_of(place) == first
    source = random.Random(0)
    for path in place.shards.rglob("attempt-*"):
        os.utime(path, (source.random() * 1e9,) * 2)
    merged(place)
    assert files_of(place) == first


class Killed(BaseException):
    """Stands for kill -9 where it cannot be caught anyway: see kills.py for the real thing."""


@pytest.mark.parametrize("step", ["publish", "rollouts.jsonl", "failures.jsonl", "merge.json"])
def test_a_merge_that_ends_anywhere_leaves_nothing_half(place: CampaignDir, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    fill(place)
    lines = [record(place, unit, ok(unit / 8)) for unit in range(7)]
    whole = {"rollouts.jsonl": b"".join(lines), "failures.jsonl": record(place, 7, failed("parse"))}
    replace = Path.replace

    def stop_at(at: Path, target: Path) -> Path:
        if target == place.merged / step:
            raise Killed
        return replace(at, target)

    def stop(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", stop_at)
        if step == "publish":
            patch.setattr(campaign_merge, "_publish", stop)
        with pytest.raises(Killed):
            merged(place)
    found = files_of(place)
    assert set(found) == set(list(whole)[: {"failures.jsonl": 1, "merge.json": 2}.get(step, 0)])
    assert all(whole[name] == data for name, data in found.items())
    assert read_result(place) is None
    assert merged(place).ok == 7


def test_a_merge_that_is_repeated_takes_nothing_away(place: CampaignDir, monkeypatch: pytest.MonkeyPatch) -> None:
    # On Slurm the job that merges and whoever follows the jobs both do it, and a reader may come between.
    seen: list[bool] = []
    real = Path.replace

    def replace(path: Path, target: Path) -> None:
        if target.name in ("rollouts.jsonl", "failures.jsonl"):
            seen.append((place.merged / "merge.json").is_file())
        real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    fill(place, skip=(6,))
    merged(place, partial=True)
    merged(place, partial=True)
    attempt(place, 1, [record(place, 6, ok(1.0))], number=2)
    merged(place)
    # Two files each: the first merge, the same again, and one with more in it.
    assert seen == [False, False, True, True, False, False]


def test_temporaries_of_a_killed_merge_are_removed(place: CampaignDir) -> None:
    fill(place)
    place.merged.mkdir()
    for name in (".rollouts.jsonl.0001-aa", ".failures.jsonl.0001-aa", ".merge.json.x7"):
        (place.merged / name).write_text("half")
    merged(place)
    assert set(files_of(place)) == {"rollouts.jsonl", "failures.jsonl", "merge.json"}


def test_two_merges_one_waits_or_refuses(place: CampaignDir) -> None:
    fill(place)
    other = Lease.acquire(place.merged / ".lease", LeaseHolder.here(), 0)
    with pytest.raises(LeaseHeldError, match="holds the lease"):
        merged(place, wait_s=0)
    other.release()
    assert merged(place, wait_s=0).ok == 7


def test_a_merge_that_was_taken_over_replaces_nothing(place: CampaignDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(place)
    kinds = campaign_merge._kinds

    def taken_over(path: Path) -> dict[str, int]:
        lease = place.merged / ".lease" / "lease-0002.json"
        lease.write_text("{}")
        return kinds(path)

    monkeypatch.setattr(campaign_merge, "_kinds", taken_over)
    with pytest.raises(LeaseLostError):
        merged(place)
    assert files_of(place) == {}


def test_a_journal_that_changes_under_the_merge_is_not_merged(place: CampaignDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(place)
    path = attempt(place, 0, [])
    copy_winners = campaign_merge.copy_winners
    for data, why in (
        (b"", "it is shorter"),
        (b"x" * 5000, "not a record"),
        (b"".join(record(place, unit, ok(unit / 8)) for unit in (0, 5, 4, 1)), "another unit|checksum|not a record|newline"),
        (None, "No such file"),
    ):
        fill(place)

        def changed(*words: Any, data: bytes | None = data) -> Any:
            path.unlink() if data is None else path.write_bytes(data)
            return copy_winners(*words)

        with monkeypatch.context() as patch:
            patch.setattr(campaign_merge, "copy_winners", changed)
            with pytest.raises(BlockedError, match=why) as blocked:
                merged(place)
        assert str(path) in blocked.value.message
        assert files_of(place) == {}


def test_a_full_disk_blocks_and_leaves_nothing(place: CampaignDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(place)

    def full(sink: campaign_merge._Sink, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(campaign_merge._Sink, "put", full)
    with pytest.raises(BlockedError, match=r"rollouts\.jsonl.*No space left"):
        merged(place)
    assert files_of(place) == {}


def test_a_result_whose_files_were_changed_is_refused(place: CampaignDir) -> None:
    fill(place)
    merged(place)
    (place.merged / "failures.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match=r"failures\.jsonl: 0 bytes instead of"):
        read_result(place)


def test_the_journal_is_only_read(place: CampaignDir) -> None:
    fill(place)
    before = {path: path.read_bytes() for path in place.shards.rglob("*") if path.is_file()}
    merged(place)
    assert {path: path.read_bytes() for path in place.shards.rglob("*") if path.is_file()} == before
