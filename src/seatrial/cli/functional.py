"""`seatrial functional run`: functional test scripts, each to a verdict by what it left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from seatrial.cli import hermetic as box

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from seatrial.functional.hermetic import ExecutionPlace
    from seatrial.functional.plan_scripts import FunctionalRun, PlannedScript, ScriptResult
    from seatrial.history.auto_import import CheckoutState

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)
RUNS = Path("functional-runs")


@app.callback()
def functional() -> None:
    """Run functional test scripts: metric table, logs, deadlines, JUnit."""


@app.command("run")
def run(
    context: typer.Context,
    scripts: Annotated[list[Path], typer.Argument(help="Shell scripts; what stands after `--` is given to each of them.")],
    out: Annotated[Path | None, typer.Option("--out", help="A new directory for logs and reports.")] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", min=0.01, help="Minutes for each script; default: its own, or 60.")
    ] = None,
    stall: Annotated[float | None, typer.Option("--stall", min=0.01, help="Minutes without any output before a script is ended.")] = None,
    check: Annotated[list[str] | None, typer.Option("--check", help="A further check of the metrics; repeat for several.")] = None,
    metrics: Annotated[Path | None, typer.Option("--metrics", help="Where the script leaves its metrics, if no loop knows it.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="The last step that must be reached.")] = None,
    steps_by: Annotated[str | None, typer.Option("--steps-by", help="The metric that has a point at every step.")] = None,
    exit_code_only: Annotated[
        bool, typer.Option("--exit-code-only", help="Accept the exit code of a script that leaves nothing to check.")
    ] = False,
    gpus: Annotated[int | None, typer.Option("--gpus", min=0, help="How many GPUs a script uses, if it does not say.")] = None,
    gpu_hours: Annotated[float | None, typer.Option("--gpu-hours", min=0, help="Refuse a plan that may take more.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, and stop.")] = False,
    hermetic: Annotated[bool, typer.Option("--hermetic", help="Run in a fresh environment of the project's lock.")] = False,
    image: box.Image = None,
    engine: box.EngineName = None,
    env: box.Env = None,
    mount: box.Mounts = None,
    packages: box.With = None,
    keep: box.Keep = False,
) -> None:
    """Run scripts one after another and judge them by what they left: an exit code of 0 alone is no Pass."""
    from seatrial.functional.plan_scripts import FunctionalRequest, plan_scripts

    planned = plan_scripts(
        FunctionalRequest(
            scripts=tuple(scripts),
            arguments=tuple(context.obj or ()),
            checks=tuple(check or ()),
            metrics=metrics,
            steps=steps,
            steps_by=steps_by,
            deadline=deadline,
            stall=stall,
            gpus=gpus,
            gpu_hours=gpu_hours,
            exit_code_only=exit_code_only,
        )
    )
    if dry_run:
        _show_plan(planned)
        return
    options = box.Options(image=image, engine=engine, env=env, mounts=mount, packages=packages, keep=keep)
    _run(planned, _place(planned, options, hermetic), out)


def _run(planned: Sequence[PlannedScript], place: ExecutionPlace, out: Path | None) -> NoReturn:
    """Run what is planned, show and keep what came of it, and end with the exit code of the verdict."""
    from seatrial.core.verdict import exit_code
    from seatrial.functional.hermetic import end_earlier
    from seatrial.functional.run_scripts import run_all
    from seatrial.history.auto_import import checkout_state
    from seatrial.runtime.interrupt import Interruptible
    from seatrial.trial.run_dir import named_directory, new_directory

    end_earlier((out.absolute().parent if out else RUNS).glob("*/*/run.log.pids"), box.tell)
    directory = named_directory(out) if out else new_directory(RUNS, "functional")
    looked = {one.name: checkout_state(one.cwd) for one in planned}
    with Interruptible() as stop, place:
        whole = run_all(planned, directory, place, box.tell, _show_result)
    _show_summary(whole, directory)
    _keep(whole, directory, looked)
    stop.check()
    raise typer.Exit(exit_code(whole.verdict))


def _place(planned: Sequence[PlannedScript], options: box.Options, hermetic: bool) -> ExecutionPlace:
    """Where the scripts run; what is not the caller's own environment is shown, script by script."""
    from seatrial.core.errors import UserError

    if options.image and hermetic:
        raise UserError("--hermetic is a fresh environment, and --image a container", "give one of them")
    projects = tuple(dict.fromkeys(one.cwd for one in planned))
    outside = tuple(one.script.parent for one in planned if options.image and not one.script.is_relative_to(one.cwd))
    place = box.make_place(options, (*projects, *outside), box.tell, fresh=hermetic)
    if options.image or hermetic:
        clear = box.without_secrets()
        for one in planned:
            for line in place.shown(clear(one.argv), one.cwd):
                box.tell(line)
    return place


