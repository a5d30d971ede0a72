"""The lease: one holder, taken over by rule, never by comparing clocks, and whoever is late learns it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from seatrial.rollouts.journal import attempts as holders
from seatrial.rollouts.journal.attempts import (
    RENEW_S,
    STALE_S,
    Attempt,
    Lease,
    LeaseFile,
    LeaseHeldError,
    LeaseHolder,
    LeaseLostError,
    holder_of,
    newest,
)


class Clock:
    """A clock of its own, which only sleeping moves; `beats` are things that happen meanwhile."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.beats: list[Lease] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.beats:
            lease.renew()


def elsewhere() -> LeaseHolder:
    """A holder on another machine, of which nothing can be known."""
    return LeaseHolder.here().model_copy(update={"host": "far", "boot": "other"})


def take(directory: Path, holder: LeaseHolder | None = None, wait_s: float = 0, clock: Clock | None = None) -> Lease:
    clock = clock or Clock()
    return Lease.acquire(directory, holder or LeaseHolder.here(), wait_s, clock=clock, sleep=clock.sleep)


def test_numbers_rise_and_a_released_lease_is_free_at_once(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        with take(tmp_path / "new" / "shard") as lease:
            assert lease.holder.number == number
            lease.renew()
    assert newest(tmp_path / "new" / "shard") == 3
    assert sorted(path.name for path in (tmp_path / "new" / "shard").iterdir()) == [f"lease-000{number}.json" for number in (1, 2, 3)]


def test_a_living_holder_keeps_it(tmp_path: Path) -> None:
    lease = take(tmp_path)
    with pytest.raises(LeaseHeldError, match=rf"attempt 1 \(process {os.getpid()} on .*\) holds the lease.*; waited 10 s"):
        take(tmp_path, wait_s=10)
    lease.renew()
    assert holder_of(tmp_path) == LeaseFile(holder=lease.holder)


def test_a_dead_process_of_this_machine_is_taken_over_at_once(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    started = holders._started(child.pid)
    assert started is not None
    take(tmp_path, LeaseHolder.here().model_copy(update={"pid": child.pid, "started": started}))
    with pytest.raises(LeaseHeldError):
        take(tmp_path)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, but not collected
    assert take(tmp_path).holder.number == 2
    child.communicate()


def test_another_process_of_the_same_number_is_not_the_holder(tmp_path: Path) -> None:
    mine = LeaseHolder.here()
    assert not mine.gone()
    assert mine.model_copy(update={"started": mine.started - 1}).gone()


@pytest.mark.parametrize("key", ["boot", "namespace"])
def test_the_same_pid_elsewhere_says_nothing(tmp_path: Path, key: str) -> None:
    dead = LeaseHolder.here().model_copy(update={"pid": 2**22 + 1})
    assert dead.gone()
    assert not dead.model_copy(update={key: "other"}).gone()


def test_a_lost_node_is_taken_over_after_a_silence_on_our_own_clock(tmp_path: Path) -> None:
    lost, clock = take(tmp_path, elsewhere()), Clock()
    began = clock.now
    ours = take(tmp_path, wait_s=2 * STALE_S, clock=clock)
    assert STALE_S <= clock.now - began < STALE_S + 1
    assert ours.holder.number == 2
    with pytest.raises(LeaseLostError, match="attempt 2 holds the lease, attempt 1 must stop"):
        lost.renew()


def test_a_holder_elsewhere_that_beats_keeps_it_for_ever(tmp_path: Path) -> None:
    clock = Clock()
    clock.beats = [take(tmp_path, elsewhere(), clock=clock)]
    with pytest.raises(LeaseHeldError):
        take(tmp_path, wait_s=2 * STALE_S, clock=clock)


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_wall_clocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    held = take(tmp_path, elsewhere())
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + jump)
    for path in tmp_path.iterdir():
        os.utime(path, (1.7e9 - jump, 1.7e9 - jump))
    with pytest.raises(LeaseHeldError):
        take(tmp_path, wait_s=STALE_S - 1)
    held.renew()
    mine = LeaseHolder.here()
    assert not mine.gone()


def test_a_fenced_holder_cannot_undo_the_takeover(tmp_path: Path) -> None:
    late = take(tmp_path, elsewhere())
    ours = take(tmp_path, wait_s=2 * STALE_S)
    late.release()
    late._write(released=False)
    ours.check()
    found = holder_of(tmp_path)
    assert found is not None
    assert found.holder == ours.holder
    with pytest.raises(LeaseHeldError):
        take(tmp_path)


def test_renewing_often_writes_seldom(tmp_path: Path) -> None:
    clock = Clock()
    lease = take(tmp_path, clock=clock)
    for _ in range(100):
        clock.now += RENEW_S / 10
        lease.renew()
    found = holder_of(tmp_path)
    assert found is not None
    assert 8 <= found.counter <= 10


def test_a_lease_that_cannot_be_read_is_watched_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "lease-0004.json").write_bytes(b"")
    with pytest.raises(LeaseHeldError, match="cannot be read"):
        take(tmp_path, wait_s=STALE_S / 2)
    assert holder_of(tmp_path) is None
    assert take(tmp_path, wait_s=2 * STALE_S).holder.number == 5


def test_attempts_without_a_lease_count_too(tmp_path: Path) -> None:
    Attempt.open(tmp_path, LeaseHolder.here().model_copy(update={"number": 7})).close()
    assert take(tmp_path).holder.number == 8
    assert holder_of(tmp_path / "none") is None


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    got: list[int] = []
    start = threading.Barrier(12)

    def race() -> None:
        start.wait()
        try:
            got.append(take(tmp_path).holder.number)
        except LeaseHeldError:
            pass

    racers = [threading.Thread(target=race) for _ in range(12)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert got == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["lease-0001.json"]
