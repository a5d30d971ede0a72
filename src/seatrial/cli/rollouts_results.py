"""`seatrial rollouts status`, `merge`, `profile`, `select`, `rescore`, `import` and `export`; and how a campaign is shown."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seatrial.core.text import counted

if TYPE_CHECKING:
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.campaign_runner import Status

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
    facts = {
        "campaign": f"{status.name} ({where})",
        "rollouts": f"{status.settled} of {status.units} settled: {status.ok} ok, {status.failed} failed for good; {status.owed} owed",
        "rows": f"{status.rows_done} of {status.rows} settled",
        "shards": f"{status.shards_done} of {status.shards} done; {_collectors(status)}, {counted(status.open, 'request')} open",
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


def _collectors(status: Status) -> str:
    """Who works on it. One that was killed cannot say so: its silence is told."""
    silent = status.seen_s is not None and status.seen_s > _SILENT_S
    return f"{counted(status.collectors, 'collector')} {f'seen {status.seen_s:.0f} s ago' if silent else 'at work'}"


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
        """Show where the campaign stands."""
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
        found = watch.look()
        while follow:
            if as_json:
                typer.echo(found.model_dump_json())
            else:
                progress.show(found)
            if not found.owed or found.stopped:
                break
            wait_a_moment()
            found = watch.look()
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
    merged = _merge(directory, partial)
    _keep(directory)
    if as_json:
        typer.echo(merged)
        return
    typer.echo(str(directory / "merged" / "rollouts.jsonl"))


def _merge(directory: Path, partial: bool) -> str:
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.manifest import Units, load_campaign, load_manifest
    from seatrial.rollouts.results.campaign_merge import merge_campaign
    from seatrial.runtime.interrupt import Interruptible

    place = CampaignDir(directory)
    manifest = load_manifest(place)
    with Units(place, manifest) as units, Interruptible():
        merged = merge_campaign(place, manifest, units, partial=partial, progress=say)
    counts = {"failed for good": merged.failed, "missing": merged.missing, "twice": merged.duplicates, "contradicting": merged.conflicts}
    counts |= {"torn": merged.torn, "foreign": merged.foreign}
    odd = "".join(f", {count} {what}" for what, count in counts.items() if count)
    say(f"merged {merged.ok} of {merged.expected} rollouts ({100 * merged.coverage:.2f} %){odd}")
    if not manifest.imported and load_campaign(place).skills_layout:
        from seatrial.rollouts.results.campaign_export import write_skills_layout

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
    from seatrial.history.auto_import import auto_import

    if line := auto_import(directory):
        say(line)


def _profile(directory: Path, pass_at: float, k: list[int] | None, out: Path | None, as_json: bool) -> str:
    from seatrial.core.files import read_text
    from seatrial.rollouts.campaign_dir import CampaignDir, spare_campaigns
    from seatrial.rollouts.results.profile_build import make_profile
    from seatrial.rollouts.results.profile_writer import write_profile

    place = CampaignDir(directory)
    target = out or place.profile
    spare_campaigns(target, place.profile)
    write_profile(make_profile(place, pass_at=pass_at, ks=k, progress=say), target)
    return read_text(target / ("profile.json" if as_json else "profile.md"))


def merge_and_profile(directory: Path) -> None:
    """What follows a complete campaign; ends with 99 when it is not complete."""
    from seatrial.core.errors import UserError

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
    from seatrial.core.verdict import ExitCode
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.results.campaign_import import check_judges
    from seatrial.rollouts.results.rescore import rescore as rescore_campaign
    from seatrial.runtime.interrupt import Interruptible

    source = CampaignDir(directory)
    stored = None if file else _stored(source)
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
    merge_and_profile(out.absolute())
    close(status, out, "mend the verifier, and rescore into another directory")


def _stored(source: CampaignDir) -> dict[str, Any]:
    """The settings of a campaign; those of an import follow from its rows."""
    from seatrial.core.files import read_table
    from seatrial.rollouts.manifest import load_manifest
    from seatrial.rollouts.results.campaign_import import settings_of

    manifest = load_manifest(source)
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
    from seatrial.core.errors import UserError
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.results.campaign_import import import_rollouts

    if kind not in ("gym", "skills"):
        raise UserError(f"{kind!r}: rollouts of gym or of skills can be imported", "write gym or skills first")
    place = CampaignDir(out.absolute())
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
    from seatrial.core.errors import UserError
    from seatrial.rollouts.campaign_dir import CampaignDir
    from seatrial.rollouts.results.campaign_export import write_gym_layout, write_skills_layout

    if layout not in ("skills", "gym"):
        raise UserError(f"{layout!r}: the layouts are skills and gym", "write one of them")
    write = write_skills_layout if layout == "skills" else write_gym_layout
    for path in write(CampaignDir(directory), out):
        typer.echo(str(path))
