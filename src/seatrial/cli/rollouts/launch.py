"""`seatrial rollouts start`, `resume`, `cancel` and `demo`."""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seatrial.cli.rollouts import show
from seatrial.cli.rollouts.show import say
from seatrial.cli.rollouts.watch import Directory
from seatrial.model.words import counted

if TYPE_CHECKING:
    from seatrial.rollouts.campaign import Campaign
    from seatrial.rollouts.conduct.conductor import Conductor, Where
    from seatrial.rollouts.place import Place

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
    verifier: Annotated[str | None, typer.Option("--verifier", help=show.VERIFIERS)] = None,
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
    from seatrial.cli.campaign_file import read_campaign
    from seatrial.rollouts.conduct.conductor import conducting
    from seatrial.rollouts.conduct.preflight import check, warnings
    from seatrial.rollouts.conduct.rounds import check_root
    from seatrial.rollouts.manifest import make
    from seatrial.rollouts.place import Place

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
    check(campaign, here=where.profile is None)
    for warning in warnings(campaign):
        say(f"warning: {warning}")
    if dry_run:
        _dry_run(campaign, where, root)
    manifest = make(campaign, Path.cwd(), Place(root), say)
    _hide_from_git(root)
    typer.echo(str(root))
    say(f"{counted(manifest.rows, 'row')}, {counted(manifest.units, 'rollout')}, {counted(manifest.shards, 'shard')}")
    with conducting(Place(root), say):
        _carry(Place(root), where, detach)


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
    from seatrial.rollouts.conduct import rounds
    from seatrial.rollouts.conduct.conductor import conducting
    from seatrial.rollouts.manifest import check_inputs, load, save_campaign
    from seatrial.rollouts.place import Place

    place = Place(directory.absolute())
    manifest = load(place)
    if manifest.imported:
        _refuse(f"{directory}: was imported, so there is nothing to collect", "merge, profile and select work on it")
    if manifest.rescored:
        _refuse(f"{directory}: was scored anew, and collects nothing", "repeat the rescore command to go on with it")
    past = rounds.rounds(place)
    where = _where(on or (past[-1].on if past else "local"), config, detach)
    with conducting(place, say):
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
    from seatrial.rollouts.conduct.conductor import cancel as cancel_jobs
    from seatrial.rollouts.place import Place

    names = cancel_jobs(Place(directory.absolute()))
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
    from seatrial.cli.campaign_file import read_campaign
    from seatrial.evidence.redact import Redactor
    from seatrial.launch.environments import Environments
    from seatrial.launch.interrupt import Interruptible
    from seatrial.loops import environments
    from seatrial.rollouts.conduct.conductor import Where, conducting
    from seatrial.rollouts.demo.data import write_demo
    from seatrial.rollouts.manifest import make
    from seatrial.rollouts.place import Place

    cache = Environments()
    with Interruptible():
        python = cache.build(_DEMO, environments()[_DEMO], say, line_filter=Redactor(os.environ).lines().line).python
    root = (out or Path("campaigns") / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-demo").absolute()
    file = write_demo(root.with_name(f"{root.name}-inputs"), python, cache.root / "demo-model")
    say(f"the campaign is described in {file}")
    make(read_campaign(file, {}), Path.cwd(), Place(root), say)
    _hide_from_git(root)
    typer.echo(str(root))
    with conducting(Place(root), say):
        _carry(Place(root), Where(), detach=False)
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
    from seatrial.model.errors import UserError

    raise UserError(message, fix)


def _where(on: str, config: Path | None, detach: bool) -> Where:
    from seatrial.cli.request import load_config, profile_named
    from seatrial.rollouts.conduct.conductor import Where
    from seatrial.rollouts.conduct.rounds import LOCAL

    if on == LOCAL:
        if detach:
            _refuse("--detach leaves jobs to Slurm, and --on local has none", "use --on slurm:PROFILE")
        return Where()
    name, profile = profile_named(load_config(config, None), on)
    return Where(f"slurm:{name}", profile)


def _unchanged(place: Place, file: Path | None, settings: list[str]) -> Campaign:
    """The campaign with what may change; a UserError names what may not."""
    from seatrial.cli.campaign_file import read_campaign
    from seatrial.files import read_table
    from seatrial.model.errors import UserError
    from seatrial.rollouts.manifest import changes, load

    campaign = read_campaign(file, {}, settings, read_table(place.campaign), None if file else place.campaign)
    found = changes(load(place), campaign, Path.cwd(), may_be_gone=file is None)
    if found:
        lines = "\n  ".join(found)
        raise UserError(f"{place.root}: results depend on what has changed:\n  {lines}", "change it back, or start a new campaign")
    return campaign


def _take_up(place: Place, retry_failed: bool) -> None:
    """Put aside why it stopped, and what failed for good if that is asked for."""
    from seatrial.rollouts.collect.stops import go_on, stopped
    from seatrial.rollouts.journal.forgive import forgive

    if why := stopped(place):
        say(f"it had stopped: {why.reason}")
        go_on(place)
    if retry_failed:
        forgive(place)
        say("units that had failed for good are owed again")


def _carry(place: Place, where: Where, detach: bool) -> None:
    """Carry a campaign to its end, and end with its exit code. The caller holds `conducting`."""
    from seatrial.cli.rollouts.results import merge_and_profile
    from seatrial.launch.interrupt import Interrupted, Interruptible
    from seatrial.model.verdict import ExitCode
    from seatrial.rollouts.collect.budget import accepting
    from seatrial.rollouts.conduct.conductor import Conductor

    progress = show.Progress()
    conductor = Conductor(place, where, progress.say, progress.show)
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
        typer.echo(show.table(status))
        say(f"nothing was collected: start anew, or mend it and: seatrial rollouts resume {shlex.quote(str(place.root))}")
        raise typer.Exit(ExitCode.BLOCKED)
    if status.owed and (setting := accepting(status.stopped)):
        say(f"to accept as many failures: seatrial rollouts resume {shlex.quote(str(place.root))} --set {setting}")
    show.close(status, place.root)


def _interrupted(conductor: Conductor) -> None:
    place = shlex.quote(str(conductor.place.root))
    if conductor.where.profile is None:
        say(f"interrupted; what was collected is kept. Go on with: seatrial rollouts resume {place}")
    else:
        say(f"interrupted; the jobs go on. Follow: seatrial rollouts resume {place}. Cancel: seatrial rollouts cancel {place}")


def _hide_from_git(root: Path) -> None:
    """The directory may lie in a checkout under test, which must not look changed."""
    from seatrial.files import write_text

    write_text(root / ".gitignore", "*\n")


def _dry_run(campaign: Campaign, where: Where, root: Path) -> None:
    """Shards, jobs and, on Slurm, scripts as they are; makes nothing. Ends with 0, or 99 when Slurm would refuse."""
    import tempfile

    from seatrial.model.verdict import ExitCode
    from seatrial.rollouts.conduct.showing import describe
    from seatrial.rollouts.manifest import make
    from seatrial.rollouts.place import Place

    with tempfile.TemporaryDirectory() as name:
        # The inputs are read and cut for real, somewhere else.
        place = Place(Path(name) / root.name)
        manifest = make(campaign, Path.cwd(), place, say)
        shown = describe(place, root, campaign, manifest, where)
    typer.echo(shown.text)
    for job, answer in shown.answers:
        say(f"{job}: {answer}")
    raise typer.Exit(ExitCode.PASS if all(answer == "ok" for _, answer in shown.answers) else ExitCode.BLOCKED)
