"""`seatrial history trend`, `gate` and `calibrate`: what the history says of a run or a metric."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.cli.history_options import Chosen, Name, Of, Project, StoreFile, TakeName, choosing, opened, taken
from seatrial.report.text import as_rows

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
    from seatrial.model.verdict import Verdict, exit_code
    from seatrial.regress.history.adding import Stated
    from seatrial.regress.history.gate import Settings, against

    settings = Settings(sigmas=sigmas, relative=relative, absolute=absolute, rate=false_alarms, last=last, take=taken(take))
    with _kept(store) as kept:
        none = kept is None or not kept.runs(limit=1)
        chosen = _under_test(kept, run, Stated(project=project, name=name, machine=machine), settings.take, none=none)
        found = against(kept, *chosen, settings, metrics or [], exclude or []) if chosen else None
    verdict = found.verdict if found else Verdict.BLOCKED
    lines = found.lines() if found else []
    typer.echo(as_rows([*lines, f"{verdict}: no run is kept yet: seatrial history import PATH"] if none else lines))
    raise typer.Exit(exit_code(verdict))


def _kept(store: Path | None) -> AbstractContextManager[Store | None]:
    """The store; none where no file is there yet, which is no mistake of the one who asks for the first time."""
    from seatrial.regress.history.place import place, settings

    return opened(store) if place(store, settings(Path.cwd())).exists() else nullcontext()


def _under_test(kept: Store | None, asked: str | None, stated: Stated, take: Take, *, none: bool) -> tuple[Run, dict[str, RunValue]] | None:
    """The run that a number, a path or nothing names, and its metrics; None where no run is kept that could be named."""
    from seatrial.regress.history import unkept
    from seatrial.regress.history.place import settings

    if asked is not None and not (asked.isascii() and asked.isdigit()):
        found, values = unkept.read(Path(asked), stated, settings(Path.cwd()).trusted, take)
        same = kept.by_digest(found.digest) if kept is not None else None
        return (unkept.known(found, same, stated) if same is not None else found), values
    if kept is None or none:
        return None
    subject = _of_store(kept, asked, Of(project=stated.project, name=stated.name, machine=stated.machine))
    return subject, kept.of_run(subject.id or 0, take=take)


def _of_store(kept: Store, number: str | None, of: Of) -> Run:
    """The run of that number, which must be what the options say, too; without a number the latest that is."""
    from seatrial.model.errors import UserError
    from seatrial.regress.history import among

    if number is None:
        among.require(kept, **of)
        return kept.runs(**of, limit=1)[-1]
    found = kept.run(int(number)) if len(number) < 19 else None
    if found is None:
        raise UserError(f"no run {number} in {kept.path}", "seatrial history runs lists them")
    among.require_of(found, **of)
    return found


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
        typer.echo(as_rows(found.lines()))
