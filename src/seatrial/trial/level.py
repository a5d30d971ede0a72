"""Runs the processes of one level, one after another, each with its own log; reads the metrics and import proofs that they leave."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.core.errors import UserError
from seatrial.core.files import number_to_json, write_bytes, write_json, write_text
from seatrial.core.loop import Context, Loop, Phase
from seatrial.core.records import Diagnosis, ImportProof, PhaseOutcome
from seatrial.core.series import Damage, Metrics, Overlap, Series
from seatrial.core.specs import Level
from seatrial.evidence.changes import CHANGED_FILE
from seatrial.evidence.imports import read_imports
from seatrial.evidence.redact import Redactor
from seatrial.loops import loop_of
from seatrial.metrics.read import read_metrics, read_run
from seatrial.runtime.process import ProcessSpec, Tick, run_stoppable
from seatrial.triage.diagnose import diagnose
from seatrial.trial import run_dir
from seatrial.trial.preflight import child_environment
from seatrial.trial.progress import Listener, Running, newest

SERVER_LOG = "server.log"
"""What a server that a phase started wrote; unlike run.log it did not pass through us."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines that the user set; None keeps the level's own."""

    deadline_minutes: float | None = None
    stall_minutes: float | None = None


@dataclass(frozen=True, slots=True)
class RunContext:
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


def run_level(bench: RunContext, level: Level, directory: Path) -> tuple[PhaseOutcome, ...]:
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


def _run_phase(bench: RunContext, level: Level, directory: Path, phases: Sequence[Phase], phase: Phase) -> PhaseOutcome:
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
    metrics = directory / phase.name / "metrics.jsonl"

    def tick(beat: Tick) -> None:
        step, reward = newest(metrics)
        bench.listener(Running(level.number, level.title, phase.name, beat.seconds, step, phase.steps, reward, beat.last_line))

    outcome = run_stoppable(spec, tick)
    bench.redactor.file(directory / phase.name / SERVER_LOG)
    return PhaseOutcome(
        name=phase.name,
        exit_code=outcome.exit_code,
        ended=outcome.ended,
        seconds=round(outcome.seconds, 2),
        cpu_seconds=round(outcome.cpu_seconds, 2),
        signal=outcome.signal,
    )


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


IMPORTS = "imports.jsonl"
_SHOWN = 6


def read_level_metrics(loop: Loop, directory: Path) -> Metrics:
    """All metrics of a level; a file that cannot be read is damage."""
    series: dict[str, Series] = {}
    damage: list[Damage] = []
    overlaps: list[Overlap] = []
    sources: list[str] = []
    for prefix, paths in loop.measures.metric_files(directory).items():
        try:
            found = read_metrics(paths, prefix)
        except UserError as error:
            damage.append(Damage(str(paths[0]), "whole file", 0, error.message))
            continue
        series.update(found.series)
        damage += found.damage
        overlaps += found.overlaps
        sources += found.sources
    return Metrics(series=series, damage=tuple(damage), overlaps=tuple(overlaps), sources=tuple(sources))


def metrics_of_run(path: Path, level: int | None = None, also: Sequence[Path] = ()) -> Metrics:
    """The metrics of one run: of a file, of a directory, or of a level of a trial, which `level` names. Several runs are a UserError."""
    place = _trial_of(path)
    if place is None:
        trials = sorted(file.parent for file in path.glob("*/trial.json")) if path.is_dir() else []
        if len(trials) == 1:
            return metrics_of_run(trials[0], level, also)
        if level is not None and not trials:
            raise UserError(f"--level {level}: {path} is no run directory of a trial", "leave --level out, or give a run directory")
        if trials:
            names = ", ".join(trial.name for trial in trials[:_SHOWN]) + (" …" if len(trials) > _SHOWN else "")
            raise UserError(f"{path}: holds {len(trials)} trials: {names}", f"give the run directory of one: {trials[0]}")
        return read_run([path, *also])
    if also:
        raise UserError(f"--also: {path} belongs to a trial, whose level is read whole", "leave --also out")
    trial = run_dir.read(place)
    directories = {planned.number: run_dir.level_directory(place, planned) for planned in trial.plan.levels}
    there = {number: directory for number, directory in directories.items() if directory.is_dir()}
    here = next((number for number, directory in there.items() if directory == path.absolute()), None)
    wanted = here if level is None else level
    if wanted is None and len(there) == 1:
        wanted = next(iter(there))
    listed = ", ".join(map(str, there)) or "none"
    if wanted is None:
        fix = f"choose one: --level {next(iter(there), 0)}"
        raise UserError(f"{path}: a trial with {len(there)} levels ({listed}), each of them a run of its own", fix)
    if wanted not in there or here not in (None, wanted):
        raise UserError(f"{path}: level {wanted} has no directory here", f"choose from {listed}")
    found = read_level_metrics(loop_of(trial.plan), there[wanted])
    return found if found.sources or found.damage else read_metrics([there[wanted] / "metrics.jsonl"])


def _trial_of(path: Path) -> Path | None:
    """The run directory that a path is, or whose level it is."""
    path = path.absolute()
    if not path.is_dir():
        return None
    candidates = (path, *([path.parent] if path.name == "levels" else []), *([path.parent.parent] if path.parent.name == "levels" else []))
    return next((place for place in candidates if (place / "trial.json").is_file()), None)


def write_level_metrics(metrics: Metrics, path: Path) -> None:
    """One row per step with every tag, in strict JSON."""
    rows: dict[int, dict[str, float | str]] = {}
    for tag, series in metrics.series.items():
        for step, value in zip(series.steps, series.values, strict=True):
            rows.setdefault(step, {})[tag] = number_to_json(value)
    lines = [json.dumps({"step": step, **rows[step]}, ensure_ascii=False, allow_nan=False) for step in sorted(rows)]
    write_text(path, "".join(line + "\n" for line in lines))


def level_imports(directory: Path) -> tuple[ImportProof, ...]:
    """What the processes of a level imported from where; nothing when the file is torn, which is judged with the level."""
    try:
        return read_imports(directory / IMPORTS)
    except UserError:
        return ()


def read_diagnosis(loop: Loop, log: Path) -> Diagnosis:
    return diagnose(log, loop.milestones(), loop.signatures())
