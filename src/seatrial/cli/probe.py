"""`seatrial probe`: one instrument alone, without a trial. `probe refit` shows bit for bit that a generator has its policy's weights;
`probe bridge` has a file of its own."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from seatrial.cli import probe_bridge

if TYPE_CHECKING:
    from seatrial.checks.probe_facts import Facts
    from seatrial.checks.probe_refit import JudgedRefitProbe, RefitRequest

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True, help="Run one instrument alone, without a trial.")

Engine = Literal["vllm", "transformers"]
Transport = Literal["full", "packed", "sparse", "all"]
LOOP = "trl"
"""The embedded loop, whose environment has torch and transformers."""
DEFAULT = "tiny-llama"
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
    driven = {
        "--model": model,
        "--engine": engine,
        "--steps": steps,
        "--python": python,
        "--fault": fault,
        "SERVER OPTIONS": server or None,
    }
    _require_one_source(attach, weights, facts, driven, transport)
    if facts is not None:
        _judge(facts, transport, out, json)
    if attach is not None and weights is not None:
        _attach(attach, weights, out, minutes, json)
    chosen: Engine = engine or "transformers"
    if fault is not None:
        _require_fault(fault, chosen)
    if server and chosen != "vllm":
        from seatrial.core.errors import UserError

        raise UserError(f"{server[0]}: options for a server have no meaning without one", "add --engine vllm, or leave them out")
    _drive(model or DEFAULT, chosen, steps or STEPS, transport or "all", python, fault, out, minutes, json, tuple(server or ()))


def _require_one_source(
    attach: str | None, weights: Path | None, facts: Path | None, driven: Mapping[str, object], transport: object
) -> None:
    """A run of ours, a server that runs already, or facts: one of the three, with its own options only."""
    from seatrial.core.errors import UserError

    given = [name for name, value in driven.items() if value is not None]
    if attach is not None and facts is not None:
        raise UserError("--attach and --facts are both given", "look at a server or at facts: leave one of them out")
    if attach is not None and (given or transport is not None):
        raise UserError(
            f"--attach looks at a server that runs already: {(given or ['--transport'])[0]} has no meaning there", "leave one out"
        )
    if facts is not None and given:
        raise UserError(f"--facts judges what another run left: {given[0]} has no meaning there", "leave one out")
    if (attach is None) != (weights is None):
        missing, there = ("--weights DIR", "--attach") if attach is not None else ("--attach URL", "--weights")
        raise UserError(f"{there} is given without {missing.split()[0]}", f"add {missing}")


def _require_fault(fault: str, engine: Engine) -> None:
    """A fault that the engine's driver does not know is an error; `list` prints the known ones."""
    from seatrial.core.errors import UserError
    from seatrial.probes.refit_run import faults

    known = faults(engine)
    if fault == "list":
        typer.echo("\n".join(f"{name:20} {text}" for name, text in known.items()))
        raise typer.Exit
    if fault not in known:
        close = difflib.get_close_matches(fault, known, n=1)
        fix = f"use {close[0]}" if close else f"seatrial probe refit --engine {engine} --fault list"
        raise UserError(f"unknown fault {fault!r} of the engine {engine}; known: {', '.join(known)}", fix)


def _interpreter(engine: Engine, own: Path | None, tell_build: bool) -> Path:
    """The interpreter that the engine runs in; the opt-in environment of vLLM is never built by the way."""
    from seatrial import loops
    from seatrial.core.errors import BlockedError
    from seatrial.core.verdict import Boundary
    from seatrial.loops import get_loop
    from seatrial.trial.staging import engine_interpreters, find_interpreter

    def tell(line: str) -> None:
        if tell_build:
            typer.echo(f"seatrial: {line}", err=True)

    if own is not None or engine == "transformers":
        return find_interpreter(get_loop(LOOP), own, tell).python
    name = loops.VLLM_CPU
    python = engine_interpreters().get(name)
    if python is None:
        fix = f"seatrial env build {name}, or name your own interpreter with --python"
        raise BlockedError(Boundary.ENVIRONMENT, f"the environment {name} is not built", fix)
    return python


def _place(out: Path | None) -> Path:
    from seatrial.trial import run_dir

    return run_dir.named_directory(out) if out is not None else run_dir.new_directory(Path("trials"), "probe-refit")


