"""`seatrial history`: metrics of all runs over time: import, show, compare, trend, gate, calibrate, mark, export.

A command is made only when it is asked for; an export is written whole or not at all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer
from typer.core import TyperGroup

from seatrial.cli.typer_base import Light, Plain
from seatrial.core.text import as_rows

if TYPE_CHECKING:
    from seatrial.history.importing import Stated
    from seatrial.history.store import RunFilter, RunValue, Store, StoredRun, Take

StoreFile = Annotated[
    Path | None, typer.Option("--store", metavar="FILE", help="Default: $SEATRIAL_HISTORY, [history] store, then the user's own.")
]
Project = Annotated[str | None, typer.Option("--project", help="Only of this project.")]
Name = Annotated[str | None, typer.Option("--name", help="Only runs of this name.")]
Machine = Annotated[str | None, typer.Option("--machine", help="Only runs on this kind of machine.")]
TakeName = Annotated[str, typer.Option("--take", help="Of the points of a run: last, first, mean, min, max or count.")]
Metrics = Annotated[list[str], typer.Argument(metavar="METRIC...", help="Names; * and ? stand for anything.")]
OnlyMetrics = Annotated[list[str] | None, typer.Option("--metric", help="Only these; * and ? stand for anything; repeatable.")]


def opened(asked: Path | None, *, write: bool = False) -> Store:
    from seatrial.core.errors import UserError
    from seatrial.history.auto_import import history_settings, store_path
    from seatrial.history.store import Store

    path = store_path(asked, history_settings(Path.cwd()))
    if not path.is_file():
        raise UserError(f"{path}: no history there yet", "import runs first: seatrial history import PATH")
    return Store(path, write=write)


def taken(word: str) -> Take:
    from seatrial.core.errors import UserError
    from seatrial.history.store import TAKES

    for known in TAKES:
        if word == known:
            return known
    raise UserError(f"--take {word}: no such value", f"one of {', '.join(TAKES)}")


_ENDINGS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}
T = TypeVar("T")


class Counted(Generic[T]):
    """Counts what goes through."""

    def __init__(self, items: Iterable[T]) -> None:
        self.items = items
        self.count = 0

    def __iter__(self) -> Iterator[T]:
        for item in self.items:
            self.count += 1
            yield item


def _format(out: Path | None, form: str | None, points: bool) -> str:
    """The format that the options of an export say."""
    from seatrial.core.errors import UserError
    from seatrial.history.formats import FORMATS

    ending = _ENDINGS.get(out.suffix.lower()) if out else None
    known = f"--format takes one of {', '.join(FORMATS)}"
    if form and form not in FORMATS:
        raise UserError(f"--format {form}: no such format", known)
    if form and ending and form != ending:
        raise UserError(f"--format {form} and --out {out}: the ending says {ending}", "leave --format out, or give the file another ending")
    if out and not form and out.suffix and not ending:
        raise UserError(f"--out {out}: {out.suffix} is the ending of no format", f"{known}; endings that say it: {', '.join(_ENDINGS)}")
    form = form or ending or "json"
    if form == "json" and points:
        raise UserError("--points: JSON has one object per run, without steps", "add --format csv, or leave --points out")
    if form == "parquet" and out is None:
        raise UserError("--format parquet: not for standard output, it is no text", "name a file with --out")
    return form


Limit = Annotated[int, typer.Option("--limit", min=0, help="How many runs, the latest; 0 takes all.")]


def import_(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Results: files, run directories, or directories of many.")],
    store: StoreFile = None,
    project: Annotated[
        str | None, typer.Option("--project", help="Whose runs they are. Default: what the files say, or the checkout.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="What was run: baselines are shared by runs of one name.")] = None,
    machine: Annotated[str | None, typer.Option("--machine", help="What they ran on. Default: what the files say, else unknown.")] = None,
    commit: Annotated[str | None, typer.Option("--commit", help="State the commit, for files that name none.")] = None,
    branch: Annotated[str | None, typer.Option("--branch", help="State the branch, for files that name none.")] = None,
    clean: Annotated[bool, typer.Option("--clean", help="State that the tree was clean, for files that do not say.")] = False,
    passed: Annotated[bool, typer.Option("--passed", help="State that the runs passed, for files that do not say.")] = False,
) -> None:
    """Import runs: unit_results.json, trials, campaigns, benchmarks, metrics. What is there already is left alone.

    One line per run. A run is a baseline only if it passed, on a clean tree, on a trusted branch ([history] trusted).
    """
    from seatrial.core.errors import UserError
    from seatrial.core.verdict import ExitCode
    from seatrial.history.auto_import import history_settings, store_path
    from seatrial.history.importing import Stated, add, in_order
    from seatrial.history.store import Store

    found = history_settings(Path.cwd())
    stated = Stated(
        project=project, name=name, machine=machine, commit=commit, branch=branch, clean=True if clean else None, passed=passed or None
    )
    bad = 0
    with Store(store_path(store, found), write=True) as kept:
        for path in in_order(paths):
            try:
                for one in add(kept, path, stated, found.trusted, restate=stated != Stated()):
                    typer.echo(one.line(), err=one.error is not None)
                    bad += one.error is not None
            except UserError as error:
                typer.echo(f"{error.message}\n  fix: {error.fix}", err=True)
                bad += 1
    if bad:
        typer.echo(f"seatrial: {bad} not imported", err=True)
        raise typer.Exit(ExitCode.USAGE)


def show(
    metrics: Metrics,
    store: StoreFile = None,
    project: Project = None,
    name: Name = None,
    machine: Machine = None,
    take: TakeName = "last",
    limit: Limit = 20,
    points: Annotated[bool, typer.Option("--points", help="Every step, of the latest run or of --run.")] = False,
    run: Annotated[int | None, typer.Option("--run", help="Only the run of this number.")] = None,
) -> None:
    """Show metrics run by run: time, commit, branch, value, and whether the run is a baseline."""
    from seatrial.core.errors import UserError
    from seatrial.history import formats as showing
    from seatrial.history.store import none_has, require

    of: RunFilter = {"project": project, "name": name, "machine": machine}
    way, shown = taken(take), 0
    with opened(store) as kept:
        require(kept, **of)
        for metric in showing.chosen(kept, metrics, project):
            some = limit or None
            if points:
                values = kept.values(metric, **of, limit=1 if run is None else None)
                values = [one for one in values if run in (None, one.run.id)]
                lines = showing.point_lines(kept, values[0].run, metric) if values else []
            elif run is not None:
                values = [one for one in kept.values(metric, **of, take=way) if one.run.id == run]
                lines = showing.metric_lines(metric, values, way, len(values)) if values else []
            else:
                values = kept.values(metric, **of, take=way, limit=some)
                lines = showing.metric_lines(metric, values, way, kept.count(metric, **of)) if values else []
            shown += bool(lines)
            if lines:
                typer.echo(as_rows(lines))
    if not shown:
        what = ", ".join(metrics) + (f" and the number {run}" if run is not None else "")
        raise UserError(none_has(what, **of), "seatrial history runs lists the runs")


def runs(
    store: StoreFile = None,
    project: Project = None,
    kind: Annotated[
        str | None,
        typer.Option("--kind", help="test, trial, campaign, benchmark or metrics; functional runs are metrics, named `functional NAME`."),
    ] = None,
    name: Name = None,
    branch: Annotated[str | None, typer.Option("--branch")] = None,
    limit: Limit = 30,
) -> None:
    """List the runs, the latest last."""
    from seatrial.core.errors import UserError
    from seatrial.history.formats import run_lines
    from seatrial.history.store import Kind, require

    if kind is not None and kind not in list(Kind):
        raise UserError(f"--kind {kind}: no such kind", f"one of {', '.join(Kind)}")
    with opened(store) as kept:
        require(kept, project=project, name=name, kind=kind, branch=branch)
        found = kept.runs(project=project, kind=Kind(kind) if kind else None, name=name, branch=branch, limit=limit or None)
        typer.echo(as_rows(run_lines(found)) if found else "no runs")


def compare(
    before: Annotated[str, typer.Argument(metavar="REV1", help="A revision of the repository here, or the beginning of a commit.")],
    after: Annotated[str, typer.Argument(metavar="REV2")],
    metrics: OnlyMetrics = None,
    store: StoreFile = None,
    project: Project = None,
    take: TakeName = "last",
) -> None:
    """Compare the metrics of two commits, in units of the spread of the baselines. Exit 2 when they have nothing in common."""
    from seatrial.core.verdict import ExitCode
    from seatrial.history import compare as comparing
    from seatrial.history.formats import chosen
    from seatrial.history.store import require

    with opened(store) as kept:
        require(kept, project=project)
        if metrics:
            chosen(kept, metrics, project)
        sides = [comparing.resolve_revision(kept, revision, Path.cwd()) for revision in (before, after)]
        found = comparing.compare_revisions(kept, *sides, patterns=metrics or (), project=project, take=taken(take))
    typer.echo(as_rows(found.lines()))
    if not found.rows:
        raise typer.Exit(ExitCode.USAGE)


def mark(
    run: Annotated[int, typer.Argument(metavar="RUN", help="The number of a run, as `runs` and `show` print it.")],
    reason: Annotated[str, typer.Option("--reason", help="Why it must not be a baseline.")] = "",
    clear: Annotated[bool, typer.Option("--clear", help="Let it be a baseline again.")] = False,
    earlier: Annotated[bool, typer.Option("--and-earlier", help="Also all runs before it that share its baselines.")] = False,
    later: Annotated[bool, typer.Option("--and-later", help="Also all runs after it that share its baselines.")] = False,
    store: StoreFile = None,
) -> None:
    """Take a poisoned run out of the baselines. Its values stay and are shown with the reason."""
    from seatrial.core.errors import UserError
    from seatrial.core.text import counted
    from seatrial.evidence.lazy_redactor import LazyRedactor

    if clear == bool(reason.strip()):
        raise UserError("give either --reason or --clear", 'seatrial history mark 12 --reason "the node was throttled"')
    reason = LazyRedactor(os.environ).text(reason.strip())
    with opened(store, write=True) as kept:
        first = kept.run(run)
        if first is None:
            raise UserError(f"no run {run} in {kept.path}", "seatrial history runs lists them")
        shared = kept.runs(project=first.project, kind=first.kind, name=first.name, machine=first.machine) if earlier or later else []
        some = [one for one in shared if (earlier and one.order < first.order) or (later and one.order > first.order)]
        # of the others only those that it changes: a reason that somebody gave before stays
        changed = [first, *(other for other in some if (bool(other.poisoned) if clear else other.baseline))]
        for one in changed:
            kept.mark(one.id or 0, "" if clear else reason)
            replaced = f" (replaces: {one.poisoned})" if one.poisoned else ""
            typer.echo(f"run {one.id}: {_cleared(one) if clear else f'poisoned: {reason}{replaced}'}")
        if clear:
            typer.echo(f"{counted(sum(bool(one.poisoned) for one in changed), 'mark')} cleared")


def _cleared(before: StoredRun) -> str:
    """What `mark --clear` did to a run, which may have had no mark, and which no mark kept out alone if it is not trusted."""
    if not before.poisoned:
        return "had no mark"
    return "may be a baseline again" if before.trusted else f"has no mark any more; it is no baseline all the same: {before.why_untrusted}"


def export_(
    metrics: Annotated[list[str] | None, typer.Argument(metavar="[METRIC...]", help="Only these; * and ? stand for anything.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A file; its ending says the form. Default: JSON to standard output.")
    ] = None,
    form: Annotated[str | None, typer.Option("--format", help="json (an object per run and line), csv or parquet.")] = None,
    store: StoreFile = None,
    project: Project = None,
    name: Name = None,
    take: TakeName = "last",
    points: Annotated[bool, typer.Option("--points", help="CSV and Parquet: a row per step.")] = False,
) -> None:
    """Export to JSON, CSV or Parquet. The JSON has the schema of unit_results.json, so the same jq one-liners read it."""
    from seatrial.core.errors import UserError
    from seatrial.core.files import replacing
    from seatrial.core.text import counted
    from seatrial.history import formats
    from seatrial.history.store import none_has, require

    with opened(store) as kept:
        way, form = taken(take), _format(out, form, points)
        require(kept, project=project, name=name)
        names = set(formats.chosen(kept, metrics, project)) if metrics else None
        if names is not None and not any(kept.count(metric, project=project, name=name) for metric in names):
            raise UserError(none_has(", ".join(metrics or ()), project=project, name=name), "seatrial history runs lists the runs")
        runs = kept.runs(project=project, name=name)
        if form == "json":
            found: Counted[Any] = Counted(formats.as_json(kept, runs, names, way))
            parts: Iterator[bytes] = (f"{line}\n".encode() for line in found)
        else:
            found = Counted(formats.rows(kept, runs, names, way, points=points))
            parts = (
                iter([formats.as_parquet(iter(found))]) if form == "parquet" else (text.encode() for text in formats.as_csv(iter(found)))
            )
        if out is None:
            for part in parts:
                sys.stdout.write(part.decode())
            return
        with replacing(out) as stream:
            stream.writelines(parts)
    sys.stdout.write(f"wrote {out}: {form}, {counted(found.count, 'run' if form == 'json' else 'row')}\n")


COMMANDS = {
    "import": "import_",
    **{name: name for name in ("show", "runs", "compare", "trend", "gate", "calibrate", "mark")},
    "export": "export_",
}


class LazyHistory(Plain, TyperGroup):
    """Makes a command only when it is asked for: a query is shorter than the making of all of them."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the interface of a group
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:  # noqa: ARG002 - the interface of a group
        if name not in COMMANDS:
            return None
        made = typer.Typer(rich_markup_mode=None, add_completion=False)
        made.command(name, cls=Light)(globals()[COMMANDS[name]])
        found = typer.main.get_command(made)
        found.name = name
        return found


