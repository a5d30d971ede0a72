"""`seatrial jobs`: submit jobs to a cluster or run them here, list them, wait, read logs, cancel, submit again.

- Exit code of `wait`, and of `submit --wait` and `--on local`: 0 when every unit is done, 1 when a client failed, 99
  when something else ended a unit, 130 on Ctrl-C, which leaves the jobs alone.
- Scripts of `--dry-run` are printed as they are, so that they can be kept in a file and submitted by hand.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from seatrial.cli.input_files import read_jobs
from seatrial.cli.request import profile_named
from seatrial.core.errors import UserError
from seatrial.core.files import write_text
from seatrial.core.jobs import Batch, Profile, Submission, UnitState, UnitStatus
from seatrial.core.verdict import ExitCode
from seatrial.evidence.redact import Redactor
from seatrial.runtime import jobdir, slurm_status, slurm_submit
from seatrial.runtime.interrupt import Interruptible
from seatrial.runtime.jobdir import BATCH, find, job_dir
from seatrial.runtime.local_jobs import gpus_here, run_batch
from seatrial.runtime.slurm import render_batch
from seatrial.runtime.slurm_status import LIVE, Poller, Snapshot
from seatrial.trial.trial_request import load_config

_SPEAK_S = 30.0
_SHOWN = 5


def close(units: Sequence[UnitStatus]) -> None:
    """Name what is not done, and end with the exit code."""
    left = [unit for unit in units if unit.state is not UnitState.DONE]
    for unit in left[:_SHOWN]:
        typer.echo(unit_line(unit), err=True)
    if len(left) > _SHOWN:
        typer.echo(f"and {len(left) - _SHOWN} more; `seatrial jobs list --units` names them", err=True)
    if not left:
        raise typer.Exit(ExitCode.PASS)
    raise typer.Exit(ExitCode.FAIL if any(unit.state is UnitState.FAILED for unit in left) else ExitCode.BLOCKED)


def _counts(units: Sequence[UnitStatus]) -> str:
    """`12 done, 3 running`, in the order of the states."""
    counts = ((state, sum(unit.state is state for unit in units)) for state in UnitState)
    return ", ".join(f"{count} {state}" for state, count in counts if count)


def _why_waiting(units: Sequence[UnitStatus]) -> str:
    """What units wait for, as Slurm says it."""
    reasons = dict.fromkeys(unit.reason for unit in units if unit.state is UnitState.WAITING and unit.reason)
    return f" (waiting for: {', '.join(list(reasons)[:_SHOWN])})" if reasons else ""


def job_lines(units: Sequence[UnitStatus]) -> Iterable[str]:
    """Name, Slurm id and counts of each job, and the first reason that somebody should read."""
    fine = (UnitState.DONE, UnitState.RUNNING)
    for name in dict.fromkeys(unit.job for unit in units):
        own = [unit for unit in units if unit.job == name]
        slurm = next((unit.slurm.partition("_")[0] for unit in own if unit.slurm), "-")
        reason = next((unit.reason for unit in own if unit.reason and unit.state not in fine), "")
        yield "\t".join((name, slurm, _counts(own), reason)).rstrip()


def unit_line(unit: UnitStatus) -> str:
    """Job, index, Slurm's id, our state, Slurm's word, reason."""
    return "\t".join((unit.job, str(unit.index), unit.slurm or "-", unit.state, unit.scheduler or "-", unit.reason)).rstrip()


def silence(why: str, since: str = "") -> str:
    """Why nothing can be said; `since` a time."""
    return f"Slurm does not answer{since} ({why}); jobs are not lost"


class JobsProgress:
    """A line whenever something changed, and at least every 30 seconds."""

    def __init__(self) -> None:
        self._last, self._spoke, self._silent_since = "", float("-inf"), ""

    def show(self, snapshot: Snapshot) -> None:
        """Print what there is to say."""
        text = _counts(snapshot.units) + _why_waiting(snapshot.units)
        if snapshot.controller:
            self._silent_since = self._silent_since or time.strftime("%H:%M:%S")
            text = silence(snapshot.controller, f" since {self._silent_since}")
        else:
            self._silent_since = ""
        if text != self._last or time.monotonic() - self._spoke >= _SPEAK_S:
            typer.echo(f"seatrial: {text}", err=True)
            self._last, self._spoke = text, time.monotonic()


class UnitEnded:
    """Whether a unit has ended; Slurm is asked now and then."""

    def __init__(self, directory: Path, job: str, index: int) -> None:

        self._job, self._index = job, index
        self._poller, self._asked, self._pause = Poller([directory]), float("-inf"), slurm_status.FIRST_WAIT_S

    def __call__(self) -> bool:
        """Ask, but not more often than is polite."""

        if time.monotonic() - self._asked < self._pause:
            return False
        self._asked, self._pause = time.monotonic(), min(self._pause * 1.2, slurm_status.LONGEST_WAIT_S)
        units = self._poller.poll().units
        return next(unit.state not in LIVE for unit in units if (unit.job, unit.index) == (self._job, self._index))


app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    help="Submit jobs, list them, wait for them, read their logs, cancel them, submit again what is not done.\n\n"
    "Jobs and profiles are described in docs/slurm.md. Exit codes: 0 every unit done, 1 a client failed, 99 something else "
    "ended a unit or Slurm refused it, 2 usage, 130 interrupted.",
    no_args_is_help=True,
)

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A directory that `seatrial jobs submit` made, or the run directory of a trial.")
]
JobName = Annotated[str | None, typer.Argument(metavar="[JOB]", help="A job of the batch; not needed when there is only one.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration file. Default: the nearest seatrial.toml.")]
Deadline = Annotated[float | None, typer.Option("--deadline", metavar="MINUTES", min=0.01, help="Stop waiting after so long.")]
PLACES = ("jobs", "trials")
"""Where `list` looks below the working directory."""


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="[[jobs]] tables.")],
    on: Annotated[
        str,
        typer.Option("--on", metavar="slurm[:PROFILE]|local", help="A profile of seatrial.toml, or this machine."),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="Directory of the batch. Default: jobs/<time>-<job>-<id>.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print and validate the scripts; submit nothing.")] = False,
    wait_: Annotated[bool, typer.Option("--wait", help="Follow the jobs until they have ended.")] = False,
    config: ConfigFile = None,
) -> None:
    """Submit the jobs of a file to a cluster, or run them on this machine.

    With --on local the jobs run here, now, and this command ends with them. With --dry-run it ends with 0 when Slurm would
    take every job, else with 99.
    """

    if on == "local":
        if dry_run:
            raise UserError("--dry-run prints scripts of Slurm; --on local has none", "leave out --dry-run, or use --on slurm:PROFILE")
        batch = read_jobs(file, len(gpus_here()), Path.cwd())
        _run_here(batch, _directory(out, batch))
    name, profile = profile_named(load_config(config, None), on)
    batch = read_jobs(file, profile.gpus_per_node, Path.cwd())
    directory = _directory(out, batch)
    if dry_run:
        _dry_run(batch, profile, directory)
    try:
        with Interruptible():
            submissions = slurm_submit.submit(batch, profile, name, directory)
            typer.echo(str(directory))
            _print_submitted(submissions)
    except KeyboardInterrupt:
        _cut(directory)
    finally:
        _hide_from_git(directory)
    if wait_:
        wait(directory)


@app.command("list")
def list_(
    directories: Annotated[list[Path] | None, typer.Argument(metavar="[DIR]...", help="Batches, or places to look for them.")] = None,
    units: Annotated[bool, typer.Option("--units", help="One line per unit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List jobs and where their units stand. Without DIR it looks in jobs and trials below the working directory."""
    for place in directories or ():
        if not place.is_dir():
            raise UserError(f"{place}: no such directory", "name a directory that `seatrial jobs submit` made, or one above it")
    places = directories or [Path(name) for name in PLACES]
    snapshot = Poller([batch for place in places for batch in find(place)]).poll()
    if snapshot.controller:
        typer.echo(f"seatrial: {silence(snapshot.controller)}", err=True)
    if as_json:
        rows = [{"batch": str(batch), **unit.model_dump(mode="json")} for batch, found in snapshot.batches for unit in found]
        typer.echo(json.dumps({"controller": snapshot.controller, "units": rows}, indent=2))
        return
    for batch, found in snapshot.batches:
        lines = map(unit_line, found) if units else job_lines(found)
        for line in lines:
            typer.echo(f"{batch}\t{line}")
    if not snapshot.batches:
        typer.echo(f"no jobs in {', '.join(map(str, places))}; `seatrial jobs list DIR` looks elsewhere", err=True)