def _drive(
    model: str,
    engine: Engine,
    steps: int,
    transport: Transport,
    python: Path | None,
    fault: str | None,
    out: Path | None,
    minutes: float,
    json: bool,
    server: tuple[str, ...],
) -> NoReturn:
    """Run policy and generator, judge, and say it."""
    import time

    from seatrial.checks.probe_refit import TRANSPORTS, RefitRequest
    from seatrial.core.errors import UserError
    from seatrial.core.verdict import ExitCode
    from seatrial.probes.refit_run import RefitSetup, probe_refit, require_model
    from seatrial.runtime.interrupt import Interrupted, Interruptible

    transports = TRANSPORTS if transport == "all" else (transport,)
    if steps < len(transports):
        raise UserError(
            f"--steps {steps}: each of {len(transports)} transports needs a step", f"--steps {len(transports)}, or --transport full"
        )
    require_model(model)
    wanted = RefitRequest(source="driver", engine=engine, model=model, steps=steps, transports=transports, fault=fault)
    began = time.monotonic()
    with Interruptible():
        interpreter = _interpreter(engine, python, not json)
        setup = RefitSetup(wanted=wanted, python=interpreter, out=_place(out), deadline_s=60 * minutes, server=server)
        try:
            judged = probe_refit(setup, lambda line: typer.echo(f"seatrial: {line}", err=json))
        except Interrupted:
            typer.echo(f"seatrial: interrupted, all processes are ended; there is no verdict. What was found so far: {setup.out}", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    _close(wanted, judged, setup.out, json, interpreter, time.monotonic() - began)


def _attach(url: str, weights: Path, out: Path | None, minutes: float, json: bool) -> NoReturn:
    """Hold a server's live weights against a checkpoint, once."""
    from seatrial.checks.probe_refit import RefitRequest
    from seatrial.probes.refit_run import ask_server, judge_attached

    wanted = RefitRequest(source="attach", engine=url, model=str(weights))
    facts = ask_server(url, weights, 60 * minutes)
    place = _place(out)
    _keep(facts, place)
    _close(wanted, judge_attached(facts, wanted), place, json)


def _judge(source: Path, transport: Transport | None, out: Path | None, json: bool) -> NoReturn:
    """Judge facts that lie there already; nothing is written unless a place is named."""
    from seatrial.checks.probe_facts import read_all
    from seatrial.checks.probe_refit import TRANSPORTS, RefitRequest, judge_refit_probe

    transports = () if transport is None else TRANSPORTS if transport == "all" else (transport,)
    wanted = RefitRequest(source="facts", model=str(source), transports=transports)
    facts = read_all(source)
    place = _place(out) if out is not None else None
    if place is not None:
        _keep(facts, place)
    _close(wanted, judge_refit_probe(facts, wanted), place, json)


def _keep(facts: Facts, place: Path) -> None:
    """Facts that were read elsewhere, beside the verdict on them; damage is in probe.json."""
    from seatrial.core.files import write_text
    from seatrial.probes.probe_process import FACTS

    write_text(place / FACTS, "".join(dumps(row, ensure_ascii=False) + "\n" for row in facts.rows))


def _close(
    wanted: RefitRequest, judged: JudgedRefitProbe, place: Path | None, json: bool, python: Path | None = None, seconds: float = 0
) -> NoReturn:
    """Write probe.json and summary.md, print the end of it, and exit with the verdict."""
    from seatrial import __version__
    from seatrial.checks.probe_refit import RefitProbe
    from seatrial.core.files import write_json, write_text
    from seatrial.core.verdict import exit_code
    from seatrial.evidence.redact import Redactor
    from seatrial.probes.refit_run import refit_summary, refit_table
    from seatrial.trial.run_dir import now

    command = tuple(Redactor(os.environ).value(["seatrial", *sys.argv[1:]]))
    shown = str(python) if python else None
    made = RefitProbe(
        seatrial=__version__, created=now(), command=command, wanted=wanted, python=shown, seconds=round(seconds, 2), judged=judged
    )
    text = refit_summary(made, place)
    if place is not None:
        # The verdict last: where it lies, everything else does, too.
        write_text(place / "summary.md", text)
        write_json(place / "probe.json", made)
    if json:
        typer.echo(made.model_dump_json(indent=2))
    else:
        typer.echo(f"\n{refit_table(judged.refits)}\n\n{text}" if judged.refits else f"\n{text}", nl=False)
        if place is not None:
            typer.echo(f"\nprobe: {place / 'probe.json'}")
    raise typer.Exit(exit_code(judged.verdict))
