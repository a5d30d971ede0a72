"""`seatrial rollouts merge`, `profile`, `select`, `rescore`, `import` and `export`: what is done with collected rollouts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seatrial.cli.rollouts import show
from seatrial.cli.rollouts.show import say
from seatrial.cli.rollouts.watch import Directory
from seatrial.model.words import counted

if TYPE_CHECKING:
    from seatrial.rollouts.place import Place

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
    merged = _merge(directory, partial)
    _keep(directory)
    if as_json:
        typer.echo(merged)
        return
    typer.echo(str(directory / "merged" / "rollouts.jsonl"))


def _merge(directory: Path, partial: bool) -> str:
    from seatrial.launch.interrupt import Interruptible
    from seatrial.rollouts.manifest import load, load_campaign
    from seatrial.rollouts.merge.merging import merge as merge_campaign
    from seatrial.rollouts.place import Place
    from seatrial.rollouts.units import Units

    place = Place(directory)
    manifest = load(place)
    with Units(place, manifest) as units, Interruptible():
        merged = merge_campaign(place, manifest, units, partial=partial, progress=say)
    counts = {"failed for good": merged.failed, "missing": merged.missing, "twice": merged.duplicates, "contradicting": merged.conflicts}
    counts |= {"torn": merged.torn, "foreign": merged.foreign}
    odd = "".join(f", {count} {what}" for what, count in counts.items() if count)
    say(f"merged {merged.ok} of {merged.expected} rollouts ({100 * merged.coverage:.2f} %){odd}")
    if not manifest.imported and load_campaign(place).skills_layout:
        from seatrial.rollouts.results.layouts import write_skills_layout

        write_skills_layout(place)
    return merged.model_dump_json(indent=2)


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
    typer.echo(_profile(directory, pass_at, k, out, as_json), nl=False)
    _keep(directory)


def _keep(directory: Path) -> None:
    """Into the history; one quiet line."""
    from seatrial.regress.history.keep import keep

    if line := keep(directory):
        say(line)


def _profile(directory: Path, pass_at: float, k: list[int] | None, out: Path | None, as_json: bool) -> str:
    from seatrial.files import read_text
    from seatrial.rollouts.place import Place
    from seatrial.rollouts.profile.build import profile as make_profile
    from seatrial.rollouts.profile.write import write
    from seatrial.rollouts.results.targets import spare_campaigns

    place = Place(directory)
    target = out or place.profile
    spare_campaigns(target, place.profile)
    write(make_profile(place, pass_at=pass_at, ks=k, progress=say), target)
    return read_text(target / ("profile.json" if as_json else "profile.md"))


def merge_and_profile(directory: Path) -> None:
    """What follows a complete campaign; ends with 99 when it is not complete."""
    from seatrial.model.errors import UserError

    _merge(directory, partial=False)
    try:
        _profile(directory, 1.0, None, None, False)
    except UserError as error:
        if importlib.util.find_spec("pyarrow") is not None:
            raise
        # All but one form of the profile was written: no reason to call a complete campaign anything else.
        say(f"{error.message}; {error.fix}")
    say(f"profile: {directory / 'profile' / 'profile.html'}, profile.md beside it")
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
    from seatrial.rollouts.place import Place
    from seatrial.rollouts.results.select import select as select_tasks

    found = select_tasks(
        Place(directory),
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
    verifier: Annotated[str | None, typer.Option("--verifier", help=show.VERIFIERS)] = None,
    file: Annotated[Path | None, typer.Option("--campaign", metavar="FILE", help="A campaign file with other [verifiers].")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the verifiers; repeatable.")] = None,
) -> None:
    """Compute the rewards of stored rollouts anew, without asking the policy. Repeat the command to go on after an interruption."""
    from seatrial.cli.campaign_file import read_campaign
    from seatrial.launch.interrupt import Interruptible
    from seatrial.model.verdict import ExitCode
    from seatrial.rollouts.importing.settings import check_judges
    from seatrial.rollouts.place import Place
    from seatrial.rollouts.results.rescore import rescore as rescore_campaign

    source = Place(directory)
    stored = None if file else _stored(source)
    if stored and verifier:
        # Gym's servers verified while it was collected; now the named verifier does.
        stored |= {"gym": None, "sandbox_service": False}
    campaign = read_campaign(file, {"verifier": verifier}, settings or (), stored, None if file else source.campaign)
    check_judges(source, campaign)
    with Interruptible() as stop:
        status = rescore_campaign(source, Place(out.absolute()), campaign, say)
        stop.check()
    if status.owed:
        typer.echo(show.table(status))
        say(f"{counted(status.owed, 'rollout')} not scored yet. Those that {directory} lacks: complete it. Then repeat this command")
        raise typer.Exit(ExitCode.BLOCKED)
    merge_and_profile(out.absolute())
    show.close(status, out, "mend the verifier, and rescore into another directory")


def _stored(source: Place) -> dict[str, Any]:
    """The settings of a campaign; those of an import follow from its rows."""
    from seatrial.files import read_table
    from seatrial.rollouts.importing.settings import settings_of
    from seatrial.rollouts.manifest import load

    manifest = load(source)
    stored: dict[str, Any] = settings_of(source, manifest) if manifest.imported else read_table(source.campaign)
    return stored


def import_(
    kind: Annotated[str, typer.Argument(metavar="gym|skills", help="Who collected them.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="rollouts.jsonl of Gym, or output-rs*.jsonl of NeMo-Skills.")],
    out: Annotated[Path, typer.Option("--out", help="Directory of the campaign that is made.")],
    inputs: Annotated[list[Path] | None, typer.Option("--inputs", help="Gym: materialized inputs, so that missing ones are known.")] = None,
    reward: Annotated[str | None, typer.Option("--reward", metavar="COLUMN", help="The column that is the reward.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Import what is good beside torn or bad lines.")] = False,
) -> None:
    """Make a campaign directory of rollouts that others collected: merge, profile and select work on it."""
    from seatrial.model.errors import UserError
    from seatrial.rollouts.importing import import_rollouts
    from seatrial.rollouts.place import Place

    if kind not in ("gym", "skills"):
        raise UserError(f"{kind!r}: rollouts of gym or of skills can be imported", "write gym or skills first")
    place = Place(out.absolute())
    if place.manifest.exists():
        raise UserError(f"{out}: holds a campaign already", "name another directory: an import makes a new one")
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
    from seatrial.model.errors import UserError
    from seatrial.rollouts.place import Place
    from seatrial.rollouts.results.layouts import write_gym_layout, write_skills_layout

    if layout not in ("skills", "gym"):
        raise UserError(f"{layout!r}: the layouts are skills and gym", "write one of them")
    write = write_skills_layout if layout == "skills" else write_gym_layout
    for path in write(Place(directory), out):
        typer.echo(str(path))