app = typer.Typer(cls=LazyHistory, rich_markup_mode=None, add_completion=False, no_args_is_help=True)


@app.callback()
def history() -> None:
    """Metrics of all runs over time: show, compare, trends with change points, a gate, thresholds, export."""


Last = Annotated[int, typer.Option("--last", min=5, help="So many baselines, the latest.")]


def trend(
    metrics: Metrics,
    store: StoreFile = None,
    project: Project = None,
    name: Name = None,
    machine: Machine = None,
    take: TakeName = "last",
    alarm: Annotated[float, typer.Option("--alarm", help="Chance of a false change in a series without one.")] = 0.01,
    every: Annotated[bool, typer.Option("--every", help="Also runs that are poisoned.")] = False,
) -> None:
    """Find where metrics changed: steps, drifts, outliers, with commits."""
    from seatrial.history.compare import trend as trend_of

    with opened(store) as kept:
        found = trend_of(kept, metrics, project=project, name=name, machine=machine, take=taken(take), alarm=alarm, every=every)
        typer.echo(as_rows(found.lines()))


def gate(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|PATH]", help="The run under test: its number, or a file or directory of results. Default: the latest."
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", help="Only these; * and ? stand for anything; repeatable. Default: all but times ('*/_elapsed')."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Not these; * and ? stand for anything; repeatable.")
    ] = None,
    store: StoreFile = None,
    project: Project = None,
    name: Name = None,
    machine: Annotated[
        str | None, typer.Option("--machine", help="Only a run on this kind of machine; for a PATH, what it ran on.")
    ] = None,
    take: TakeName = "last",
    last: Last = 20,
    sigmas: Annotated[float, typer.Option("--sigmas", help="Half the band is at least so many spreads of the baselines.")] = 4.0,
    false_alarms: Annotated[
        float,
        typer.Option("--false-alarms", help="At most this share of good values outside a band; few baselines need wide bands for it."),
    ] = 0.01,
    relative: Annotated[float, typer.Option("--relative", help="The band is at least this share of the baselines' median.")] = 1e-6,
    absolute: Annotated[float, typer.Option("--absolute", help="The band is at least this.")] = 0.0,
) -> None:
    """Judge a run against two-sided bands from its baselines. Exit 0 Pass, 1 Fail, 99 Blocked (too few baselines). Writes nothing."""
    from seatrial.core.verdict import Verdict, exit_code
    from seatrial.history.auto_import import history_settings, store_path
    from seatrial.history.importing import Stated
    from seatrial.history.metric_gate import GateSettings, gate_run

    settings = GateSettings(sigmas=sigmas, relative=relative, absolute=absolute, rate=false_alarms, last=last, take=taken(take))
    # That no file is there yet is no mistake of the one who asks for the first time.
    with opened(store) if store_path(store, history_settings(Path.cwd())).exists() else nullcontext() as kept:
        none = kept is None or not kept.runs(limit=1)
        chosen = _under_test(kept, run, Stated(project=project, name=name, machine=machine), settings.take, none=none)
        found = gate_run(kept, *chosen, settings, metrics or [], exclude or []) if chosen else None
    verdict = found.verdict if found else Verdict.BLOCKED
    lines = found.lines() if found else []
    typer.echo(as_rows([*lines, f"{verdict}: no run is kept yet: seatrial history import PATH"] if none else lines))
    raise typer.Exit(exit_code(verdict))


