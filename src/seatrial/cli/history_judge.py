"""`seatrial history trend`, `gate` and `calibrate`: what the history says of a run or a metric."""

from __future__ import annotations

from typing import Annotated

import typer

from seatrial.cli.history_options import Machine, Metrics, Name, Project, StoreFile, TakeName, opened, taken

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
    from seatrial.regress.history.trend import trend as trend_of

    with opened(store) as kept:
        found = trend_of(kept, metrics, project=project, name=name, machine=machine, take=taken(take), alarm=alarm, every=every)
        typer.echo("\n".join(found.lines()))


def gate(
    run: Annotated[int | None, typer.Argument(metavar="[RUN]", help="The number of the run under test. Default: the latest.")] = None,
    metrics: Annotated[list[str] | None, typer.Option("--metric", help="Only these; * and ? stand for anything; repeatable.")] = None,
    store: StoreFile = None,
    project: Project = None,
    name: Name = None,
    take: TakeName = "last",
    last: Last = 20,
    sigmas: Annotated[float, typer.Option("--sigmas", help="Half the band, in spreads of the baselines.")] = 4.0,
    relative: Annotated[float, typer.Option("--relative", help="The band is at least this share of the baselines' median.")] = 1e-6,
    absolute: Annotated[float, typer.Option("--absolute", help="The band is at least this.")] = 0.0,
) -> None:
    """Judge a run against two-sided bands from its baselines. Exit 0 Pass, 1 Fail, 99 Blocked (too few baselines). Writes nothing."""
    from seatrial.model.errors import UserError
    from seatrial.model.verdict import exit_code
    from seatrial.regress.history.gate import gate as judge

    with opened(store) as kept:
        key = run
        if key is None:
            latest = kept.runs(project=project, name=name, limit=1)
            key = latest[0].id if latest else None
        if key is None or kept.run(key) is None:
            raise UserError(f"no run {'' if key is None else key} in {kept.path}", "seatrial history runs lists them")
        found = judge(kept, key, patterns=metrics or [], last=last, take=taken(take), sigmas=sigmas, relative=relative, absolute=absolute)
    typer.echo("\n".join(found.lines()))
    raise typer.Exit(exit_code(found.verdict))


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
    from seatrial.regress.history.calibrate import calibrate as proposed

    with opened(store) as kept:
        found = proposed(
            kept,
            metrics,
            project=project,
            name=name,
            machine=machine,
            take=taken(take),
            last=last,
            false_alarms=false_alarms,
            every=every,
        )
        typer.echo("\n".join(found.lines()))
