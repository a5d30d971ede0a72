"""`seatrial history`: metrics of all runs over time. What judges (trend, gate, calibrate) is in history_judge.py."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from seatrial.cli.history_options import Chosen, Name, OnlyMetrics, Project, StoreFile, TakeName, choosing, opened, taken
from seatrial.cli.light import Light, Plain
from seatrial.report.text import as_rows

if TYPE_CHECKING:
    from seatrial.regress.history.record import Run

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
    from seatrial.model.errors import UserError
    from seatrial.model.verdict import ExitCode
    from seatrial.regress.history.adding import Stated, add
    from seatrial.regress.history.importers.detect import in_order
    from seatrial.regress.history.place import place, settings
    from seatrial.regress.history.store import Store

    found = settings(Path.cwd())
    stated = Stated(
        project=project, name=name, machine=machine, commit=commit, branch=branch, clean=True if clean else None, passed=passed or None
    )
    bad = 0
    with Store(place(store, found), write=True) as kept:
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


@choosing
def show(
    chosen: Chosen,
    limit: Limit = 20,
    points: Annotated[bool, typer.Option("--points", help="Every step, of the latest run or of --run.")] = False,
    run: Annotated[int | None, typer.Option("--run", help="Only the run of this number.")] = None,
) -> None:
    """Show metrics run by run: time, commit, branch, value, and whether the run is a baseline."""
    from seatrial.model.errors import UserError
    from seatrial.regress.history import among
    from seatrial.regress.history import show as showing

    take, shown = taken(chosen.take), 0
    with opened(chosen.store) as kept:
        among.require(kept, **chosen.of)
        for metric in showing.chosen(kept, chosen.metrics, chosen.project):
            some = limit or None
            if points:
                values = kept.values(metric, **chosen.of, limit=1 if run is None else None)
                values = [one for one in values if run in (None, one.run.id)]
                lines = showing.point_lines(kept, values[0].run, metric) if values else []
            elif run is not None:
                values = [one for one in kept.values(metric, **chosen.of, take=take) if one.run.id == run]
                lines = showing.metric_lines(metric, values, take, len(values)) if values else []
            else:
                values = kept.values(metric, **chosen.of, take=take, limit=some)
                lines = showing.metric_lines(metric, values, take, kept.count(metric, **chosen.of)) if values else []
            shown += bool(lines)
            if lines:
                typer.echo(as_rows(lines))
    if not shown:
        what = ", ".join(chosen.metrics) + (f" and the number {run}" if run is not None else "")
        raise UserError(among.none_has(what, **chosen.of), "seatrial history runs lists the runs")


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
    from seatrial.model.errors import UserError
    from seatrial.regress.history.among import require
    from seatrial.regress.history.record import Kind
    from seatrial.regress.history.show import run_lines

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
    from seatrial.model.verdict import ExitCode
    from seatrial.regress.history import compare as comparing
    from seatrial.regress.history.among import require
    from seatrial.regress.history.show import chosen

    with opened(store) as kept:
        require(kept, project=project)
        if metrics:
            chosen(kept, metrics, project)
        sides = [comparing.resolve(kept, revision, Path.cwd()) for revision in (before, after)]
        found = comparing.compare(kept, *sides, patterns=metrics or (), project=project, take=taken(take))
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
    from seatrial.evidence.lazy_redactor import LazyRedactor
    from seatrial.model.errors import UserError
    from seatrial.model.words import counted

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
            typer.echo(f"run {one.id}: {_cleared(one) if clear else _marked(one, reason)}")
        if clear:
            typer.echo(f"{counted(sum(bool(one.poisoned) for one in changed), 'mark')} cleared")


def _cleared(before: Run) -> str:
    """What `mark --clear` did to a run, which may have had no mark, and which no mark kept out alone if it is not trusted."""
    if not before.poisoned:
        return "had no mark"
    return "may be a baseline again" if before.trusted else f"has no mark any more; it is no baseline all the same: {before.why_untrusted}"


def _marked(before: Run, reason: str) -> str:
    """What `mark --reason` did to a run; an earlier reason does not go without a word."""
    return f"poisoned: {reason}" + (f" (replaces: {before.poisoned})" if before.poisoned else "")


def export(
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
    from seatrial.cli.history_export import write

    with opened(store) as kept:
        write(kept, metrics or [], out, form, project, name, taken(take), points)


COMMANDS: dict[str, tuple[str, str]] = {
    "import": ("history", "import_"),
    "show": ("history", "show"),
    "runs": ("history", "runs"),
    "compare": ("history", "compare"),
    "trend": ("history_judge", "trend"),
    "gate": ("history_judge", "gate"),
    "calibrate": ("history_judge", "calibrate"),
    "mark": ("history", "mark"),
    "export": ("history", "export"),
}


class Lazy(Plain, TyperGroup):
    """Makes a command only when it is asked for: a query is shorter than the making of all of them."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the interface of a group
        """In the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:  # noqa: ARG002 - the interface of a group
        """One command, or None."""
        if name not in COMMANDS:
            return None
        module, function = COMMANDS[name]
        made = typer.Typer(rich_markup_mode=None, add_completion=False)
        made.command(name, cls=Light)(getattr(importlib.import_module(f"seatrial.cli.{module}"), function))
        found = typer.main.get_command(made)
        found.name = name
        return found


app = typer.Typer(cls=Lazy, rich_markup_mode=None, add_completion=False, no_args_is_help=True)


@app.callback()
def history() -> None:
    """Metrics of all runs over time: show, compare, trends with change points, a gate, thresholds, export."""