def _under_test(
    kept: Store | None, asked: str | None, stated: Stated, take: Take, *, none: bool
) -> tuple[StoredRun, dict[str, RunValue]] | None:
    """The run that a number, a path or nothing names, and its metrics; None where no run is kept that could be named."""
    from seatrial.history import importing
    from seatrial.history.auto_import import history_settings

    if asked is not None and not (asked.isascii() and asked.isdigit()):
        found, values = importing.read_transient(Path(asked), stated, history_settings(Path.cwd()).trusted, take)
        same = kept.by_digest(found.digest) if kept is not None else None
        return (importing.with_known(found, same, stated) if same is not None else found), values
    if kept is None or none:
        return None
    subject = _of_store(kept, asked, {"project": stated.project, "name": stated.name, "machine": stated.machine})
    return subject, kept.of_run(subject.id or 0, take=take)


def _of_store(kept: Store, number: str | None, of: RunFilter) -> StoredRun:
    """The run of that number, which must be what the options say, too; without a number the latest that is."""
    from seatrial.core.errors import UserError
    from seatrial.history.store import require, require_of

    if number is None:
        require(kept, **of)
        return kept.runs(**of, limit=1)[-1]
    found = kept.run(int(number)) if len(number) < 19 else None
    if found is None:
        raise UserError(f"no run {number} in {kept.path}", "seatrial history runs lists them")
    require_of(found, **of)
    return found


def calibrate(
    metrics: Metrics,
    store: StoreFile = None,
    project: Project = None,
    name: Name = None,
    machine: Machine = None,
    take: TakeName = "last",
    last: Annotated[int | None, typer.Option("--last", min=2, help="Only so many runs, the latest.")] = None,
    false_alarms: Annotated[float, typer.Option("--false-alarms", help="The highest share of good runs that may miss.")] = 0.01,
    every: Annotated[bool, typer.Option("--every", help="Also runs that are not trusted.")] = False,
) -> None:
    """Propose thresholds for checks from the runs there are, with their rate of false alarms."""
    from seatrial.history.thresholds import calibrate as proposed

    of: RunFilter = {"project": project, "name": name, "machine": machine}
    with opened(store) as kept:
        found = proposed(kept, metrics, **of, take=taken(take), last=last, false_alarms=false_alarms, every=every)
        typer.echo(as_rows([line for group in found for line in group.lines()]))
