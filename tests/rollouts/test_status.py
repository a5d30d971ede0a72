"""Where a campaign stands: counts of the journal, who works on it, how fast, and what is owed where."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seatrial.rollouts import campaign_rounds
from seatrial.rollouts.campaign_dir import CampaignDir, ShardState, write_state, write_stop_file
from seatrial.rollouts.campaign_runner import FRESH_S, StatusReader
from seatrial.rollouts.journal.journal_scan import Scanner
from seatrial.rollouts.manifest import Units, load_manifest
from tests.rollouts.profiled import attempt, campaign, collected, failed, ok, questions, record


@contextmanager
def watching(place: CampaignDir) -> Iterator[StatusReader]:
    manifest = load_manifest(place)
    with Units(place, manifest) as units:
        yield StatusReader(place, manifest, units)


def working(place: CampaignDir, shard: int, *, pid: int = 7, rate: float = 2.0, ended: str | None = None) -> None:
    """A collector says how it stands."""
    now = time.time()
    said = {"shard": shard, "attempt": 1, "token": "00ff", "host": "n1", "pid": pid, "started": now, "updated": now, "ended": ended}
    counts = {"units": 4, "owed": 2, "ok": 2, "failed": 0, "open": 3, "rate": rate}
    write_state(place, ShardState.model_validate({**said, **counts}))


def test_a_campaign_that_was_never_launched(tmp_path: Path) -> None:
    with watching(campaign(tmp_path, {"a": questions(3)})) as watch:
        found = watch.read()
    assert (found.units, found.ok, found.failed, found.owed) == (12, 0, 0, 12)
    assert (found.rows, found.rows_done, found.shards, found.shards_done) == (3, 0, 2, 0)
    assert (found.per_s, found.eta_s, found.mean_reward, found.round, found.on) == (None, None, None, 0, "")
    assert found.owing_most == (0, 1)


def test_counts_are_those_of_the_journal(tmp_path: Path) -> None:
    place = campaign(tmp_path, {"a": questions(3)})
    collected(place, [[ok(1.0), ok(0.0), ok(1.0), ok(1.0)], [ok(0.0), failed(), failed("parse", final=False), None], [None] * 4])
    attempt(place, 0, [record(place, 0, ok(0.0)), b"torn\n"], number=2)
    campaign_rounds.save_round(place, campaign_rounds.plan_round(place, {0: 8, 1: 4}, 8, "slurm:x"))
    write_stop_file(place, "too many failures", "somebody")
    with watching(place) as watch:
        found = watch.read()
        assert watch.owed_by_shard == {0: 4, 1: 2}
    assert (found.ok, found.failed, found.owed, found.settled) == (5, 1, 6, 6)
    assert (found.rows_done, found.shards_done) == (1, 0)
    assert found.mean_reward == pytest.approx(3 / 5)
    assert dict(found.failures) == {"timeout": 1, "parse": 1}
    assert (found.torn, found.duplicates, found.conflicts, found.foreign) == (1, 1, 1, 0)
    assert (found.round, found.on, found.stopped) == (1, "slurm:x", "too many failures")


@pytest.mark.parametrize("shards", [1, 3, 7])
def test_what_each_shard_owes_is_what_a_scan_of_its_units_finds(tmp_path: Path, shards: int) -> None:
    place = campaign(tmp_path, {"a": questions(3), "b": questions(2)}, repeats=3, shards=shards, b={"repeats": 1})
    collected(place, [[ok(1.0), None, ok(1.0)], [ok(0.0)] * 3, [None] * 3, [ok(1.0)], [None]])
    manifest = load_manifest(place)
    assert manifest.deal == ("units" if shards == 7 else "rows")
    with Units(place, manifest) as units:
        watch = StatusReader(place, manifest, units)
        found = watch.read()
        scanner = Scanner(place, units)
        scanner.update()
        owed = {shard: len(list(scanner.owed([shard]))) for shard in range(shards)}
    assert watch.owed_by_shard == {shard: count for shard, count in owed.items() if count}
    assert found.rows_done == 2
    assert found.shards_done == sum(count == 0 for count in owed.values())


def test_collectors_that_wrote_lately_are_at_work(tmp_path: Path) -> None:
    place = campaign(tmp_path, {"a": questions(4)}, shards=4)
    working(place, 0)
    working(place, 1)  # the same process with another shard: its requests are counted once
    working(place, 2, pid=8, ended="servers")
    working(place, 3, pid=9)
    (gone,) = place.shard(3).glob("state-*")
    os.utime(gone, (time.time() - 2 * FRESH_S,) * 2)
    with watching(place) as watch:
        found = watch.read()
    assert (found.collectors, found.open) == (1, 3)
    assert found.seen_s is not None
    assert 0 <= found.seen_s < FRESH_S
    assert found.per_s == pytest.approx(4.0)
    assert found.eta_s == pytest.approx(16 / 4)


def test_how_long_the_last_collector_is_silent(tmp_path: Path) -> None:
    place = campaign(tmp_path, {"a": questions(4)}, shards=2)
    for shard, age in ((0, FRESH_S / 2), (1, FRESH_S - 2)):
        working(place, shard, pid=shard)
        (file,) = place.shard(shard).glob("state-*")
        os.utime(file, (time.time() - age,) * 2)
    with watching(place) as watch:
        found = watch.read()
    assert found.seen_s == pytest.approx(FRESH_S / 2, abs=2)


def test_the_speed_is_what_was_seen_over_the_last_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, now = campaign(tmp_path, {"a": questions(3)}, shards=1), 1000.0
    monkeypatch.setattr("seatrial.rollouts.campaign_runner.time.monotonic", lambda: now)
    lines: list[bytes] = []
    with watching(place) as watch:
        speeds = []
        for unit in range(6):
            lines.append(record(place, unit, ok(1.0)))
            attempt(place, 0, lines)
            speeds.append(watch.read().per_s)
            now += 30.0
        assert speeds[:3] == [None, pytest.approx(1 / 30), pytest.approx(1 / 30)]
        assert speeds[-1] == pytest.approx(1 / 30)
        now += 1000.0
        assert watch.read().per_s is None  # nothing came for long, and nobody says anything


def test_a_complete_campaign_has_no_time_to_go(tmp_path: Path) -> None:
    place = collected(campaign(tmp_path, {"a": questions(1)}, shards=1), [[ok(1.0)] * 4])
    working(place, 0)
    with watching(place) as watch:
        found = watch.read()
    assert (found.owed, found.eta_s, found.collectors, found.owing_most) == (0, 0.0, 0, ())
    assert found.seen_s is None
