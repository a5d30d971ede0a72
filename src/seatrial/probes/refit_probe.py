"""`probe_refit` from its options to a verdict that is stored: one of three sources, the interpreter, the run, probe.json and summary.md."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Literal

import seatrial
from seatrial import loops
from seatrial.checks.probe_facts import Facts, read_all
from seatrial.checks.probe_refit import TRANSPORTS, JudgedRefitProbe, RefitProbe, RefitRequest, judge_refit_probe
from seatrial.core.config import RunSection
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import write_json, write_text
from seatrial.core.verdict import Boundary
from seatrial.evidence.redact import Redactor
from seatrial.loops import get_loop
from seatrial.probes.probe_process import FACTS, Tell
from seatrial.probes.refit_run import RefitSetup, ask_server, faults, judge_attached, probe_refit, refit_summary, require_model
from seatrial.runtime.interrupt import Interrupted, Interruptible
from seatrial.trial import run_dir
from seatrial.trial.staging import engine_interpreters, find_interpreter

Engine = Literal["vllm", "transformers"]
Transport = Literal["full", "packed", "sparse", "all"]
DEFAULT = "tiny-llama"
STEPS = 4
MINUTES = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitOptions:
    """What `seatrial probe refit` was asked for; None is unsaid."""

    model: str | None = None
    engine: Engine | None = None
    steps: int | None = None
    transport: Transport | None = None
    python: Path | None = None
    fault: str | None = None
    attach: str | None = None
    weights: Path | None = None
    facts: Path | None = None
    out: Path | None = None
    minutes: float = MINUTES
    server: Sequence[str] = ()
    command: Sequence[str] = ()
    """How Seatrial was called, for the record."""

    @property
    def engine_used(self) -> Engine:
        """The engine that was named, or the default one."""
        return self.engine or "transformers"


class ProbeInterrupted(KeyboardInterrupt):
    """A probe was stopped: all its processes are ended, and there is no verdict."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"interrupted; what was found so far: {directory}")
        self.directory = directory


def _silent(_: str) -> None:
    """Nobody listens."""


def run_refit_probe(options: RefitOptions, tell: Tell = _silent, tell_build: Tell = _silent) -> tuple[RefitProbe, Path | None]:
    """The probe, and the directory that holds its evidence; None where facts were judged and no place was named."""
    require_one_source(options)
    if options.facts is not None:
        return _judge(options, options.facts)
    if options.attach is not None and options.weights is not None:
        return _attach(options, options.attach, options.weights)
    if options.fault is not None:
        require_fault(options.fault, options.engine_used)
    if options.server and options.engine_used != "vllm":
        raise UserError(f"{options.server[0]}: options for a server have no meaning without one", "add --engine vllm, or leave them out")
    return _drive(options, tell, tell_build)


def require_one_source(options: RefitOptions) -> None:
    """A run of ours, a server that runs already, or facts: one of the three, with its own options only."""
    driven = {
        "--model": options.model,
        "--engine": options.engine,
        "--steps": options.steps,
        "--python": options.python,
        "--fault": options.fault,
        "SERVER OPTIONS": options.server or None,
    }
    attach, weights, facts = options.attach, options.weights, options.facts
    given = [name for name, value in driven.items() if value is not None]
    if attach is not None and facts is not None:
        raise UserError("--attach and --facts are both given", "look at a server or at facts: leave one of them out")
    if attach is not None and (given or options.transport is not None):
        raise UserError(
            f"--attach looks at a server that runs already: {(given or ['--transport'])[0]} has no meaning there", "leave one out"
        )
    if facts is not None and given:
        raise UserError(f"--facts judges what another run left: {given[0]} has no meaning there", "leave one out")
    if (attach is None) != (weights is None):
        missing, there = ("--weights DIR", "--attach") if attach is not None else ("--attach URL", "--weights")
        raise UserError(f"{there} is given without {missing.split()[0]}", f"add {missing}")


def require_fault(fault: str, engine: Engine) -> None:
    """A fault that the engine's driver does not know is an error."""
    known = faults(engine)
    if fault not in known:
        close = difflib.get_close_matches(fault, known, n=1)
        fix = f"use {close[0]}" if close else f"seatrial probe refit --engine {engine} --fault list"
        raise UserError(f"unknown fault {fault!r} of the engine {engine}; known: {', '.join(known)}", fix)


