"""`seatrial history trend`, `gate` and `calibrate`: what the history says of a run or a metric."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.cli.history_options import Chosen, Name, OnlyMetrics, Project, StoreFile, TakeName, choosing, opened, taken

if TYPE_CHECKING:
    from seatrial.regress.history.adding import Stated
    from seatrial.regress.history.record import Run, RunValue, Take
    from seatrial.regress.history.store import Store

Last = Annotated[int, typer.Option("--last", min=5, help="So many baselines, the latest.")]


@choosing
def trend(
    chosen: Chosen,
    alarm: Annotated[float, typer.Option("--alarm", help="Chance of a false change in a series without one.")] = 0.01,
    every: Annotated[bool, typer.Option("--every", help="Also runs that are poisoned.")] = False,
) -> None:
    """Find where metrics changed: steps, drifts, outliers, with commits."""
    from seatrial.regress.history.trend import trend as trend_of

    with opened(chosen.store) as kept:
        found = trend_of(kept, chosen.metrics, **chosen.of, take=taken(chosen.take), alarm=alarm, every=every)
        typer.echo("\n".join(found.lines()))


def gate(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|PATH]", help="The run under test: its number, or a file or directory of results. Default: the latest."
        ),
    ] = None,
    metrics: OnlyMetrics = None,
    store: StoreFile = None,
    project: Project = None,
    name: Name = None,
    machine: Annotated[str | None, typer.Option("--machine", help="What a PATH ran on, for files that do not say.")] = None,
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
    from seatrial.model.verdict import exit_code
    from seatrial.regress.history.adding import Stated
    from seatrial.regress.history.gate import Settings, against

    settings = Settings(sigmas=sigmas, relative=relative, absolute=absolute, rate=false_alarms, last=last, take=taken(take))
    with opened(store) as kept:
        subject, values = _under_test(kept, run, Stated(project=project, name=name, machine=machine), settings.take)
        found = against(kept, subject, values, settings, metrics or [])
    typer.echo("\n".join(found.lines()))
    raise typer.Exit(exit_code(found.verdict))


def _under_test(kept: Store, asked: str | None, stated: Stated, take: Take) -> tuple[Run, dict[str, RunValue]]:
    """The run that a number, a path or nothing names, and its metrics."""
    from seatrial.model.errors import UserError
    from seatrial.regress.history import unkept
    from seatrial.regress.history.place import settings

    if asked is not None and not (asked.isascii() and asked.isdigit()):
        return unkept.read(Path(asked), stated, settings(Path.cwd()).trusted, take)
    if asked is None:
        found = kept.runs(project=stated.project, name=stated.name, machine=stated.machine, limit=1)
        subject = found[0] if found else None
    else:
        subject = kept.run(int(asked)) if len(asked) < 19 else None
    if subject is None or subject.id is None:
        raise UserError(f"no run {asked or ''} in {kept.path}", "seatrial history runs lists them")
    return subject, kept.of_run(subject.id, take=take)


@choosing
def calibrate(
    chosen: Chosen,
    last: Annotated[int | None, typer.Option("--last", min=2, help="Only so many runs, the latest.")] = None,
    false_alarms: Annotated[float, typer.Option("--false-alarms", help="The highest share of good runs that may miss.")] = 0.01,
    every: Annotated[bool, typer.Option("--every", help="Also runs that are not trusted.")] = False,
) -> None:
    """Propose thresholds for checks from the runs there are, with their rate of false alarms."""
    from seatrial.regress.history.calibrate import calibrate as proposed

    with opened(chosen.store) as kept:
        found = proposed(kept, chosen.metrics, **chosen.of, take=taken(chosen.take), last=last, false_alarms=false_alarms, every=every)
        typer.echo("\n".join(found.lines()))
