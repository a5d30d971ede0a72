"""`seatrial rollouts`: collect rollouts in campaigns: start, status, resume, cancel, demo; merge, profile, select, rescore, import and
export what was collected; and the commands that jobs of a campaign run.

Exit codes: 0 everything is settled, 99 something is pending, no rollout worked, or it was refused, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from seatrial.core.text import counted

if TYPE_CHECKING:
    from seatrial.rollouts.campaign import Campaign
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.campaign_runner import RunTarget, Status

_SPEAK_S = 10.0
_SILENT_S = 5.0
"""A collector says every two seconds where it stands."""
VERIFIERS = "exact, choice, math, code, judge, or a name of [verifiers]; a function needs a table there."
"""What may stand behind --verifier."""
_CLEAR = "\r\x1b[K"


def say(text: str) -> None:
    """A line for people, beside what a command prints."""
    typer.echo(f"seatrial: {text}", err=True)


def line(status: Status) -> str:
    """Everything that matters, in one line."""
    share = 100 * status.settled / status.units if status.units else 100.0
    parts = [f"{status.settled}/{status.units} rollouts ({share:.1f} %)", f"{status.shards_done}/{status.shards} shards"]
    if status.owed and status.per_s:
        parts.append(f"{status.per_s:.3g}/s, {duration(status.eta_s or 0)} to go")
    if status.mean_reward is not None:
        parts.append(f"mean reward {status.mean_reward:.3f}")
    if status.failed:
        parts.append(f"{status.failed} failed for good")
    if status.failures:
        parts.append("failures: " + _failures(status))
    if status.stopped:
        parts.append(f"stopped: {status.stopped}")
    return " · ".join(parts)


def table(status: Status) -> str:
    """The same and more, one fact per line."""
    rate = "-" if status.per_s is None else f"{status.per_s:.3g} rollouts/s"
    eta = "-" if status.eta_s is None else duration(status.eta_s)
    reward = "-" if status.mean_reward is None else f"{status.mean_reward:.4f}"
    where = f"round {status.round} on {status.on}" if status.round else "no round was launched"
    # A collector that was killed cannot say so: its silence is told.
    silent = status.seen_s is not None and status.seen_s > _SILENT_S
    collectors = f"{counted(status.collectors, 'collector')} {f'seen {status.seen_s:.0f} s ago' if silent else 'at work'}"
    facts = {
        "campaign": f"{status.name} ({where})",
        "rollouts": f"{status.settled} of {status.units} settled: {status.ok} ok, {status.failed} failed for good; {status.owed} owed",
        "rows": f"{status.rows_done} of {status.rows} settled",
        "shards": f"{status.shards_done} of {status.shards} done; {collectors}, {counted(status.open, 'request')} open",
        "speed": f"{rate}, time to go {eta}",
        "reward": f"mean {reward}",
        "failures": _failures(status) or "none",
    }
    if status.owing_most:
        facts["owing most"] = ", ".join(f"shard {number}" for number in status.owing_most)
    odd = {"torn": status.torn, "twice": status.duplicates, "contradicting": status.conflicts, "foreign": status.foreign}
    if any(odd.values()):
        facts["records"] = ", ".join(f"{count} {name}" for name, count in odd.items() if count)
    if status.stopped:
        facts["stopped"] = status.stopped
    return "\n".join(f"{name + ':':<12}{text}" for name, text in facts.items())


def _failures(status: Status) -> str:
    """Failures by class. They are records, of which most heal: that all did is said, since it looks like the opposite."""
    said = ", ".join(f"{kind} {count}" for kind, count in status.failures.items())
    return f"{said} (all healed)" if said and not status.failed and not status.owed else said


def duration(seconds: float) -> str:
    """`1 h 05 min`, `3 min 20 s`, `12 s`."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def _clear() -> None:
    """Take the line away that is rewritten: the one thing here that steers the terminal."""
    getattr(sys.stderr, "rich_proxied_file", sys.stderr).write(_CLEAR)


