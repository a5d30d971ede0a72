"""Carrying a campaign to its end: rounds of jobs, here or on Slurm, until nothing is owed; then merge and profile.

- One conductor at a time (`conducting`). On Slurm it may leave: jobs go on, and `resume` takes up where they are.
- What is launched is derived from what is missing, each time anew. A round that still waits or runs is followed, never doubled.
- It ends when everything is settled, when the campaign was stopped (stop.json), when a round settled nothing and no other would, or
  after `work.rounds` rounds; while something is owed it says why it ended.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.launch.cachelock import exclusive
from seatrial.launch.interrupt import check_stop
from seatrial.launch.jobdir import job_dir
from seatrial.launch.linelog import STAMP_LENGTH
from seatrial.launch.local.batch import run_batch
from seatrial.launch.local.machine import gpus_here
from seatrial.launch.slurm import commands
from seatrial.launch.slurm import submit as slurm
from seatrial.launch.slurm.status import LIVE, LOCK, Poller, Snapshot, is_busy, snapshots
from seatrial.model.errors import UserError
from seatrial.model.job import Batch, UnitState
from seatrial.model.profile import Profile
from seatrial.model.verdict import ExitCode
from seatrial.model.words import counted
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.collect.state import newest_states
from seatrial.rollouts.collect.stops import stop
from seatrial.rollouts.conduct import preflight, rounds
from seatrial.rollouts.conduct.rounds import LOCAL, Round
from seatrial.rollouts.conduct.status import Status, Watch
from seatrial.rollouts.manifest import Manifest, load, load_campaign
from seatrial.rollouts.place import Place
from seatrial.rollouts.units import Units

_LOOK_S = 2.0
_LOCK_S = 5.0
_SAYS = "seatrial: "
_TAIL = 4096
_OWN_END = re.compile(r"the client exited with (2|99)\b")
"""How a collector ends that has said why."""

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

    @property
    def most_tasks(self) -> int | None:
        """Tasks that the cluster takes in one array; None on this machine."""
        return commands.largest_array(commands.own_cluster()) if self.profile else None


def conducting(place: Place, say: Say) -> AbstractContextManager[None]:
    """Be the one who changes and carries a campaign; a BlockedError says who does already."""
    fix = f"wait for it to end, or stop it: seatrial rollouts cancel {shlex.quote(str(place.root))}"
    return exclusive(place.root / LOCK, f"another seatrial that carries {place.root}", say, _LOCK_S, fix)


class Conductor:
    """Carries one campaign; for whoever holds `conducting`."""

    def __init__(self, place: Place, where: Where, say: Say, show: Show) -> None:
        self.place, self.where = place, where
        self.manifest: Manifest = load(place)
        self.campaign: Campaign = load_campaign(place)
        self._say, self._show = say, show
        self.refused = False
        """Whether the last round ended with what only another campaign, or another server, can mend; its fix was said."""

    def carry(self) -> Status:
        """Launch and follow rounds until there is nothing to do, or no sense in another. Raises `Interrupted` when asked to stop."""
        with Units(self.place, self.manifest) as units:
            watch = Watch(self.place, self.manifest, units)
            self._follow_last(watch)
            status, launched, idle = watch.look(), 0, False
            while status.owed and not status.stopped and not idle and launched < self.campaign.work.rounds:
                before, launched = status, launched + 1
                self._run(self._next(watch), watch)
                check_stop()
                status = watch.look()
                # A failure brings its unit nearer to being given up; a round without a record would be the same again.
                same = status.failures == before.failures or (not status.ok and self._servers_were_gone(watch))
                idle = same and status.owed == before.owed
            if status.owed and launched and not status.stopped:
                ended = "the round settled nothing" if idle else f"something is owed after {counted(launched, 'round')} (work.rounds)"
                self._say(f"{ended}: {self._why()}")
            return status

    def _servers_were_gone(self, watch: Watch) -> bool:
        """Whether every shard that owes something ended because nobody answered, or nobody who knows what we ask for."""
        states = newest_states(self.place, watch.owed_by_shard).values()
        return bool(states) and all(state.ended == "servers" for state, _ in states)

    def submit(self) -> None:
        """Launch one round on Slurm and leave it there."""
        with Units(self.place, self.manifest) as units:
            watch = Watch(self.place, self.manifest, units)
            if not watch.look().owed:
                self._say("nothing is owed: nothing was submitted")
            elif live := self._live():
                self._say(f"round {live.number} on {live.on} has not ended: nothing was submitted")
            else:
                self._hand_over(self._next(watch))

    def _next(self, watch: Watch) -> Round:
        """Plan what is owed now, once everything that can be known before is known."""
        preflight.check(self.campaign, here=self.where.profile is None)
        preflight.build(self.campaign, self._say)
        largest = -(-self.manifest.units // self.manifest.shards)
        work, where = self.campaign.work, self.where
        planned = rounds.plan(self.place, watch.owed_by_shard, largest, where.name, work.parallel, where.most_tasks)
        rounds.store(self.place, planned)
        return planned

    def _batch(self, planned: Round) -> Batch:
        return rounds.batch_of(self.place, self.campaign, planned, self.where.gpus_per_node, merge=self.where.profile is not None)

    def _run(self, planned: Round, watch: Watch) -> None:
        directory = rounds.directory(self.place, planned.number)
        tasks, owed = counted(len(planned.tasks), "task"), counted(planned.owed, "rollout")
        self._say(f"round {planned.number} on {self.where.name}: {owed} in {tasks}")
        if self.where.profile is None:
            with self._shown(watch, directory):
                run_batch(self._batch(planned), directory, self._tell, lambda: Redactor(os.environ).lines().line)
            return
        self._hand_over(planned)
        self._follow(planned, watch)

    def _tell(self, text: str) -> None:
        """What the launcher says, except that a collector ended with something owed: that is told in its own words."""
        if not _OWN_END.search(text):
            self._say(text)

    def _hand_over(self, planned: Round) -> None:
        assert self.where.profile is not None
        directory = rounds.directory(self.place, planned.number)
        sent = slurm.submit(self._batch(planned), self.where.profile, self.where.name.partition(":")[2], directory)
        self._say("; ".join(f"submitted {item.job} as {item.slurm}" for item in sent))

    def _live(self) -> Round | None:
        """The last round, if it was submitted to Slurm and still collects."""
        last = _submitted(self.place)
        return last if last and not _collected(Poller([rounds.directory(self.place, last.number)]).poll()) else None

    def _follow_last(self, watch: Watch) -> None:
        """A round on Slurm that has not ended is followed before another is planned."""
        if live := self._live():
            self._say(f"round {live.number} on {live.on} has not ended: following it")
            self._follow(live, watch)

    def _follow(self, planned: Round, watch: Watch) -> None:
        """Until the collecting jobs have ended; the merge that comes after them is not waited for."""
        poller, silent = Poller([rounds.directory(self.place, planned.number)]), ""
        for snapshot in snapshots(poller):
            self._show(watch.look())
            if snapshot.controller and snapshot.controller != silent:
                self._say(f"Slurm does not answer ({snapshot.controller}); jobs are not lost")
            silent = snapshot.controller
            if _collected(snapshot):
                return

    @contextmanager
    def _shown(self, watch: Watch, directory: Path) -> Iterator[None]:
        """Show the status while the jobs run here; as long as nothing happens, what the first collector says."""
        over = threading.Event()

        def look() -> None:
            # What cannot be read now is said by the look that follows the round.
            with suppress(UserError, OSError):
                first, told = watch.look(), ""
                while not over.wait(_LOOK_S):
                    status = watch.look()
                    self._show(status)
                    waits = (status.owed, status.failures) == (first.owed, first.failures)
                    words = _last_words(directory, 0) if waits else []
                    # An end has its fix in a second line, and is told when the round has ended.
                    if len(words) == 1 and words[0] != told:
                        told = words[0]
                        self._say(f"task 0: {told}")

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _why(self) -> str:
        """How the first task of the last round that is not done ended, and the last words of its collector."""
        directory = rounds.directory(self.place, rounds.rounds(self.place)[-1].number)
        units = [unit for unit in Poller([directory]).poll().units if unit.job == rounds.COLLECT and unit.state is not UnitState.DONE]
        if not units:
            return "what failed may heal, and is owed"
        first, others = units[0], f" (and {len(units) - 1} more)" if len(units) > 1 else ""
        words = _last_words(directory, first.index)
        own = _OWN_END.search(first.reason)
        self.refused = own is not None and own[1] == str(ExitCode.USAGE.value)
        if not words or not own:
            words = [str(first.reason or first.state), *words]
        return f"task {first.index}{others}: " + "\n  ".join(words)


def _last_words(directory: Path, task: int) -> list[str]:
    """The end of a collector's log: its last message, and the fix below it; nothing when it said nothing."""
    log = job_dir(directory, rounds.COLLECT).log("client", 0, task)
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _TAIL))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    texts = [line[STAMP_LENGTH:] for line in lines]
    starts = [number for number, text in enumerate(texts) if text.startswith(_SAYS)]
    return [text.removeprefix(_SAYS).strip() for text in texts[starts[-1] :]] if starts else []


