"""`seatrial probe bridge`: does a Megatron-Bridge checkout convert, run, train and export models as transformers has them?"""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from seatrial.core.records import RepoState
    from seatrial.probes.bridge_run import BridgeSetup
    from seatrial.probes.bridge_verdict import BridgeProbe, BridgeRequest, JudgedBridgeProbe

Engine = Literal["transformers", "vllm"]
Device = Literal["cpu", "cuda"]
DEFAULT = "qwen2"
EVIDENCE = "evidence"
LATE = "Give up after this many minutes, ladder and own tests together; building the environment is not counted."


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeOptions:
    """How the command is to run, and what it is to leave."""

    python: Path | None
    engine_python: Path | None
    steps: int
    base: bool
    tests: bool
    card: Path | None
    out: Path | None
    minutes: float
    json: bool


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
    from seatrial.probes.bridge_run import require_models, require_rungs
    from seatrial.probes.bridge_verdict import BridgeRequest

    _lists(model, rungs, fault)
    models = _models(model, everything, fault)
    require_models(models)
    chosen = _rungs(rungs, fault) if fault else require_rungs(rungs) if rungs else _all_rungs()
    if device == "cuda" and python is None:
        from seatrial.core.errors import UserError

        raise UserError("--device cuda needs an interpreter with CUDA and Megatron", "name it with --python")
    asked = BridgeRequest(
        models=models,
        rungs=chosen,
        models_named=not everything,
        rungs_named=rungs is not None,
        device=device,
        engine=engine,
        fault=fault,
    )
    changes = _changes(change or [], base)
    if card is not None:
        from seatrial.probes.bridge_report import require_card

        require_card(asked, changes, card)
    wanted = BridgeOptions(
        python=python,
        engine_python=engine_python,
        steps=steps,
        base=not no_base,
        tests=tests,
        card=card,
        out=out,
        minutes=minutes,
        json=json,
    )
    _run(asked, changes, wanted)


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


def _models(model: list[str] | None, everything: bool, fault: str | None) -> tuple[str, ...]:
    from seatrial.core.errors import UserError
    from seatrial.probes.bridge_run import FAMILIES, FAULTS

    if everything and model:
        raise UserError("--all and --model are both given", "leave one out")
    if everything:
        return tuple(FAMILIES)
    if model:
        return tuple(model)
    return (FAULTS[fault].model if fault in FAULTS else DEFAULT,)


def _all_rungs() -> tuple[str, ...]:
    from seatrial.probes.bridge_run import TABLE

    return tuple(TABLE)


def _rungs(rungs: str | None, fault: str) -> tuple[str, ...]:
    """With a fault: the rungs that are to catch it, unless others are named."""
    from seatrial.core.errors import UserError
    from seatrial.probes.bridge_run import FAULTS, require_rungs

    if fault not in FAULTS:
        close = difflib.get_close_matches(fault, FAULTS, n=1)
        raise UserError(f"unknown fault {fault!r}", f"use {close[0]}" if close else "seatrial probe bridge --fault list")
    return require_rungs(rungs or ",".join(FAULTS[fault].rungs))


def _changes(words: list[str], base: str | None) -> tuple[RepoState, ...]:
    """The checkouts under test, with what each differs in from its base."""
    from seatrial.core.errors import UserError
    from seatrial.trial.trial_request import checkouts

    states, _ = checkouts(words, base)
    wanted = ("megatron.bridge", "megatron.core", "transformers")
    for state in states:
        if not set(wanted) & set(state.packages):
            raise UserError(
                f"{state.path}: provides {', '.join(state.packages) or 'no package'}, and the ladder runs none of that",
                "name a checkout of Megatron-Bridge, Megatron-LM or transformers",
            )
    return states


def _interpreter(own: Path | None, tell_build: bool) -> Path:
    """The interpreter with Megatron; ours is built when it is absent."""
    from seatrial import loops
    from seatrial.core.errors import BlockedError
    from seatrial.core.verdict import Boundary
    from seatrial.evidence.redact import Redactor
    from seatrial.runtime.environments import Environments

    def tell(line: str) -> None:
        if tell_build:
            typer.echo(f"seatrial: {line}", err=True)

    if own is not None:
        if not own.is_file():
            raise BlockedError(Boundary.ENVIRONMENT, f"{own}: no such interpreter", "name a Python that has Megatron with --python")
        return own.absolute()
    cache, name = Environments(), loops.MEGATRON_CPU
    lock = loops.engine_environments()[name]
    found = cache.find(name, lock)
    if found is None:
        tell(f"building the environment {name}, once: this takes minutes")
        found = cache.build(name, lock, tell, line_filter=Redactor(os.environ).lines().line)
    return found.python


