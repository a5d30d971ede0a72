"""`seatrial probe`: one instrument alone, without a trial. `probe refit` shows bit for bit that a generator has its policy's weights;
`probe bridge` has a file of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from seatrial import api
from seatrial.cli import probe_bridge

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True, help="Run one instrument alone, without a trial.")

Engine = Literal["vllm", "transformers"]
Transport = Literal["full", "packed", "sparse", "all"]
STEPS = 4


app.command()(probe_bridge.bridge)


@app.callback()
def probe() -> None:
    """Run one instrument alone, without a trial."""


@app.command()
def refit(
    server: Annotated[
        list[str] | None, typer.Argument(metavar="-- SERVER OPTIONS", help="With --engine vllm: options for its server, after --.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A local model directory, or tiny-llama (default), tiny-qwen2, tiny-moe.")
    ] = None,
    engine: Annotated[Engine | None, typer.Option("--engine", help="The generator; transformers needs no engine (default).")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help=f"Updates of the policy, each with a refit. Default: {STEPS}.")
    ] = None,
    transport: Annotated[Transport | None, typer.Option("--transport", help="How weights travel. Default: all, in turn.")] = None,
    python: Annotated[
        Path | None, typer.Option("--python", help="Your own interpreter for the engine, such as one with CUDA vLLM.")
    ] = None,
    fault: Annotated[str | None, typer.Option("--fault", help="Inject a seeded refit fault, to see it caught; `list` names them.")] = None,
    attach: Annotated[str | None, typer.Option("--attach", metavar="URL", help="A vLLM server that runs with our extension.")] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="DIR", help="With --attach: the safetensors to hold it against.")
    ] = None,
    facts: Annotated[Path | None, typer.Option("--facts", metavar="FILE|DIR", help="Judge facts that hooks left in another run.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where the evidence goes. Default: a new directory below trials/.")
    ] = None,
    minutes: Annotated[float, typer.Option("--deadline", metavar="MINUTES", min=0.1, help="Give up after this many minutes.")] = 30,
    json: Annotated[bool, typer.Option("--json", help="Print probe.json instead of text.")] = False,
) -> None:
    """Show bit for bit that a generator has its policy's weights.

    A policy trains, a generator in its own process is refitted after every step, and each time every tensor is compared.
    The exit code is the verdict's: 0 Pass, 1 Fail, 99 Blocked (also: a run that could not have shown anything), 2 usage.
    """
    from seatrial.core.verdict import ExitCode, exit_code
    from seatrial.probes.probe_process import ProbeInterrupted
    from seatrial.probes.refit_run import RefitOptions, faults, refit_summary, refit_table, require_one_source

    options: dict[str, Any] = {"model": model, "engine": engine, "steps": steps, "transport": transport, "python": python, "fault": fault}
    options |= {"attach": attach, "weights": weights, "facts": facts, "server": server or ()}
    if fault == "list":
        require_one_source(RefitOptions(**options))
        typer.echo("\n".join(f"{name:20} {text}" for name, text in faults(engine or "transformers").items()))
        raise typer.Exit
    try:
        found = api.probe_refit(
            **options,
            out=out,
            deadline=minutes,
            command=("seatrial", *sys.argv[1:]),
            tell=lambda line: typer.echo(f"seatrial: {line}", err=json),
            tell_build=lambda line: None if json else typer.echo(f"seatrial: {line}", err=True),
        )
    except ProbeInterrupted as cut:
        said = f"seatrial: interrupted, all processes are ended; there is no verdict. What was found so far: {cut.directory}"
        typer.echo(said, err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    judged, place = found.record.judged, found.directory
    if json:
        typer.echo(found.record.model_dump_json(indent=2))
    else:
        text = refit_summary(found.record, place)
        typer.echo(f"\n{refit_table(judged.refits)}\n\n{text}" if judged.refits else f"\n{text}", nl=False)
        if place is not None:
            typer.echo(f"\nprobe: {place / 'probe.json'}")
    raise typer.Exit(exit_code(judged.verdict))