def _collected(snapshot: Snapshot) -> bool:
    return all(unit.state not in LIVE for unit in snapshot.units if unit.job == rounds.COLLECT)


def _submitted(place: Place) -> Round | None:
    """The last round, if its jobs were handed to Slurm."""
    past = rounds.rounds(place)
    if not past or past[-1].on == LOCAL or not rounds.is_launched(place, past[-1].number):
        return None
    return past[-1] if job_dir(rounds.directory(place, past[-1].number), rounds.COLLECT).submission() else None


def cancel(place: Place) -> tuple[str, ...]:
    """Stop a campaign that somebody carries, or whose jobs wait or run on Slurm; gives what was stopped.

    stop.json comes first: whoever follows the jobs would launch another round for what they leave owed.
    """
    load(place)
    last, carried = _submitted(place), is_busy(place.root)
    directory = rounds.directory(place, last.number) if last else None
    live = directory if directory and not Poller([directory]).poll().ended else None
    if live or carried:
        stop(place, "it was cancelled", "seatrial rollouts cancel")
    jobs = slurm.cancel(live) if live else ()
    return (*(f"job {name}" for name in jobs), *(("what another seatrial carries",) if carried else ()))


def wait_a_moment() -> None:
    """Between two looks of somebody who only watches."""
    until = time.monotonic() + _LOOK_S
    while time.monotonic() < until:
        check_stop()
        time.sleep(0.1)
