"""`seatrial rollouts`: collect rollouts in campaigns: start, resume, cancel, demo, and the commands that jobs of a campaign run.

Exit codes: 0 everything is settled, 99 something is pending, no rollout worked, or it was refused, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seatrial.cli import rollouts_results
from seatrial.cli.rollouts_results import Directory, say
from seatrial.core.text import counted

if TYPE_CHECKING:
    from seatrial.rollouts.campaign import Campaign
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.campaign_runner import CampaignRunner, RunTarget


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


def finish(directory: Directory) -> None:
    """Merge and profile a campaign that is complete. Jobs call this after the collecting ones."""
    from seatrial.cli.rollouts_results import merge_and_profile

    merge_and_profile(directory)


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
    verifier: Annotated[str | None, typer.Option("--verifier", help=rollouts_results.VERIFIERS)] = None,
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
    from seatrial.rollouts.campaign_preflight import campaign_warnings, check_campaign
    from seatrial.rollouts.campaign_rounds import check_root
    from seatrial.rollouts.campaign_runner import campaign_lock
    from seatrial.rollouts.manifest import create_campaign

    _check_flags(file, inputs, prompt or answer)
    if repeats is not None and seeds is not None:
        _refuse("--repeats and --seeds exclude each other: --repeats 4 is --seeds 0-3", "leave one of them out")
    flags: dict[str, Any] = {
        "datasets": _datasets(inputs, prompt, answer) if inputs else None,
        "policy.url": url,
        "policy.model": model,
        "verifier": verifier,
        "work.repeats": repeats,
        "work.seeds": seeds,
        "work.shards": shards,
    }
    campaign = read_campaign(file, flags, settings or ())
    where = _where(on, config, detach)
    root = (out or Path("campaigns") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{campaign.name}").absolute()
    check_root(root)
    check_campaign(campaign, here=where.profile is None)
    for warning in campaign_warnings(campaign):
        say(f"warning: {warning}")
    if dry_run:
        _dry_run(campaign, where, root)
    manifest = create_campaign(campaign, Path.cwd(), CampaignDir(root), say)
    _hide_from_git(root)
    typer.echo(str(root))
    say(f"{counted(manifest.rows, 'row')}, {counted(manifest.units, 'rollout')}, {counted(manifest.shards, 'shard')}")
    with campaign_lock(CampaignDir(root), say):
        _carry(CampaignDir(root), where, detach)


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
    from seatrial.rollouts import campaign_rounds
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.campaign_runner import campaign_lock
    from seatrial.rollouts.manifest import check_inputs, load_manifest, save_campaign

    place = CampaignDir(directory.absolute())
    manifest = load_manifest(place)
    if manifest.imported:
        _refuse(f"{directory}: was imported, so there is nothing to collect", "merge, profile and select work on it")
    if manifest.rescored:
        _refuse(f"{directory}: was scored anew, and collects nothing", "repeat the rescore command to go on with it")
    past = campaign_rounds.list_rounds(place)
    where = _where(on or (past[-1].on if past else "local"), config, detach)
    with campaign_lock(place, say):
        check_inputs(place, manifest)
        campaign = _unchanged(place, file, settings or [])
        if file or settings:
            save_campaign(place, campaign)
        _take_up(place, retry_failed)
        _carry(place, where, detach)


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
    from seatrial.rollouts.demo_campaign import write_demo
    from seatrial.rollouts.manifest import create_campaign
    from seatrial.runtime.environments import Environments
    from seatrial.runtime.interrupt import Interruptible

    cache = Environments()
    with Interruptible():
        python = cache.build(_DEMO, environments()[_DEMO], say, line_filter=Redactor(os.environ).lines().line).python
    root = (out or Path("campaigns") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-demo").absolute()
    file = write_demo(root.with_name(f"{root.name}-inputs"), python, cache.root / "demo-model")
    say(f"the campaign is described in {file}")
    create_campaign(read_campaign(file, {}), Path.cwd(), CampaignDir(root), say)
    _hide_from_git(root)
    typer.echo(str(root))
    with campaign_lock(CampaignDir(root), say):
        _carry(CampaignDir(root), RunTarget(), detach=False)
    say(f"see {root}/profile/profile.html")
    say(f"choose tasks: seatrial rollouts select {shlex.quote(str(root))} --min 0.1 --max 0.9 --out tasks.jsonl")
    say("your own rows: seatrial rollouts start --input FILE.jsonl --url http://host:8000/v1 --verifier exact (docs/rollouts.md)")


def _datasets(files: list[Path], prompt: str | None, answer: str | None) -> list[dict[str, str]]:
    """A dataset for each file, named by it."""
    columns = {key: value for key, value in (("prompt", prompt), ("answer", answer)) if value is not None}
    names = [_label(file.stem) for file in files]
    if twice := next((name for name in names if names.count(name) > 1), None):
        _refuse(f"--input: two files make a dataset called {twice}", "leave one out, or name them in [[datasets]] of a campaign file")
    return [{"name": name, "path": str(file), **columns} for name, file in zip(names, files, strict=True)]


def _label(text: str) -> str:
    """A file's name as that of a dataset."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:80] or "rows"


