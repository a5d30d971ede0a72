"""Carrying a campaign to its end: rounds of jobs, here or on Slurm, until nothing is owed; then merge and profile.

- One conductor at a time (a lock in the campaign's directory). On Slurm it may leave: jobs go on, and `resume` takes up where they are.
- What is launched is derived from what is missing, each time anew. A round that still waits or runs is followed, never doubled.
- It ends when everything is settled, when the campaign stopped by itself, or after `work.rounds` rounds that left something owed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from seatrial.launch.interrupt import check_stop, stop_requested
from seatrial.launch.jobdir import job_dir
from seatrial.launch.local.batch import run_batch
from seatrial.launch.local.machine import gpus_here
from seatrial.launch.slurm import submit as slurm
from seatrial.launch.slurm.status import LIVE, Poller, Snapshot, snapshots
from seatrial.model.job import Batch, UnitState
from seatrial.model.profile import Profile
from seatrial.rollouts import rounds
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.manifest import Manifest, load, load_campaign
from seatrial.rollouts.place import Place
from seatrial.rollouts.rounds import Round
from seatrial.rollouts.status import Status, Watch
from seatrial.rollouts.stops import stopped
from seatrial.rollouts.units import Units

LOCAL = "local"
_LOOK_S = 2.0

Say = Callable[[str], None]
Show = Callable[[Status], None]


@dataclass(frozen=True, slots=True)
class Where:
    """Where the jobs of a campaign run."""

    name: str = LOCAL
    """`local`, or `slurm:PROFILE`."""
    profile: Profile | None = None

    @property
    def gpus_per_node(self) -> int:
        """GPUs of a node, or of this machine."""
        return self.profile.gpus_per_node if self.profile else len(gpus_here())


class Conductor:
    """Carries one campaign."""

    def __init__(self, place: Place, where: Where, say: Say, show: Show) -> None:
        self.place, self.where = place, where
        self.manifest: Manifest = load(place)
        self.campaign: Campaign = load_campaign(place)
        self._say, self._show = say, show

    def carry(self) -> Status:
        """Launch and follow rounds until there is nothing to do, or no sense in another. Raises `Interrupted` when asked to stop."""
        with slurm.locked(self.place.root), Units(self.place, self.manifest) as units:
            watch = Watch(self.place, self.manifest, units)
            self._follow_last(watch)
            status = watch.look()
            for _ in range(self.campaign.work.rounds):
                if not status.owed or stopped(self.place):
                    break
                before = status.owed
                self._run(self._next(watch), watch)
                check_stop()
                status = watch.look()
                if status.owed == before and not stopped(self.place):
                    self._say(f"the round settled nothing: {self._why()}")
                    break
            return status

    def submit(self) -> Status:
        """Launch one round on Slurm and leave it there."""
        with slurm.locked(self.place.root), Units(self.place, self.manifest) as units:
            watch = Watch(self.place, self.manifest, units)
            status = watch.look()
            if status.owed and not self._live():
                self._hand_over(self._next(watch))
            return status

    def _planned(self, watch: Watch) -> Round:
        largest = -(-self.manifest.units // self.manifest.shards)
        return rounds.plan(self.place, watch.owed_by_shard(), largest, self.where.name)

    def _next(self, watch: Watch) -> Round:
        planned = self._planned(watch)
        rounds.store(self.place, planned)
        return planned

    def _batch(self, planned: Round) -> Batch:
        return rounds.batch_of(self.place, self.campaign, planned, self.where.gpus_per_node, merge=self.where.profile is not None)

    def _run(self, planned: Round, watch: Watch) -> None:
        directory = rounds.directory(self.place, planned.number)
        tasks = f"{len(planned.tasks)} task{'s' if len(planned.tasks) > 1 else ''}"
        self._say(f"round {planned.number} on {self.where.name}: {planned.owed} rollouts in {tasks}")
        if self.where.profile is None:
            with self._shown(watch):
                run_batch(self._batch(planned), directory, self._say)
            return
        self._hand_over(planned)
        self._follow(planned, watch)

    def _hand_over(self, planned: Round) -> None:
        assert self.where.profile is not None
        directory = rounds.directory(self.place, planned.number)
        sent = slurm.submit(self._batch(planned), self.where.profile, self.where.name.partition(":")[2], directory)
        self._say("; ".join(f"submitted {item.job} as {item.slurm}" for item in sent))

    def _live(self) -> Round | None:
        """The last round, if it was submitted to Slurm and has not ended."""
        past = rounds.rounds(self.place)
        if not past or past[-1].on == LOCAL or not rounds.is_launched(self.place, past[-1].number):
            return None
        directory = rounds.directory(self.place, past[-1].number)
        sent = job_dir(directory, rounds.COLLECT).submission()
        return past[-1] if sent and not _collected(Poller([directory]).poll()) else None

    def _follow_last(self, watch: Watch) -> None:
        """A round on Slurm that has not ended is followed before another is planned."""
        if live := self._live():
            self._say(f"round {live.number} on {live.on} has not ended: following it")
            self._follow(live, watch)

    def _follow(self, planned: Round, watch: Watch) -> None:
        """Until the collecting jobs have ended; the merge that comes after them is not waited for."""
        poller = Poller([rounds.directory(self.place, planned.number)])
        for snapshot in snapshots(poller):
            self._show(watch.look())
            if snapshot.controller:
                self._say(f"Slurm does not answer ({snapshot.controller}); jobs are not lost")
            if _collected(snapshot):
                return

    @contextmanager
    def _shown(self, watch: Watch) -> Iterator[None]:
        """Show the status while the jobs run here."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(_LOOK_S):
                self._show(watch.look())

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _why(self) -> str:
        """What the last round's units say of their end."""
        directory = rounds.directory(self.place, rounds.rounds(self.place)[-1].number)
        units = [unit for unit in Poller([directory]).poll().units if unit.job == rounds.COLLECT and unit.state is not UnitState.DONE]
        reasons = list(dict.fromkeys(unit.reason for unit in units if unit.reason))
        more = f"; logs: seatrial jobs logs {directory} {rounds.COLLECT} --index {units[0].index}" if units else ""
        return "; ".join(reasons[:3] or ["no reason was left"]) + more


def _collected(snapshot: Snapshot) -> bool:
    return all(unit.state not in LIVE for unit in snapshot.units if unit.job == rounds.COLLECT)


def cancel(place: Place) -> tuple[str, ...]:
    """Cancel what waits or runs on Slurm."""
    past = rounds.rounds(place)
    if not past or past[-1].on == LOCAL or stop_requested():
        return ()
    return slurm.cancel(rounds.directory(place, past[-1].number))


def wait_a_moment() -> None:
    """Between two looks of somebody who only watches."""
    until = time.monotonic() + _LOOK_S
    while time.monotonic() < until:
        check_stop()
        time.sleep(0.1)