def _interpreter(engine: Engine, own: Path | None, tell: Callable[[str], None]) -> Path:
    """The interpreter that the engine runs in; the opt-in environment of vLLM is never built by the way."""
    if own is not None or engine == "transformers":  # the default loop's environment has torch and transformers
        return find_interpreter(get_loop(RunSection().loop), own, tell).python
    name = loops.VLLM_CPU
    python = engine_interpreters().get(name)
    if python is None:
        fix = f"seatrial env build {name}, or name your own interpreter with --python"
        raise BlockedError(Boundary.ENVIRONMENT, f"the environment {name} is not built", fix)
    return python


def _place(out: Path | None) -> Path:
    return run_dir.named_directory(out) if out is not None else run_dir.new_directory(Path("trials"), "probe-refit")


def _drive(options: RefitOptions, tell: Tell, tell_build: Tell) -> tuple[RefitProbe, Path]:
    """Run policy and generator, and judge."""
    model, steps, transport = options.model or DEFAULT, options.steps or STEPS, options.transport or "all"
    transports = TRANSPORTS if transport == "all" else (transport,)
    if steps < len(transports):
        raise UserError(
            f"--steps {steps}: each of {len(transports)} transports needs a step", f"--steps {len(transports)}, or --transport full"
        )
    require_model(model)
    wanted = RefitRequest(source="driver", engine=options.engine_used, model=model, steps=steps, transports=transports, fault=options.fault)
    began, seconds = time.monotonic(), 60 * options.minutes
    with Interruptible():
        interpreter = _interpreter(options.engine_used, options.python, tell_build)
        setup = RefitSetup(wanted=wanted, python=interpreter, out=_place(options.out), deadline_s=seconds, server=tuple(options.server))
        try:
            judged = probe_refit(setup, tell)
        except Interrupted:
            raise ProbeInterrupted(setup.out) from None
    return _store(options, wanted, judged, setup.out, interpreter, time.monotonic() - began), setup.out


def _attach(options: RefitOptions, url: str, weights: Path) -> tuple[RefitProbe, Path]:
    """Hold a server's live weights against a checkpoint, once."""
    wanted = RefitRequest(source="attach", engine=url, model=str(weights))
    facts = ask_server(url, weights, 60 * options.minutes)
    place = _place(options.out)
    _keep(facts, place)
    return _store(options, wanted, judge_attached(facts, wanted), place), place


def _judge(options: RefitOptions, source: Path) -> tuple[RefitProbe, Path | None]:
    """Judge facts that lie there already; nothing is written unless a place is named."""
    transports = () if options.transport is None else TRANSPORTS if options.transport == "all" else (options.transport,)
    wanted = RefitRequest(source="facts", model=str(source), transports=transports)
    facts = read_all(source)
    place = _place(options.out) if options.out is not None else None
    if place is not None:
        _keep(facts, place)
    return _store(options, wanted, judge_refit_probe(facts, wanted), place), place


def _keep(facts: Facts, place: Path) -> None:
    """Facts that were read elsewhere, beside the verdict on them; damage is in probe.json."""
    write_text(place / FACTS, "".join(dumps(row, ensure_ascii=False) + "\n" for row in facts.rows))


def _store(
    options: RefitOptions,
    wanted: RefitRequest,
    judged: JudgedRefitProbe,
    place: Path | None,
    python: Path | None = None,
    seconds: float = 0,
) -> RefitProbe:
    """The probe as a record, with probe.json and summary.md where it has a place."""
    made = RefitProbe(
        seatrial=seatrial.__version__,
        created=run_dir.now(),
        command=tuple(Redactor(os.environ).value(list(options.command))),
        wanted=wanted,
        python=str(python) if python else None,
        seconds=round(seconds, 2),
        judged=judged,
    )
    if place is not None:
        # The verdict last: where it lies, everything else does, too.
        write_text(place / "summary.md", refit_summary(made, place))
        write_json(place / "probe.json", made)
    return made
