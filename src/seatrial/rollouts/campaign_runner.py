"""Runs a campaign to its end (rounds of jobs, here or on Slurm, until nothing is pending), and says where it stands.

- One runner at a time (`campaign_lock`). On Slurm it may leave: jobs go on, and `resume` follows them.
- Each round is derived anew from what is missing. A round that waits or runs is followed, never doubled.
- It ends when all units are settled, when the campaign stopped (stop.json), when a round settled nothing and another would not either, or
  after `work.rounds` rounds; if units are pending it says why.
- Status comes from files alone: counts from the journal, so they are what merge will find, and the rate from state files that still change.
- `dry_run` shows what would be launched, and what Slurm says of it.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from seatrial.core.errors import UserError
from seatrial.core.jobs import Batch, Ending, Profile, UnitState
from seatrial.core.records import Record
from seatrial.core.text import counted
from seatrial.core.verdict import ExitCode
from seatrial.evidence.redact import Redactor
from seatrial.rollouts import campaign_rounds
from seatrial.rollouts.campaign import Campaign
from seatrial.rollouts.campaign_dir import CampaignDir, ShardState, newest_states, read_stop_file, write_stop_file
from seatrial.rollouts.campaign_rounds import LOCAL, Round
from seatrial.rollouts.journal.journal_scan import PENDING, Scanner
from seatrial.rollouts.manifest import Manifest, Units, load_campaign, load_manifest
from seatrial.runtime import slurm as commands
from seatrial.runtime import slurm_submit
from seatrial.runtime.filelock import exclusive
from seatrial.runtime.interrupt import check_stop
from seatrial.runtime.jobdir import BATCH, job_dir
from seatrial.runtime.local_jobs import gpus_here, run_batch
from seatrial.runtime.process import STAMP_LENGTH
from seatrial.runtime.slurm import render_batch
from seatrial.runtime.slurm_status import LIVE, LOCK, Poller, Snapshot, is_busy, redact_logs, snapshots

FRESH_S = 20.0
"""A collector writes its state every two seconds; file systems and clocks may lag."""
_WINDOW_S = 60.0
_ENOUGH_S = 3.0
"""What was seen over less time says little of the speed."""


class Status(Record):
    """A campaign at one moment."""

    name: str
    units: int
    ok: int
    failed: int
    owed: int
    rows: int
    rows_done: int
    """Rows all of whose repetitions are settled."""
    shards: int
    shards_done: int
    collectors: int
    """Collectors at work right now."""
    open: int
    seen_s: float | None = None
    """How long ago the last of these collectors wrote its state; None without any."""
    per_s: float | None
    """Rollouts a second; None when nothing is known of it."""
    eta_s: float | None
    mean_reward: float | None
    failures: Mapping[str, int]
    """Failure records by class, also of units that healed later."""
    torn: int
    duplicates: int
    conflicts: int
    foreign: int
    round: int
    """The last one; 0 when nothing was launched."""
    on: str
    stopped: str
    """Why it stopped by itself; empty when it did not."""
    accept: str = ""
    """The setting with which one that stopped for its failures goes on."""
    owing_most: tuple[int, ...]

    @property
    def settled(self) -> int:
        return self.ok + self.failed


class StatusReader:
    """Reads the status of a campaign repeatedly; each time only what was appended."""

    def __init__(self, place: CampaignDir, manifest: Manifest, units: Units) -> None:
        self._place, self._manifest, self._units = place, manifest, units
        self._scanner = Scanner(place, units)
        self._seen: deque[tuple[float, int]] = deque()
        self.owed_by_shard: dict[int, int] = {}
        """Shards that owe something, and how much, as of the last look."""

    def read(self) -> Status:
        scan = self._scanner.update()
        rows_done = self._count(scan.settled)
        owed = self.owed_by_shard
        # Collectors that wrote lately. A clock that lags behind the file system's must not make it the future.
        newest, now = newest_states(self._place, owed).values(), time.time()
        aged = [(state, max(0.0, now - written)) for state, written in newest if state.ended is None]
        working = [(state, age) for state, age in aged if age <= FRESH_S]
        states = [state for state, _ in working]
        settled = scan.ok + scan.failed
        rate = self._rate(settled, states)
        past = campaign_rounds.list_rounds(self._place)
        why = read_stop_file(self._place)
        return Status(
            name=self._manifest.name,
            units=self._manifest.units,
            ok=scan.ok,
            failed=scan.failed,
            owed=scan.owed,
            rows=self._manifest.rows,
            rows_done=rows_done,
            shards=self._manifest.shards,
            shards_done=self._manifest.shards - len(owed),
            collectors=len({(state.host, state.pid) for state in states}),
            open=sum({(state.host, state.pid): state.open for state in states}.values()),
            seen_s=min((age for _, age in working), default=None),
            per_s=rate,
            eta_s=scan.owed / rate if rate else (0.0 if not scan.owed else None),
            mean_reward=scan.reward_sum / scan.ok if scan.ok else None,
            failures=dict(scan.by_kind.most_common()),
            torn=scan.torn,
            duplicates=scan.duplicates,
            conflicts=scan.conflicts,
            foreign=scan.foreign,
            round=past[-1].number if past else 0,
            on=past[-1].on if past else "",
            stopped=why.reason if why else "",
            accept=why.accept if why else "",
            owing_most=tuple(sorted(owed, key=lambda shard: -owed[shard])[:5]),
        )

    def _count(self, settled: bytearray) -> int:
        """Set what each shard owes; gives the number of rows that owe nothing. Every two seconds, so no unit is looked at by itself."""
        shards, done = self._manifest.shards, 0
        counts = [0] * shards
        for row, (first, end) in enumerate(self._units.spans()):
            if missing := settled.count(PENDING, first, end):
                counts[row % shards] += missing
            else:
                done += 1
        if self._manifest.deal == "units":
            counts = [settled[shard::shards].count(PENDING) for shard in range(shards)]
        self.owed_by_shard = {shard: count for shard, count in enumerate(counts) if count}
        return done

    def _rate(self, settled: int, states: list[ShardState]) -> float | None:
        """What was seen over the last minute; at first what the collectors say."""
        now = time.monotonic()
        self._seen.append((now, settled))
        while self._seen[-1][0] - self._seen[0][0] > _WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        passed = now - since
        if passed > _ENOUGH_S and settled > before:
            return (settled - before) / passed
        said = sum(state.rate for state in states)
        return said or None


_LOOK_S = 2.0
_LOCK_S = 5.0
_SAYS = "seatrial: "
_TAIL = 4096
_OWN_END = re.compile(r"the client exited with (2|99)\b")
"""How a collector ends that has said why."""

Say = Callable[[str], None]
Show = Callable[[Status], None]


@dataclass(frozen=True, slots=True)
class RunTarget:
    """Where the jobs of a campaign run."""

    name: str = LOCAL
    """`local`, or `slurm:PROFILE`."""
    profile: Profile | None = None

    @property
    def gpus_per_node(self) -> int:
        return self.profile.gpus_per_node if self.profile else len(gpus_here())

    @property
    def most_tasks(self) -> int | None:
        """Tasks that the cluster takes in one array; None on this machine."""
        return commands.largest_array(commands.own_cluster()) if self.profile else None


def campaign_lock(place: CampaignDir, say: Say) -> AbstractContextManager[None]:
    """Lock the campaign; a BlockedError names the holder."""
    fix = f"wait for it to end, or stop it: seatrial rollouts cancel {shlex.quote(str(place.root))}"
    return exclusive(place.root / LOCK, f"another seatrial that carries {place.root}", say, _LOCK_S, fix)


class CampaignRunner:
    """Runs one campaign, whose `campaign_lock` is held."""

    def __init__(self, place: CampaignDir, where: RunTarget, say: Say, show: Show) -> None:
        self.place, self.where = place, where
        self.manifest: Manifest = load_manifest(place)
        self.campaign: Campaign = load_campaign(place)
        self._say, self._show = say, show
        self.refused = False
        """Whether the last round ended with what only another campaign, or another server, can mend; its fix was said."""

    def run(self) -> Status:
        """Launch and follow rounds until there is nothing to do, or no sense in another. Raises `Interrupted` when asked to stop."""
        with Units(self.place, self.manifest) as units:
            watch = StatusReader(self.place, self.manifest, units)
            if live := self._live():
                self._say(f"round {live.number} on {live.on} has not ended: following it")
                self._follow(live, watch)
            status, launched, idle = watch.read(), 0, False
            while status.owed and not status.stopped and not idle and launched < self.campaign.work.rounds:
                before, launched = status, launched + 1
                self._run(self._next(watch), watch)
                check_stop()
                status = watch.read()
                # A failure brings its unit nearer to being given up; a round without a record would be the same again.
                states = newest_states(self.place, watch.owed_by_shard).values()
                unanswered = bool(states) and all(state.ended == "servers" for state, _ in states)
                same = status.failures == before.failures or (not status.ok and unanswered)
                idle = same and status.owed == before.owed
            if status.owed and launched and not status.stopped:
                ended = "the round settled nothing" if idle else f"something is owed after {counted(launched, 'round')} (work.rounds)"
                self._say(f"{ended}: {self._why()}")
            return status

    def submit(self) -> None:
        with Units(self.place, self.manifest) as units:
            watch = StatusReader(self.place, self.manifest, units)
            if not watch.read().owed:
                self._say("nothing is owed: nothing was submitted")
            elif live := self._live():
                self._say(f"round {live.number} on {live.on} has not ended: nothing was submitted")
            else:
                self._hand_over(self._next(watch))

    def _next(self, watch: StatusReader) -> Round:
        """Plan what is owed now, once everything that can be known before is known."""
        campaign_rounds.check_campaign(self.campaign, here=self.where.profile is None)
        campaign_rounds.build_environments(self.campaign, self._say)
        largest = -(-self.manifest.units // self.manifest.shards)
        work, where = self.campaign.work, self.where
        planned = campaign_rounds.plan_round(self.place, watch.owed_by_shard, largest, where.name, work.parallel, where.most_tasks)
        campaign_rounds.save_round(self.place, planned)
        return planned

    def _batch(self, planned: Round) -> Batch:
        return campaign_rounds.batch_of(self.place, self.campaign, planned, self.where.gpus_per_node, merge=self.where.profile is not None)

    def _run(self, planned: Round, watch: StatusReader) -> None:
        directory = campaign_rounds.round_dir(self.place, planned.number)
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
        directory = campaign_rounds.round_dir(self.place, planned.number)
        sent = slurm_submit.submit(self._batch(planned), self.where.profile, self.where.name.partition(":")[2], directory)
        self._say("; ".join(f"submitted {item.job} as {item.slurm}" for item in sent))

    def _live(self) -> Round | None:
        """The last round, if it was submitted to Slurm and still collects."""
        last = _submitted(self.place)
        return last if last and not _collected(Poller([campaign_rounds.round_dir(self.place, last.number)]).poll()) else None

    def _follow(self, planned: Round, watch: StatusReader) -> None:
        """Until the collecting jobs have ended; the merge that comes after them is not waited for."""
        poller, silent = Poller([campaign_rounds.round_dir(self.place, planned.number)]), ""
        for snapshot in snapshots(poller):
            self._show(watch.read())
            if snapshot.controller and snapshot.controller != silent:
                self._say(f"Slurm does not answer ({snapshot.controller}); jobs are not lost")
            silent = snapshot.controller
            if _collected(snapshot):
                redact_logs(snapshot, Redactor(os.environ).log, self._say)
                return

    @contextmanager
    def _shown(self, watch: StatusReader, directory: Path) -> Iterator[None]:
        """Show the status while the jobs run here; as long as nothing happens, what the first collector says."""
        over = threading.Event()

        def look() -> None:
            # What cannot be read now is said by the look that follows the round.
            with suppress(UserError, OSError):
                first, told = watch.read(), ""
                while not over.wait(_LOOK_S):
                    status = watch.read()
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
        directory = campaign_rounds.round_dir(self.place, campaign_rounds.list_rounds(self.place)[-1].number)
        units = [
            unit for unit in Poller([directory]).poll().units if unit.job == campaign_rounds.COLLECT and unit.state is not UnitState.DONE
        ]
        if not units:
            return "what failed may heal, and is owed"
        first, others = units[0], f" (and {len(units) - 1} more)" if len(units) > 1 else ""
        words = _last_words(directory, first.index)
        code = first.result.exit_code if first.result and first.result.ending is Ending.CLIENT_FAILED else None
        self.refused = code == ExitCode.USAGE
        if not words or code not in (ExitCode.USAGE, ExitCode.BLOCKED):
            words = [str(first.reason or first.state), *words]
        return f"task {first.index}{others}: " + "\n  ".join(words)


def _last_words(directory: Path, task: int) -> list[str]:
    """The end of a collector's log: its last message, and the fix below it; nothing when it said nothing."""
    log = job_dir(directory, campaign_rounds.COLLECT).log("client", 0, task)
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
    return all(unit.state not in LIVE for unit in snapshot.units if unit.job == campaign_rounds.COLLECT)