@app.command()
def wait(directory: Directory, deadline: Deadline = None) -> None:
    """Follow jobs until all have ended. Ctrl-C stops following; the jobs go on.

    Exit codes: 0 every unit done, 1 a client failed, 99 something else ended a unit or the deadline passed, 130 Ctrl-C.
    """

    directory = _batch(directory)
    poller, shown = Poller([directory]), JobsProgress()
    snapshot = None
    try:
        for snapshot in slurm_status.snapshots(poller, None if deadline is None else deadline * 60):
            shown.show(snapshot)
    except KeyboardInterrupt:
        typer.echo(f"\nseatrial: interrupted; the jobs go on. Cancel them with: seatrial jobs cancel {directory}", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    assert snapshot is not None
    slurm_status.redact_logs(snapshot, Redactor(os.environ).log, lambda line: typer.echo(f"seatrial: {line}", err=True))
    if not snapshot.ended:
        typer.echo(f"seatrial: not ended after {deadline:g} minutes; the jobs go on", err=True)
    close(snapshot.units)


@app.command()
def logs(
    directory: Directory,
    job: JobName = None,
    component: Annotated[str | None, typer.Option("--component", help="Default: the client. `slurm` is the script itself.")] = None,
    copy: Annotated[int, typer.Option("--copy", min=0, help="Which replica.")] = 0,
    index: Annotated[int | None, typer.Option("--index", min=0, help="Which unit of an array.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the log grows, until the unit has ended.")] = False,
) -> None:
    """Print the log of one component of one unit."""
    directory = _batch(directory)
    clear, begun = Redactor(os.environ).lines().line, ""
    found = slurm_status.find_job(jobdir.load(directory), job)
    path = slurm_status.log_file(directory, found, component, copy, index)
    for text in slurm_status.log_text_of(path, UnitEnded(directory, found.name, index or 0) if follow else None):
        *rows, begun = (begun + text).split("\n")
        typer.echo("".join(f"{clear(row)}\n" for row in rows), nl=False)
    typer.echo(clear(begun), nl=False)


@app.command()
def cancel(
    directory: Directory, jobs: Annotated[list[str] | None, typer.Argument(metavar="[JOB]...", help="Jobs; none means all.")] = None
) -> None:
    """Cancel jobs that have not ended."""
    cancelled = slurm_submit.cancel(_batch(directory), jobs or ())
    for name in cancelled:
        typer.echo(f"cancelled {name}")
    if not cancelled:
        typer.echo("nothing to cancel: no job is waiting or running", err=True)


@app.command()
def resubmit(
    directory: Directory,
    on: Annotated[str, typer.Option("--on", metavar="slurm:PROFILE", help="A profile of seatrial.toml.")],
    config: ConfigFile = None,
) -> None:
    """Submit again what is not done: these units, and the jobs that come after them."""
    name, profile = profile_named(load_config(config, None), on)
    directory = _batch(directory)
    try:
        with Interruptible():
            submissions = slurm_submit.resubmit(directory, profile, name)
    except KeyboardInterrupt:
        _cut(directory)
    if submissions:
        _print_submitted(submissions)
    else:
        typer.echo(f"{directory}: every unit is done, nothing to submit")


def _directory(out: Path | None, batch: Batch) -> Path:
    """Where the user wants the batch, or a new place below jobs/."""
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{batch.jobs[0].name}-{secrets.token_hex(2)}"
    return (out or Path("jobs") / name).absolute()


def _hide_from_git(directory: Path) -> None:
    """The directory of a batch may lie in a checkout under test, which must not look changed."""
    if (directory / BATCH).exists():
        write_text(directory / ".gitignore", "*\n")


def _dry_run(batch: Batch, profile: Profile, directory: Path) -> None:
    scripts = render_batch(batch, profile, directory, {job.name: f"seatrial-{job.name}-00000000" for job in batch.jobs})
    waits = {}
    for job in batch.jobs:
        ids = [f"after{after.when}:<id of {after.job}>" for after in job.after] + [f"afterok:{slurm}" for slurm in job.after_ids]
        waits[job.name] = f", submitted with --dependency={','.join(ids)} --kill-on-invalid-dep=yes" if ids else ""
        if job is not batch.jobs[0]:
            typer.echo(f"\n# ===== {job_dir(directory, job).script} =====")
        typer.echo(scripts[job.name], nl=False)
    answers = slurm_submit.validate(batch, profile, directory)
    for name, answer in answers:
        typer.echo(f"seatrial: {name}: {answer}{waits[name]}", err=True)
    raise typer.Exit(ExitCode.PASS if all(answer == "ok" for _, answer in answers) else ExitCode.BLOCKED)


def _run_here(batch: Batch, directory: Path) -> None:
    typer.echo(f"seatrial: {directory}", err=True)
    try:
        with slurm_submit.locked(directory), Interruptible() as stop:
            run_batch(batch, directory, lambda line: typer.echo(f"seatrial: {line}", err=True), lambda: Redactor(os.environ).lines().line)
    finally:
        _hide_from_git(directory)
    if stop.signal is not None:
        raise typer.Exit(ExitCode.INTERRUPTED)
    close(Poller([directory]).poll().units)


def _batch(directory: Path) -> Path:
    """The directory of a batch: this one, or the newest below it, as in the run directory of a trial."""
    return directory if (directory / BATCH).is_file() else next(reversed(list(find(directory))), directory)


def _cut(directory: Path) -> NoReturn:
    """Ctrl-C while jobs were handed over: say which are in the queue."""
    jobs = jobdir.load(directory).jobs if (directory / BATCH).is_file() else ()
    sent = {job.name: found.slurm or "id not known" for job in jobs if (found := job_dir(directory, job).submission())}
    left = [job.name for job in jobs if job.name not in sent]
    inside = ", ".join(f"{name} ({slurm})" for name, slurm in sent.items()) or "nothing"
    place = shlex.quote(str(directory))
    typer.echo(f"seatrial: {directory}: interrupted; submitted: {inside}; not submitted: {', '.join(left) or 'nothing'}", err=True)
    if sent:
        typer.echo(
            f"  cancel them with `seatrial jobs cancel {place}`; `seatrial jobs resubmit {place}` submits what is not done", err=True
        )
    raise typer.Exit(ExitCode.INTERRUPTED)


def _print_submitted(submissions: Iterable[Submission]) -> None:
    for item in submissions:
        count = f", {len(item.units)} units" if len(item.units) > 1 else ""
        typer.echo(f"submitted {item.job} as {item.slurm}{count}")