class CampaignProgress:
    """A line that is rewritten on a terminal, below what else is said; elsewhere a new one when something changed, now and then.

    Several threads may call it.
    """

    def __init__(self) -> None:
        self._last, self._spoke = "", float("-inf")
        self._rewrite = sys.stderr.isatty()
        self._lock = threading.Lock()

    def show(self, status: Status) -> None:
        text, now = line(status), time.monotonic()
        with self._lock:
            if self._rewrite:
                self._last = f"seatrial: {text}"[: shutil.get_terminal_size().columns - 1]  # a longer one would not be rewritten
                _clear()
                typer.echo(self._last, nl=False, err=True)
            elif text != self._last and (now - self._spoke >= _SPEAK_S or not status.owed):
                self._last, self._spoke = text, now
                say(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            if self._rewrite and self._last:
                _clear()
                typer.echo(f"seatrial: {text}\n{self._last}", nl=False, err=True)
            else:
                say(text)

    def close(self) -> None:
        """What follows is on a new line."""
        with self._lock:
            if self._rewrite and self._last:
                typer.echo(err=True)
                self._last = ""


def close(status: Status, directory: Path, mend: str = "") -> None:
    """The last lines; the exit code is 99 when something is owed, or when no rollout worked: then there is no result.

    `mend` is what to do about the latter, where that is not to retry them.
    """
    from seatrial.core.verdict import ExitCode

    typer.echo(table(status))
    place = shlex.quote(str(directory))
    if status.owed:
        are, them = ("is", "it") if status.owed == 1 else ("are", "them")
        say(f"{counted(status.owed, 'rollout')} {are} still owed; collect {them} with: seatrial rollouts resume {place}")
    elif not status.ok:
        then = mend or f"seatrial rollouts resume {place} --retry-failed"
        say(f"no rollout worked: {directory}/merged/failures.jsonl says why; then: {then}")
    if status.owed or not status.ok:
        raise typer.Exit(ExitCode.BLOCKED)


Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The campaign's directory.")]


def status(
    directory: Directory,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Look every two seconds until nothing is owed or it stopped. Ctrl-C ends it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --follow one line each time.")] = False,
) -> None:
    """Say where a campaign stands: shards, rollouts a second, failures by class, time to go, mean reward. Needs no server."""
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.campaign_runner import StatusReader, wait_a_moment
    from seatrial.rollouts.manifest import Units, load_manifest
    from seatrial.runtime.interrupt import Interruptible

    place = CampaignDir(directory)
    manifest = load_manifest(place)
    progress = CampaignProgress()
    with Units(place, manifest) as units, Interruptible(), closing(progress):
        watch = StatusReader(place, manifest, units)
        found = watch.read()
        while follow:
            if as_json:
                typer.echo(found.model_dump_json())
            else:
                progress.show(found)
            if not found.owed or found.stopped:
                break
            wait_a_moment()
            found = watch.read()
    if not follow:
        typer.echo(found.model_dump_json(indent=2) if as_json else table(found))


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PassAt = Annotated[float, typer.Option("--pass-at", metavar="REWARD", help="A reward of this and more is correct.")]


def merge(
    directory: Directory,
    partial: Annotated[bool, typer.Option("--partial", help="Merge what there is; merge.json says coverage and missing ids.")] = False,
    as_json: Json = False,
) -> None:
    """Write all rollouts into one file, in the order of their units, each exactly once.

    Refuses with exit code 99 while rollouts are missing. merged/ holds rollouts.jsonl, failures.jsonl and merge.json.
    """
    from seatrial.rollouts import collect_campaign
    from seatrial.rollouts.campaign_dir import CampaignDir

    merged = collect_campaign.merge(CampaignDir(directory), say, partial=partial)
    _keep(directory)
    typer.echo(merged.model_dump_json(indent=2) if as_json else str(directory / "merged" / "rollouts.jsonl"))


def profile(
    directory: Directory,
    pass_at: PassAt = 1.0,
    k: Annotated[list[int] | None, typer.Option("--k", min=1, help="k of pass@k; repeatable. Default: 1, 2, 4, … and all.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Default: profile/ in the campaign's directory.")] = None,
    as_json: Json = False,
) -> None:
    """Profile the rewards: per task and per group mean, spread, pass@k, maj@k, best@k, tokens, turns, latency, coverage.

    Works on what there is, complete or not. Writes profile.json, tasks.jsonl, profile.md, profile.parquet and profile.html.
    """
    from seatrial.core.files import read_text
    from seatrial.rollouts import collect_campaign
    from seatrial.rollouts.campaign_dir import CampaignDir

    target = collect_campaign.profile(CampaignDir(directory), say, pass_at, k, out)
    typer.echo(read_text(target / ("profile.json" if as_json else "profile.md")), nl=False)
    _keep(directory)


def _keep(directory: Path) -> None:
    """Into the history; one quiet line."""
    from seatrial.history.auto_import import auto_import

    if line := auto_import(directory):
        say(line)


def finish(directory: Directory) -> None:
    """Merge and profile a campaign that is complete. Jobs call this after the collecting ones."""
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.collect_campaign import finish_campaign

    finish_campaign(CampaignDir(directory), say)
    _keep(directory)


def select(
    directory: Directory,
    out: Annotated[Path, typer.Option("--out", help="JSONL of the selected rows, as they were.")],
    low: Annotated[float, typer.Option("--min", min=0, max=1, help="Lowest pass rate, inclusive.")] = 0.0,
    high: Annotated[float, typer.Option("--max", min=0, max=1, help="Highest pass rate, inclusive.")] = 1.0,
    min_n: Annotated[int, typer.Option("--min-rollouts", min=1, help="Tasks with fewer rollouts are left out.")] = 1,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Only of this dataset.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only with this tag.")] = None,
    by_rate: Annotated[bool, typer.Option("--by-rate", help="Easiest first, instead of the order of the inputs.")] = False,
    with_rate: Annotated[bool, typer.Option("--with-rate", help="Add a column pass_rate.")] = False,
    pass_at: PassAt = 1.0,
) -> None:
    """Select tasks by their pass rate, for filtering or a curriculum, and write their original rows."""
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.results.campaign_export import select_tasks

    found = select_tasks(
        CampaignDir(directory),
        low=low,
        high=high,
        dataset=dataset,
        tag=tag,
        min_n=min_n,
        out=out,
        sort="pass-rate" if by_rate else "order",
        with_rate=with_rate,
        pass_at=pass_at,
    )
    typer.echo(str(out))
    left = "".join(f"; {count} {reason}" for reason, count in found.left_out.items())
    say(f"{found.rows} of {found.tasks} tasks{left}")


def rescore(
    directory: Directory,
    out: Annotated[Path, typer.Option("--out", help="Directory of the new campaign, which holds the new rewards.")],
    verifier: Annotated[str | None, typer.Option("--verifier", help=VERIFIERS)] = None,
    file: Annotated[Path | None, typer.Option("--campaign", metavar="FILE", help="A campaign file with other [verifiers].")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the verifiers; repeatable.")] = None,
) -> None:
    """Compute the rewards of stored rollouts anew, without asking the policy. Repeat the command to go on after an interruption."""
    from seatrial.cli.input_files import read_campaign
    from seatrial.core.files import read_table
    from seatrial.core.verdict import ExitCode
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.manifest import load_manifest
    from seatrial.rollouts.results.campaign_import import check_judges, settings_of
    from seatrial.rollouts.results.rescore import rescore as rescore_campaign
    from seatrial.runtime.interrupt import Interruptible

    source = CampaignDir(directory)
    stored: dict[str, Any] | None = None
    if file is None:
        manifest = load_manifest(source)
        stored = settings_of(source, manifest) if manifest.imported else read_table(source.campaign)
    if stored and verifier:
        # Gym's servers verified while it was collected; now the named verifier does.
        stored |= {"gym": None, "sandbox_service": False}
    campaign = read_campaign(file, {"verifier": verifier}, settings or (), stored, None if file else source.campaign)
    check_judges(source, campaign)
    with Interruptible() as stop:
        status = rescore_campaign(source, CampaignDir(out.absolute()), campaign, say)
        stop.check()
    if status.owed:
        typer.echo(table(status))
        say(f"{counted(status.owed, 'rollout')} not scored yet. Those that {directory} lacks: complete it. Then repeat this command")
        raise typer.Exit(ExitCode.BLOCKED)
    finish(out.absolute())
    close(status, out, "mend the verifier, and rescore into another directory")


def import_(
    kind: Annotated[str, typer.Argument(metavar="gym|skills", help="Who collected them.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="rollouts.jsonl of Gym, or output-rs*.jsonl of NeMo-Skills.")],
    out: Annotated[Path, typer.Option("--out", help="Directory of the campaign that is made.")],
    inputs: Annotated[list[Path] | None, typer.Option("--inputs", help="Gym: materialized inputs, so that missing ones are known.")] = None,
    reward: Annotated[str | None, typer.Option("--reward", metavar="COLUMN", help="The column that is the reward.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Import what is good beside torn or bad lines.")] = False,
) -> None:
    """Make a campaign directory of rollouts that others collected: merge, profile and select work on it."""
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.results.campaign_import import import_rollouts

    if kind not in ("gym", "skills"):
        _refuse(f"{kind!r}: rollouts of gym or of skills can be imported", "write gym or skills first")
    place = CampaignDir(out.absolute())
    if place.manifest.exists():
        _refuse(f"{out}: holds a campaign already", "name another directory: an import makes a new one")
    manifest = import_rollouts(
        "gym" if kind == "gym" else "skills", files, place, inputs=inputs or (), reward_key=reward, partial=partial, progress=say
    )
    typer.echo(str(place.root))
    say(f"{counted(manifest.rows, 'row')}, {counted(manifest.units, 'rollout')} expected")


def export(
    directory: Directory,
    layout: Annotated[str, typer.Argument(metavar="skills|gym", help="Whose file names.")],
    out: Annotated[Path | None, typer.Option("--out", help="Directory. Default: skills/ or gym/ in the campaign's.")] = None,
) -> None:
    """Write merged rollouts in the layout that users of NeMo-Skills (rollouts-rs*.jsonl with .done) or of Gym know."""
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.results.campaign_export import write_gym_layout, write_skills_layout

    if layout not in ("skills", "gym"):
        _refuse(f"{layout!r}: the layouts are skills and gym", "write one of them")
    write = write_skills_layout if layout == "skills" else write_gym_layout
    for path in write(CampaignDir(directory), out):
        typer.echo(str(path))


def collect(
    directory: Directory,
    number: Annotated[int, typer.Option("--round", help="A round of the campaign.")],
    task: Annotated[int, typer.Option("--task", help="A task of that round.")],
    urls: Annotated[str, typer.Option("--urls", help="Servers of the policy in this job.")] = "",
    sandbox: Annotated[str | None, typer.Option("--sandbox", help="The sandbox service in this job.")] = None,
) -> None:
    """Collect the shards of one task. Jobs call this."""
    from seatrial.core.verdict import ExitCode
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.campaign_rounds import collect_task
    from seatrial.runtime.interrupt import Interruptible

    with Interruptible():
        ended = collect_task(CampaignDir(directory), number, task, urls.replace(",", " ").split(), sandbox, say)
    say(f"{ended.reason}: {ended.ok} ok, {ended.failed} failed for good, {ended.owed} owed. {ended.message}".rstrip())
    if ended.owed:
        raise typer.Exit(ExitCode.BLOCKED)


def sandbox(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    campaign: Annotated[Path | None, typer.Option("--campaign", metavar="DIR", help="Take the limits of this campaign.")] = None,
) -> None:
    """Serve the sandbox over HTTP, as NeMo Gym's resources servers expect it (NEMO_SKILLS_SANDBOX_HOST and _PORT)."""
    from seatrial.rollouts.campaign import SandboxLimits
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.manifest import load_campaign
    from seatrial.rollouts.sandbox.sandbox_service import run_service

    limits = load_campaign(CampaignDir(campaign)).sandbox if campaign else SandboxLimits()
    run_service(host, port, limits, lambda chosen: say(f"the sandbox listens on http://{host}:{chosen}"))


_ROWS = (".jsonl", ".parquet", ".json", ".csv")
File = Annotated[Path | None, typer.Argument(metavar="[campaign.toml]", help="What to collect (docs/rollouts.md). Flags win over it.")]
On = Annotated[str, typer.Option("--on", metavar="local|slurm[:PROFILE]", help="This machine, or a profile of seatrial.toml.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration with profiles. Default: the nearest seatrial.toml.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A key outside [[datasets]], such as sampling.temperature=0.7; repeatable."),
]
Detach = Annotated[bool, typer.Option("--detach", help="Submit and leave; needs --on slurm. `resume` follows.")]
_DEMO = "trl"
"""The environment that has what the demo's server needs: torch and transformers."""


def start(
    file: File = None,
    out: Annotated[Path | None, typer.Option("--out", help="The campaign's directory. Default: campaigns/<time>-<name>.")] = None,
    on: On = "local",
    inputs: Annotated[
        list[Path] | None, typer.Option("--input", help="Rows: Gym JSONL, or JSONL or Parquet with prompt and answer; repeatable.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Column of --input with the prompt. Default: prompt.")] = None,
    answer: Annotated[str | None, typer.Option("--answer", help="Column of --input with the expected answer. Default: answer.")] = None,
    url: Annotated[str | None, typer.Option("--url", help="A pre-hosted policy, such as http://host:8000/v1.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Name of the policy's model. Default: the server's only one.")] = None,
    verifier: Annotated[str | None, typer.Option("--verifier", help=VERIFIERS)] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="Rollouts of each row.")] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Instead of --repeats: repetitions by number, such as 0-3,7.")] = None,
    shards: Annotated[int | None, typer.Option("--shards", min=1, help="Number of shards. Default: from the target duration.")] = None,
    settings: Set = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show shards, jobs and scripts; collect nothing.")] = False,
    detach: Detach = False,
    config: ConfigFile = None,
) -> None:
    """Start a campaign: check every row, cut the work into shards, collect, merge and profile.

    Bad rows are reported with their line numbers before anything starts. On this machine the command ends with the campaign. On
    Slurm it follows the jobs; Ctrl-C leaves them running.
    """
    from seatrial.cli.input_files import read_campaign
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.campaign_runner import campaign_lock
    from seatrial.rollouts.collect_campaign import check_start, dataset_tables, make_campaign, new_root

    if file is not None and file.suffix in _ROWS:
        _refuse(f"{file}: rows go with --input, and a campaign file is TOML", f"say --input {shlex.quote(str(file))}")
    if file is not None and inputs:
        _refuse("--input and a campaign file exclude each other: the file names its datasets", "leave one of them out")
    if not inputs and (prompt or answer):
        _refuse("--prompt and --answer name columns of --input", "say --input, or prompt and answer in [[datasets]]")
    datasets = dataset_tables(inputs or (), prompt, answer)
    names = [dataset["name"] for dataset in datasets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        _refuse(f"--input: two files make a dataset called {twice}", "leave one out, or name them in [[datasets]] of a campaign file")
    if repeats is not None and seeds is not None:
        _refuse("--repeats and --seeds exclude each other: --repeats 4 is --seeds 0-3", "leave one of them out")
    flags: dict[str, Any] = {
        "datasets": datasets or None,
        "policy.url": url,
        "policy.model": model,
        "verifier": verifier,
        "work.repeats": repeats,
        "work.seeds": seeds,
        "work.shards": shards,
    }
    campaign = read_campaign(file, flags, settings or ())
    where = _target(on, config, detach)
    place = CampaignDir(new_root(out, campaign.name))
    check_start(campaign, place, say, here=where.profile is None)
    if dry_run:
        _dry_run(campaign, where, place.root)
    manifest = make_campaign(campaign, place, say)
    typer.echo(str(place.root))
    say(f"{counted(manifest.rows, 'row')}, {counted(manifest.units, 'rollout')}, {counted(manifest.shards, 'shard')}")
    with campaign_lock(place, say):
        _run_campaign(place, where, detach)


def resume(
    directory: Directory,
    file: File = None,
    on: Annotated[str | None, typer.Option("--on", metavar="local|slurm[:PROFILE]", help="Default: where the last round ran.")] = None,
    settings: Set = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Owe units again that failed for good.")] = False,
    detach: Detach = False,
    config: ConfigFile = None,
) -> None:
    """Collect what is missing, then merge and profile.

    With a campaign file or --set, settings that no result depends on may change (where the servers are, how many requests at a
    time, deadlines, how jobs are launched). What results depend on must be as it was: a changed key is refused and named.
    """
    from seatrial.cli.input_files import read_campaign
    from seatrial.core.files import read_table
    from seatrial.rollouts import campaign_rounds
    from seatrial.rollouts.campaign_dir import CampaignDir, read_stop_file, set_stop_file_aside
    from seatrial.rollouts.campaign_runner import campaign_lock
    from seatrial.rollouts.journal.journal_scan import mark_for_retry
    from seatrial.rollouts.manifest import changes, check_inputs, load_manifest, save_campaign

    place = CampaignDir(directory.absolute())
    manifest = load_manifest(place)
    if manifest.imported:
        _refuse(f"{directory}: was imported, so there is nothing to collect", "merge, profile and select work on it")
    if manifest.rescored:
        _refuse(f"{directory}: was scored anew, and collects nothing", "repeat the rescore command to go on with it")
    past = campaign_rounds.list_rounds(place)
    where = _target(on or (past[-1].on if past else "local"), config, detach)
    with campaign_lock(place, say):
        check_inputs(place, manifest)
        campaign = read_campaign(file, {}, settings or (), read_table(place.campaign), None if file else place.campaign)
        if found := changes(manifest, campaign, Path.cwd(), may_be_gone=file is None):
            lines = "\n  ".join(found)
            _refuse(f"{place.root}: results depend on what has changed:\n  {lines}", "change it back, or start a new campaign")
        if file or settings:
            save_campaign(place, campaign)
        if why := read_stop_file(place):
            say(f"it had stopped: {why.reason}")
            set_stop_file_aside(place)
        if retry_failed:
            mark_for_retry(place)
            say("units that had failed for good are owed again")
        _run_campaign(place, where, detach)


def cancel(directory: Directory) -> None:
    """Stop a campaign: cancel its jobs that wait or run on Slurm, and end what another terminal carries.

    What was collected stays; `resume` goes on.
    """
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.campaign_runner import cancel as cancel_jobs

    names = cancel_jobs(CampaignDir(directory.absolute()))
    for name in names:
        typer.echo(f"cancelled {name}")
    if not names:
        say("nothing to cancel: no job of it waits or runs on Slurm, and nobody carries it")


def demo(
    out: Annotated[Path | None, typer.Option("--out", help="Directory. Default: campaigns/<time>-demo.")] = None,
) -> None:
    """Run a small campaign here: a tiny model, trained and served locally, answers sums; verified, merged and profiled.

    The first time it builds the environment of the default trial (minutes) and trains the model (half a minute).
    """
    from seatrial.cli.input_files import read_campaign
    from seatrial.evidence.redact import Redactor
    from seatrial.loops import environments
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.campaign_runner import RunTarget, campaign_lock
    from seatrial.rollouts.collect_campaign import make_campaign, new_root, write_demo
    from seatrial.runtime.environments import Environments
    from seatrial.runtime.interrupt import Interruptible

    cache = Environments()
    with Interruptible():
        python = cache.build(_DEMO, environments()[_DEMO], say, line_filter=Redactor(os.environ).lines().line).python
    root = new_root(out, "demo")
    place = CampaignDir(root)
    file = write_demo(root.with_name(f"{root.name}-inputs"), python, cache.root / "demo-model")
    say(f"the campaign is described in {file}")
    make_campaign(read_campaign(file, {}), place, say)
    typer.echo(str(root))
    with campaign_lock(place, say):
        _run_campaign(place, RunTarget(), detach=False)
    say(f"see {root}/profile/profile.html")
    say(f"choose tasks: seatrial rollouts select {shlex.quote(str(root))} --min 0.1 --max 0.9 --out tasks.jsonl")
    say("your own rows: seatrial rollouts start --input FILE.jsonl --url http://host:8000/v1 --verifier exact (docs/rollouts.md)")


def _target(on: str, config: Path | None, detach: bool) -> RunTarget:
    from seatrial.cli.request import profile_named
    from seatrial.rollouts.campaign_rounds import LOCAL
    from seatrial.rollouts.campaign_runner import RunTarget
    from seatrial.trial.trial_request import load_config

    if on == LOCAL:
        if detach:
            _refuse("--detach leaves jobs to Slurm, and --on local has none", "use --on slurm:PROFILE")
        return RunTarget()
    name, profile = profile_named(load_config(config, None), on)
    return RunTarget(f"slurm:{name}", profile)


def _refuse(message: str, fix: str) -> NoReturn:
    from seatrial.core.errors import UserError

    raise UserError(message, fix)


def _run_campaign(place: CampaignDir, where: RunTarget, detach: bool) -> None:
    """Run a campaign to its end, and exit with its code. The caller holds the campaign's lock."""
    from seatrial.core.verdict import ExitCode
    from seatrial.rollouts.campaign_runner import CampaignRunner
    from seatrial.runtime.interrupt import Interrupted, Interruptible

    progress = CampaignProgress()
    runner = CampaignRunner(place, where, progress.say, progress.show)
    try:
        with Interruptible():
            if detach:
                runner.submit()
                say(f"follow: seatrial rollouts resume {shlex.quote(str(place.root))}, or status --follow")
                return
            status = runner.run()
    except Interrupted:
        progress.close()
        directory = shlex.quote(str(place.root))
        if where.profile is None:
            say(f"interrupted; what was collected is kept. Go on with: seatrial rollouts resume {directory}")
        else:
            say(f"interrupted; the jobs go on. Follow: seatrial rollouts resume {directory}. Cancel: seatrial rollouts cancel {directory}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    progress.close()
    if not status.owed:
        finish(place.root)
    if runner.refused and not status.settled:
        # To go on with it as it is would end in the same way.
        typer.echo(table(status))
        say(f"nothing was collected: start anew, or mend it and: seatrial rollouts resume {shlex.quote(str(place.root))}")
        raise typer.Exit(ExitCode.BLOCKED)
    if status.owed and status.accept:
        say(f"to accept as many failures: seatrial rollouts resume {shlex.quote(str(place.root))} --set {status.accept}")
    close(status, place.root)


def _dry_run(campaign: Campaign, where: RunTarget, root: Path) -> None:
    """Shards, jobs and, on Slurm, scripts as they are; makes nothing. Ends with 0, or 99 when Slurm would refuse."""
    import tempfile

    from seatrial.core.verdict import ExitCode
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.campaign_runner import dry_run as describe
    from seatrial.rollouts.manifest import create_campaign

    with tempfile.TemporaryDirectory() as name:
        # The inputs are read and cut for real, somewhere else.
        place = CampaignDir(Path(name) / root.name)
        manifest = create_campaign(campaign, Path.cwd(), place, say)
        shown = describe(place, root, campaign, manifest, where)
    typer.echo(shown.text)
    for job, answer in shown.answers:
        say(f"{job}: {answer}")
    raise typer.Exit(ExitCode.PASS if all(answer == "ok" for _, answer in shown.answers) else ExitCode.BLOCKED)


app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    help="Collect rollouts: rows x repeats, in shards, here or over many Slurm jobs; nothing lost, nothing twice.\n\n"
    "A campaign lives in a directory. `start` makes it and collects, `resume` collects what is missing, `merge` and `profile` "
    "read what was collected. Try it with `seatrial rollouts demo`. Against a server of yours:\n\n"
    "\b\n"
    "  seatrial rollouts start --input rows.jsonl --url http://127.0.0.1:8000/v1 \\\n"
    "      --verifier math --repeats 4 --out DIR\n"
    "  seatrial rollouts status DIR --follow\n\n"
    "More than that is said in a campaign.toml: docs/rollouts.md. Exit codes: 0 everything settled, 99 something is still owed, "
    "no rollout worked, or it was refused, 2 usage, 130 interrupted.",
    no_args_is_help=True,
)

app.command(short_help="Make a campaign, collect it, merge and profile.")(start)
app.command(short_help="Say where a campaign stands; --follow, --json.")(status)
app.command(short_help="Collect what is missing, then merge and profile.")(resume)
app.command(short_help="Stop a campaign and its Slurm jobs.")(cancel)
app.command(short_help="One file, each rollout exactly once.")(merge)
app.command(short_help="Rewards per task and group: pass@k, spread, tokens.")(profile)
app.command(short_help="Write the rows of tasks in a band of pass rates.")(select)
app.command(short_help="New rewards for stored rollouts.")(rescore)
app.command("import", short_help="Take over rollouts of NeMo Gym or NeMo-Skills.")(import_)
app.command(short_help="Write the files that NeMo-Skills or NeMo Gym know.")(export)
app.command(short_help="Try it here with a tiny model that is served locally.")(demo)
app.command(short_help="Serve the sandbox for NeMo Gym's resources servers.")(sandbox)
app.command(hidden=True)(collect)
app.command(hidden=True)(finish)