def _submitted(place: CampaignDir) -> Round | None:
    """The last round, if its jobs were handed to Slurm."""
    past = campaign_rounds.list_rounds(place)
    if not past or past[-1].on == LOCAL:
        return None
    directory = campaign_rounds.round_dir(place, past[-1].number)
    launched = (directory / BATCH).is_file()  # before that nothing of it can run
    return past[-1] if launched and job_dir(directory, campaign_rounds.COLLECT).submission() else None


def cancel(place: CampaignDir) -> tuple[str, ...]:
    """Stop a campaign that a process runs, or whose jobs wait or run on Slurm; gives what was stopped.

    stop.json comes first: the process that follows the jobs would launch another round for what they leave pending.
    """
    load_manifest(place)
    last, carried = _submitted(place), is_busy(place.root)
    directory = campaign_rounds.round_dir(place, last.number) if last else None
    live = directory if directory and not Poller([directory]).poll().ended else None
    if live or carried:
        write_stop_file(place, "it was cancelled", "seatrial rollouts cancel")
    jobs = slurm_submit.cancel(live) if live else ()
    return (*(f"job {name}" for name in jobs), *(("what another seatrial carries",) if carried else ()))


def wait_a_moment() -> None:
    """Wait between two readings of the status."""
    until = time.monotonic() + _LOOK_S
    while time.monotonic() < until:
        check_stop()
        time.sleep(0.1)