def _check_flags(file: Path | None, inputs: list[Path] | None, column: str | None) -> None:
    """Rows come from a campaign file or from --input, and columns are named for the latter."""
    if file is not None and file.suffix in _ROWS:
        _refuse(f"{file}: rows go with --input, and a campaign file is TOML", f"say --input {shlex.quote(str(file))}")
    if file is not None and inputs:
        _refuse("--input and a campaign file exclude each other: the file names its datasets", "leave one of them out")
    if not inputs and column:
        _refuse("--prompt and --answer name columns of --input", "say --input, or prompt and answer in [[datasets]]")


def _refuse(message: str, fix: str) -> None:
    from seatrial.core.errors import UserError

    raise UserError(message, fix)


def _where(on: str, config: Path | None, detach: bool) -> RunTarget:
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


def _unchanged(place: CampaignDir, file: Path | None, settings: list[str]) -> Campaign:
    """The campaign with what may change; a UserError names what may not."""
    from seatrial.cli.input_files import read_campaign
    from seatrial.core.errors import UserError
    from seatrial.core.files import read_table
    from seatrial.rollouts.manifest import changes, load_manifest

    campaign = read_campaign(file, {}, settings, read_table(place.campaign), None if file else place.campaign)
    found = changes(load_manifest(place), campaign, Path.cwd(), may_be_gone=file is None)
    if found:
        lines = "\n  ".join(found)
        raise UserError(f"{place.root}: results depend on what has changed:\n  {lines}", "change it back, or start a new campaign")
    return campaign


def _take_up(place: CampaignDir, retry_failed: bool) -> None:
    """Put aside why it stopped, and what failed for good if that is asked for."""
    from seatrial.rollouts.campaign_dir import read_stop_file, set_stop_file_aside
    from seatrial.rollouts.journal.journal_scan import mark_for_retry

    if why := read_stop_file(place):
        say(f"it had stopped: {why.reason}")
        set_stop_file_aside(place)
    if retry_failed:
        mark_for_retry(place)
        say("units that had failed for good are owed again")


def _carry(place: CampaignDir, where: RunTarget, detach: bool) -> None:
    """Carry a campaign to its end, and end with its exit code. The caller holds `conducting`."""
    from seatrial.cli.rollouts_results import merge_and_profile
    from seatrial.core.verdict import ExitCode
    from seatrial.rollouts.campaign_runner import CampaignRunner
    from seatrial.runtime.interrupt import Interrupted, Interruptible

    progress = rollouts_results.CampaignProgress()
    conductor = CampaignRunner(place, where, progress.say, progress.show)
    try:
        with Interruptible():
            if detach:
                conductor.submit()
                say(f"follow: seatrial rollouts resume {shlex.quote(str(place.root))}, or status --follow")
                return
            status = conductor.carry()
    except Interrupted:
        progress.close()
        _interrupted(conductor)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    progress.close()
    if not status.owed:
        merge_and_profile(place.root)
    if conductor.refused and not status.settled:
        # To go on with it as it is would end in the same way.
        typer.echo(rollouts_results.table(status))
        say(f"nothing was collected: start anew, or mend it and: seatrial rollouts resume {shlex.quote(str(place.root))}")
        raise typer.Exit(ExitCode.BLOCKED)
    if status.owed and status.accept:
        say(f"to accept as many failures: seatrial rollouts resume {shlex.quote(str(place.root))} --set {status.accept}")
    rollouts_results.close(status, place.root)


def _interrupted(conductor: CampaignRunner) -> None:
    place = shlex.quote(str(conductor.place.root))
    if conductor.where.profile is None:
        say(f"interrupted; what was collected is kept. Go on with: seatrial rollouts resume {place}")
    else:
        say(f"interrupted; the jobs go on. Follow: seatrial rollouts resume {place}. Cancel: seatrial rollouts cancel {place}")


def _hide_from_git(root: Path) -> None:
    """The directory may lie in a checkout under test, which must not look changed."""
    from seatrial.core.files import write_text

    write_text(root / ".gitignore", "*\n")


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
app.command(short_help="Say where a campaign stands; --follow, --json.")(rollouts_results.status)
app.command(short_help="Collect what is missing, then merge and profile.")(resume)
app.command(short_help="Stop a campaign and its Slurm jobs.")(cancel)
app.command(short_help="One file, each rollout exactly once.")(rollouts_results.merge)
app.command(short_help="Rewards per task and group: pass@k, spread, tokens.")(rollouts_results.profile)
app.command(short_help="Write the rows of tasks in a band of pass rates.")(rollouts_results.select)
app.command(short_help="New rewards for stored rollouts.")(rollouts_results.rescore)
app.command("import", short_help="Take over rollouts of NeMo Gym or NeMo-Skills.")(rollouts_results.import_)
app.command(short_help="Write the files that NeMo-Skills or NeMo Gym know.")(rollouts_results.export)
app.command(short_help="Try it here with a tiny model that is served locally.")(demo)
app.command(short_help="Serve the sandbox for NeMo Gym's resources servers.")(sandbox)
app.command(hidden=True)(collect)
app.command(hidden=True)(finish)
