"""`seatrial probe bridge`: does a Megatron-Bridge checkout convert, run, train and export models as transformers has them?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from seatrial import api

Engine = Literal["transformers", "vllm"]
Device = Literal["cpu", "cuda"]
LATE = "Give up after this many minutes, ladder and own tests together; building the environment is not counted."


def bridge(
    change: Annotated[
        list[str] | None,
        typer.Option("--change", "-c", metavar="[NAME=]PATH", help="The checkout under test, such as bridge=PATH. Default: as installed."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", metavar="FAMILY|DIR", help="A family (`list` names them) or a local HF directory; repeat for several."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every family: a table of families and rungs.")] = False,
    rungs: Annotated[
        str | None, typer.Option("--rungs", metavar="A,B,…", help="Only these rungs; `list` names them. Default: the whole ladder.")
    ] = None,
    fault: Annotated[str | None, typer.Option("--fault", help="Inject a seeded bug, to see it caught; `list` names them.")] = None,
    engine: Annotated[Engine, typer.Option("--engine", help="Who generates in the closed loop.")] = "transformers",
    engine_python: Annotated[Path | None, typer.Option("--engine-python", help="Interpreter with vLLM, for --engine vllm.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=8, help="Steps of the closed loop.")] = 20,
    python: Annotated[Path | None, typer.Option("--python", help="Your own interpreter with Megatron, such as one with CUDA.")] = None,
    device: Annotated[Device, typer.Option("--device", help="Where the models are; cuda needs --python.")] = "cpu",
    tests: Annotated[bool, typer.Option("--tests/--no-tests", help="Also run the Bridge's own unit tests that match the diff.")] = True,
    base: Annotated[
        str | None, typer.Option("--base", help="Revision before the change. Default: the merge base with the main branch.")
    ] = None,
    no_base: Annotated[bool, typer.Option("--no-base", help="Do not climb the ladder at the base when it fails.")] = False,
    card: Annotated[Path | None, typer.Option("--card", metavar="FILE", help="Write a model verification card (YAML) there.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where the evidence goes. Default: a new directory below trials/.")
    ] = None,
    minutes: Annotated[float, typer.Option("--deadline", metavar="MINUTES", min=0.1, help=LATE)] = 60,
    json: Annotated[bool, typer.Option("--json", help="Print probe.json instead of text.")] = False,
) -> None:
    """Climb the conformance ladder of Megatron-Bridge: import, export, logits, parallelism, checkpoint, LoRA, closed loop.

    The checkout under test itself runs, on a CPU with gloo or on one GPU, with tiny models that are made here.
    The exit code is the verdict's: 0 Pass, 1 Fail, 77 Skipped (a part is missing here), 99 Blocked, 2 usage.
    """
    from seatrial.core.verdict import ExitCode, Verdict, exit_code
    from seatrial.evidence.redact import Redactor
    from seatrial.probes.bridge_report import bridge_summary, bridge_table
    from seatrial.probes.bridge_run import NoCard
    from seatrial.probes.probe_process import ProbeInterrupted

    _lists(model, rungs, fault)
    no_card: NoCard | None = None
    try:
        found = api.probe_bridge(
            change=change or (),
            model=model or (),
            all=everything,
            rungs=rungs,
            fault=fault,
            engine=engine,
            engine_python=engine_python,
            steps=steps,
            python=python,
            device=device,
            tests=tests,
            base=base,
            no_base=no_base,
            card=card,
            out=out,
            deadline=minutes,
            command=("seatrial", *sys.argv[1:]),
            tell=lambda line: typer.echo(f"seatrial: {line}", err=json),
            tell_build=lambda line: None if json else typer.echo(f"seatrial: {line}", err=True),
        )
        record, place = found.record, found.directory
    except ProbeInterrupted as cut:
        text = f"seatrial: interrupted, all processes are ended; there is no verdict. What was found so far: {cut.directory}"
        typer.echo(text, err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except NoCard as error:
        no_card, record, place = error, error.record, error.directory
    judged = record.judged
    if json:
        typer.echo(record.model_dump_json(indent=2))
    else:
        assert place is not None
        text = Redactor(os.environ).text(bridge_summary(record, place))
        typer.echo(f"\n{bridge_table(judged.families, record.asked.rungs)}\n\n{text}" if judged.families else f"\n{text}", nl=False)
        typer.echo(f"\nprobe: {place / 'probe.json'}")
    if no_card is not None:
        if judged.verdict is Verdict.PASS:  # a verdict that is no Pass matters more, and keeps its exit code
            raise no_card
        typer.echo(f"seatrial: there is no card: {no_card.message}", err=True)
    elif card is not None:
        typer.echo(f"seatrial: a draft of a verification card, for a person to complete: {card}", err=True)
    raise typer.Exit(exit_code(judged.verdict))


def _lists(model: list[str] | None, rungs: str | None, fault: str | None) -> None:
    """`list` for any of the three prints what there is."""
    from seatrial.probes.bridge_run import FAMILIES, FAULTS, TABLE

    lines: list[str] = []
    if model and "list" in model:
        lines = [
            f"{name:16} {family.architecture}" + (f"  [cannot run here: {family.needs}]" if family.needs else "")
            for name, family in FAMILIES.items()
        ]
    elif rungs == "list":
        lines = [f"{name:12} {rung.title}" for name, rung in TABLE.items()]
    elif fault == "list":
        lines = [f"{name:26} {found.text} [{found.model}: {', '.join(found.rungs)}]" for name, found in FAULTS.items()]
    if lines:
        typer.echo("\n".join(lines))
        raise typer.Exit