def _keep(whole: FunctionalRun, directory: Path, looked: Mapping[str, CheckoutState]) -> None:
    """Into the history, script by script: only what this run copied, not what an earlier one had left; one quiet line each."""
    from seatrial.core.verdict import Verdict
    from seatrial.history.auto_import import auto_import

    outcomes = {Verdict.PASS: True, Verdict.FAIL: False}
    for result in whole.results:
        for copied in sorted((directory / result.name).glob("metrics*")):
            name = f"{result.name} {copied.name}" if copied.name.startswith("metrics-") else result.name
            line = auto_import(copied, name=f"functional {name}", looked=looked[result.name], passed=outcomes.get(result.verdict))
            if line:
                box.tell(line)


def _show_plan(planned: Sequence[PlannedScript]) -> None:
    from seatrial.core.text import one_line

    for one in planned:
        hours = "not known" if one.gpu_hours is None else f"{one.gpu_hours:.4g}"
        gpus = "not known" if one.gpus is None else one.gpus
        typer.echo(f"{one.name}: {one.script}\n  deadline {one.minutes:g} min, GPUs {gpus}, GPU hours {hours}")
        for file in one.asserted:
            typer.echo(f"  metrics {file.metrics or file.written}" + (f", last step {file.steps}" if file.steps else ""))
            for expr in file.checks:
                typer.echo(f"    {expr}")
        for text in one.unread:
            typer.echo(f"  cannot be read, which will be a Fail: {one_line(text)}")
        if not one.something_to_check:
            typer.echo("  nothing to check" + (": its exit code decides" if one.exit_code_only else ", which will be a Fail"))
    typer.echo(_cost(planned))


def _cost(planned: Sequence[PlannedScript]) -> str:
    """`3 scripts, at most 4 GPU hours`, as far as scripts say how many GPUs they use."""
    from seatrial.core.text import counted

    scripts = counted(len(planned), "script")
    known = [one.gpu_hours for one in planned if one.gpu_hours is not None]
    if not known:
        return f"{scripts}, GPU hours not known (give --gpus N)"
    silent = len(planned) - len(known)
    more = f", and those of {counted(silent, 'script')} not known (give --gpus N)" if silent else ""
    return f"{scripts}, at most {sum(known):.4g} GPU hours{more}"


def _show_result(result: ScriptResult) -> None:
    from seatrial.cli.judge import print_table

    if result.checks:
        print_table(result.checks, f"Metric checks of {result.name}")
    typer.echo(f"{result.name}: {result.verdict}: {result.reason}")


def _show_summary(whole: FunctionalRun, directory: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from seatrial.core.text import visible
    from seatrial.functional.run_scripts import cells_of, counted_scripts

    table = Table(title=f"{whole.verdict}: {counted_scripts(whole)}")
    for column in ("Script", "Verdict", "Steps", "Time", "GPU hours", "Reason"):
        table.add_column(column, overflow="fold")
    for result in whole.results:
        table.add_row(*(Text(visible(cell)) for cell in cells_of(result)))
    Console(width=200, soft_wrap=False).print(table)
    for result in whole.results:
        for note in result.notes:
            typer.echo(f"{result.name}: note: {note}")
    typer.echo(f"{directory}")