def _engine(asked: BridgeRequest, own: Path | None) -> dict[str, object]:
    """What the closed loop is told about its engine."""
    from seatrial import loops
    from seatrial.core.errors import BlockedError
    from seatrial.core.verdict import Boundary
    from seatrial.trial.staging import engine_interpreters

    if asked.engine != "vllm" or "loop" not in asked.rungs:
        return {}
    python = own or engine_interpreters().get(loops.VLLM_CPU)
    if python is None:
        fix = f"seatrial env build {loops.VLLM_CPU}, or name your own interpreter with --engine-python"
        raise BlockedError(Boundary.ENVIRONMENT, f"the environment {loops.VLLM_CPU} is not built", fix)
    return {"engine_python": str(python.absolute())}


def _run(asked: BridgeRequest, changes: tuple[RepoState, ...], wanted: BridgeOptions) -> NoReturn:
    """Run ladder and tests, judge, and say it."""
    import time

    from seatrial.core.verdict import ExitCode
    from seatrial.evidence.redact import Redactor
    from seatrial.evidence.repos import write_repos
    from seatrial.probes.bridge_run import BridgeSetup, beside_base, probe_bridge, run_own_tests, unless_edited
    from seatrial.runtime.interrupt import Interrupted, Interruptible
    from seatrial.trial import run_dir

    began = time.monotonic()

    def tell(line: str) -> None:
        typer.echo(f"seatrial: {line}", err=wanted.json)

    with Interruptible():
        interpreter = _interpreter(wanted.python, not wanted.json)
        ends = time.monotonic() + 60 * wanted.minutes
        options = {"steps": wanted.steps, **_engine(asked, wanted.engine_python)}
        place = run_dir.named_directory(wanted.out) if wanted.out is not None else run_dir.new_directory(Path("trials"), "probe-bridge")
        recorded = write_repos(changes, place / EVIDENCE, Redactor(os.environ)) if changes else ()
        setup = BridgeSetup(asked=asked, python=interpreter, out=place, deadline_s=60 * wanted.minutes, changes=recorded, options=options)
        try:
            judged = probe_bridge(setup, tell)
            if wanted.base and asked.fault is None:
                judged = beside_base(setup, judged, ends - time.monotonic(), tell)
            if wanted.tests and asked.fault is None:
                judged = run_own_tests(setup, judged, ends - time.monotonic(), tell)
            judged = unless_edited(judged, setup.changes, place / EVIDENCE)
        except Interrupted:
            typer.echo(f"seatrial: interrupted, all processes are ended; there is no verdict. What was found so far: {place}", err=True)
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    _close(setup, judged, wanted, time.monotonic() - began)


def _close(setup: BridgeSetup, judged: JudgedBridgeProbe, wanted: BridgeOptions, seconds: float) -> NoReturn:
    """Write summary.md, probe.json and the card, print the end of it, and exit with the verdict."""
    from seatrial import __version__
    from seatrial.core.files import write_json, write_text
    from seatrial.core.verdict import exit_code
    from seatrial.evidence.redact import Redactor
    from seatrial.probes.bridge_report import bridge_summary, bridge_table
    from seatrial.probes.bridge_verdict import BridgeProbe
    from seatrial.trial.run_dir import now

    redactor = Redactor(os.environ)
    made = BridgeProbe(
        seatrial=__version__,
        created=now(),
        command=tuple(redactor.value(["seatrial", *sys.argv[1:]])),
        asked=setup.asked,
        changes=setup.changes,
        python=str(setup.python),
        seconds=round(seconds, 2),
        judged=judged,
    )
    text = redactor.text(bridge_summary(made, setup.out))
    # The verdict last: where it lies, the evidence does, too. Only the card comes after it, which can still prove impossible.
    write_text(setup.out / "summary.md", text)
    write_json(setup.out / "probe.json", made)
    if wanted.json:
        typer.echo(made.model_dump_json(indent=2))
    else:
        typer.echo(f"\n{bridge_table(judged.families, setup.asked.rungs)}\n\n{text}" if judged.families else f"\n{text}", nl=False)
        typer.echo(f"\nprobe: {setup.out / 'probe.json'}")
    if wanted.card is not None:
        _card(made, wanted.card)
    raise typer.Exit(exit_code(judged.verdict))


def _card(probe: BridgeProbe, place: Path) -> None:
    """Write the card. Where there can be none, a verdict that is no Pass matters more, and keeps its exit code."""
    from seatrial.core.errors import UserError
    from seatrial.core.files import write_text
    from seatrial.core.verdict import Verdict
    from seatrial.probes.bridge_report import card_text

    try:
        write_text(place, card_text(probe))
    except UserError as error:
        if probe.judged.verdict is Verdict.PASS:
            raise
        typer.echo(f"seatrial: there is no card: {error.message}", err=True)
        return
    typer.echo(f"seatrial: a draft of a verification card, for a person to complete: {place}", err=True)
