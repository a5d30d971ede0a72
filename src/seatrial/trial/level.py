"""Running one level: its processes, one after another, each with its own log.

What they leave behind is judged by `assess`, which only reads files.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.evidence.functions import CHANGED_FILE
from seatrial.evidence.redact import Redactor
from seatrial.files import write_bytes, write_json
from seatrial.launch.interrupt import stop_requested
from seatrial.launch.process import ProcessSpec, Tick, run
from seatrial.model.knowledge import Level
from seatrial.model.loop import Context, Loop, Phase
from seatrial.model.record import PhaseOutcome
from seatrial.trial.follow import Follower
from seatrial.trial.preflight import child_environment
from seatrial.trial.progress import Listener

_TOGETHER_S = 1.0
"""How far apart the signals of a cluster to a child and to us may arrive, when they killed the child."""
SERVER_LOG = "server.log"
"""What a server that a phase started wrote; unlike run.log it did not pass through us."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines that the user set; None keeps the level's own."""

    deadline_minutes: float | None = None
    stall_minutes: float | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """What every level of a trial shares."""

    loop: Loop
    context: Context
    instruments: Path
    environ: dict[str, str]
    redactor: Redactor
    limits: Limits
    listener: Listener

    def import_path(self, beside: bool = False) -> tuple[str, ...]:
        """What stands on PYTHONPATH: checkouts under test first, then what the loop needs, then the instruments, which are all that
        a process beside the change gets."""
        if beside:
            return (str(self.instruments),)
        return (*self.context.import_path(), *self.loop.import_path(self.context), str(self.instruments))


def phase_log(directory: Path, phases: Sequence[Phase], phase: Phase) -> Path:
    """A level with one process has one log; otherwise each process has its own, joined at the end. What runs beside has its own."""
    within = [each for each in phases if not each.beside]
    return directory / "run.log" if within == [phase] else directory / phase.name / "run.log"


def run_level(bench: Bench, level: Level, directory: Path) -> tuple[PhaseOutcome, ...]:
    """Run the processes of a level until one of them fails. What an earlier attempt left is kept beside, not mixed in."""
    set_aside(directory)
    changed = bench.context.run_dir / "evidence" / CHANGED_FILE
    if changed.is_file():  # what the processes are to watch
        write_bytes(directory / CHANGED_FILE, changed.read_bytes())
    phases = bench.loop.phases(level, bench.context, directory)
    outcomes: list[PhaseOutcome] = []
    for phase in phases:
        (directory / phase.name).mkdir(parents=True, exist_ok=True)
        outcome = _run_phase(bench, level, directory, phases, phase)
        outcomes.append(outcome)
        write_json(directory / "phases.json", [item.model_dump(mode="json") for item in outcomes])
        if outcome.ended != "exited" or outcome.exit_code != 0:
            break
    bench.redactor.sweep(directory)
    _join_logs(directory, phases)
    return tuple(outcomes)


def set_aside(directory: Path) -> None:
    """Move an earlier attempt into `attempts/`, so that no metric of it is read as one of this attempt."""
    kept = [path for path in directory.glob("*") if path.name not in ("attempts", "command.sh")]
    if kept:
        number = max((int(path.name) for path in directory.glob("attempts/*") if path.name.isdecimal()), default=0) + 1
        target = directory / "attempts" / str(number)
        target.mkdir(parents=True)
        for path in kept:
            path.rename(target / path.name)


def _run_phase(bench: Bench, level: Level, directory: Path, phases: Sequence[Phase], phase: Phase) -> PhaseOutcome:
    limits = bench.limits
    spec = ProcessSpec(
        argv=phase.argv,
        env=child_environment(bench.environ, bench.import_path(phase.beside), phase.env),
        # An older Python puts the working directory first on its path: nothing else is among the instruments.
        cwd=phase.cwd or bench.instruments,
        log=phase_log(directory, phases, phase),
        run_id=f"{bench.context.run_dir.name}-{level.number}-{phase.name}-{time.time_ns()}",
        deadline_s=60 * (limits.deadline_minutes or level.deadline_minutes),
        stall_s=60 * (limits.stall_minutes or level.stall_minutes),
        watch=(directory / phase.name,),
        line_filter=bench.redactor.lines().line,
    )
    follower = Follower(bench.listener, level, phase, directory / phase.name / "metrics.jsonl")

    def tick(beat: Tick) -> None:
        follower.tick(beat.seconds, beat.last_line)

    outcome = run(spec, tick)
    bench.redactor.file(directory / phase.name / SERVER_LOG)
    cut = outcome.ended == "exited" and outcome.exit_code != 0 and stopped_too(outcome.signal)
    return PhaseOutcome(
        name=phase.name,
        exit_code=None if cut else outcome.exit_code,
        ended="interrupted" if cut else outcome.ended,
        seconds=round(outcome.seconds, 2),
        cpu_seconds=round(outcome.cpu_seconds, 2),
        signal=outcome.signal,
    )


def stopped_too(killed_by: int | None) -> bool:
    """Whether Seatrial was asked to stop when its child failed. A cluster signals every process of a job at once, and
    the child may be gone a moment before our own signal is seen: it must not look as if the loop had failed."""
    stops = time.monotonic() + (_TOGETHER_S if killed_by is not None else _TOGETHER_S / 10)
    while not stop_requested() and time.monotonic() < stops:
        time.sleep(0.02)
    return stop_requested()


def _join_logs(directory: Path, phases: Sequence[Phase]) -> None:
    """One run.log per level, with a heading per process; what runs beside the change is no part of the loop's log."""
    within = [phase for phase in phases if not phase.beside]
    if len(within) == 1:
        return
    with (directory / "run.log").open("wb") as whole:
        for phase in within:
            log = phase_log(directory, phases, phase)
            if log.is_file():
                whole.write(f"===== {phase.name} =====\n".encode())
                with log.open("rb") as part:
                    shutil.copyfileobj(part, whole)