class DryRun(NamedTuple):
    """A dry run."""

    text: str
    answers: tuple[tuple[str, str], ...] = ()
    """What Slurm says of each job: ok, or why it would refuse it."""


def dry_run(draft: CampaignDir, root: Path, campaign: Campaign, manifest: Manifest, where: RunTarget) -> DryRun:
    """The first round of a campaign that would lie in `root`; its inputs lie in `draft`."""
    with Units(draft, manifest) as units:
        sizes = {shard: sum(1 for _ in units.of_shard(shard)) for shard in range(manifest.shards)}
    planned = campaign_rounds.plan_round(draft, sizes, max(sizes.values()), where.name, campaign.work.parallel, where.most_tasks)
    batch = campaign_rounds.batch_of(CampaignDir(root), campaign, planned, where.gpus_per_node, merge=where.profile is not None)
    lines = [*_summary(campaign, manifest, sizes), ""]
    if where.profile is None:
        tasks = len(planned.tasks)
        count = f"{tasks} tasks at a time" if tasks > 1 else "1 task"
        lines.append(f"{count} on this machine, with all shards between them; {{index}} is the number of a task, which runs:")
        lines += [f"  {item.name} x {item.replicas}: {shlex.join(item.command)}" for item in batch.jobs[0].components]
        return DryRun("\n".join(lines))
    scripts = render_batch(
        batch, where.profile, root / "rounds" / "0001", {job.name: f"seatrial-{job.name}-00000000" for job in batch.jobs}
    )
    for name, script in scripts.items():
        lines += [f"# ===== {name} =====", script]
    return DryRun("\n".join(lines), slurm_submit.validate(batch, where.profile, draft.root / "rounds" / "0001"))


def _summary(campaign: Campaign, manifest: Manifest, sizes: dict[int, int]) -> list[str]:
    work, requests = campaign.work, campaign.requests
    minutes = max(sizes.values()) * work.rollout_s / requests.concurrency / 60
    each = f"about {minutes:.0f} min" if minutes >= 1 else "less than a minute"
    guess = f"{each} each, if a rollout takes {work.rollout_s:g} s and {requests.concurrency} are open"
    lines = [f"campaign {manifest.name}: {counted(manifest.rows, 'row')}, {counted(manifest.units, 'rollout')}"]
    for file in manifest.files:
        labels = manifest.repeats[file.dataset]
        lines.append(f"  {file.dataset}: {counted(file.rows, 'row')} x {len(labels)} ({file.path})")
    spread = f"{min(sizes.values())} to {max(sizes.values())}" if len(set(sizes.values())) > 1 else str(max(sizes.values()))
    of_each = f"{spread} rollouts" if max(sizes.values()) > 1 else "1 rollout"
    lines.append(f"  {counted(manifest.shards, 'shard')} of {of_each}, dealt by {manifest.deal}; {guess}")
    return lines
