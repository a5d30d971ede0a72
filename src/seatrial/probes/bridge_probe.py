"""`probe_bridge` from its options to a verdict that is stored: models and rungs, the checkouts, the interpreter, the run, probe.json."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import seatrial
from seatrial import loops
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import write_json, write_text
from seatrial.core.records import RepoState
from seatrial.core.verdict import Boundary
from seatrial.evidence.redact import Redactor
from seatrial.evidence.repos import write_repos
from seatrial.probes.bridge_report import bridge_summary, card_text, require_card
from seatrial.probes.bridge_run import (
    FAMILIES,
    FAULTS,
    TABLE,
    BridgeSetup,
    beside_base,
    probe_bridge,
    require_models,
    require_rungs,
    run_own_tests,
    unless_edited,
)
from seatrial.probes.bridge_verdict import BridgeProbe, BridgeRequest
from seatrial.probes.probe_process import Tell
from seatrial.probes.refit_probe import ProbeInterrupted
from seatrial.runtime.environments import Environments
from seatrial.runtime.interrupt import Interrupted, Interruptible
from seatrial.trial import run_dir
from seatrial.trial.staging import engine_interpreters
from seatrial.trial.trial_request import checkouts

DEFAULT = "qwen2"
EVIDENCE = "evidence"
STEPS = 20
MINUTES = 60.0
PROVIDED = ("megatron.bridge", "megatron.core", "transformers")


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeOptions:
    """What `seatrial probe bridge` was asked for; None is unsaid."""

    change: Sequence[str] = ()
    model: Sequence[str] = ()
    everything: bool = False
    rungs: str | None = None
    fault: str | None = None
    engine: Literal["transformers", "vllm"] = "transformers"
    engine_python: Path | None = None
    steps: int = STEPS
    python: Path | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    tests: bool = True
    base: str | None = None
    run_base: bool = True
    card: Path | None = None
    out: Path | None = None
    minutes: float = MINUTES
    command: Sequence[str] = ()
    """How Seatrial was called, for the record."""


def run_bridge_probe(options: BridgeOptions, tell: Tell, tell_build: Tell) -> tuple[BridgeProbe, Path]:
    """The probe, and the directory that holds its evidence."""
    asked = bridge_request(options)
    changes = _changes(options.change, options.base)
    if options.card is not None:
        require_card(asked, changes, options.card)
    began = time.monotonic()
    with Interruptible():
        python = _interpreter(options.python, tell_build)
        ends = time.monotonic() + 60 * options.minutes
        settings = {"steps": options.steps, **_engine(asked, options.engine_python)}
        place = run_dir.named_directory(options.out) if options.out else run_dir.new_directory(Path("trials"), "probe-bridge")
        recorded = write_repos(changes, place / EVIDENCE, Redactor(os.environ)) if changes else ()
        setup = BridgeSetup(asked=asked, python=python, out=place, deadline_s=60 * options.minutes, changes=recorded, options=settings)
        try:
            judged = probe_bridge(setup, tell)
            if options.run_base and asked.fault is None:
                judged = beside_base(setup, judged, ends - time.monotonic(), tell)
            if options.tests and asked.fault is None:
                judged = run_own_tests(setup, judged, ends - time.monotonic(), tell)
            judged = unless_edited(judged, setup.changes, place / EVIDENCE)
        except Interrupted:
            raise ProbeInterrupted(place) from None
    redactor = Redactor(os.environ)
    made = BridgeProbe(
        seatrial=seatrial.__version__,
        created=run_dir.now(),
        command=tuple(redactor.value(list(options.command))),
        asked=asked,
        changes=setup.changes,
        python=str(python),
        seconds=round(time.monotonic() - began, 2),
        judged=judged,
    )
    # The verdict last: where it lies, the evidence does, too. Only the card comes after it, which can still prove impossible.
    write_text(place / "summary.md", redactor.text(bridge_summary(made, place)))
    write_json(place / "probe.json", made)
    if options.card is not None:
        write_text(options.card, card_text(made))
    return made, place


def bridge_request(options: BridgeOptions) -> BridgeRequest:
    """Models and rungs, where all of them are known."""
    fault = options.fault
    if options.everything and options.model:
        raise UserError("--all and --model are both given", "leave one out")
    default = (FAULTS[fault].model if fault in FAULTS else DEFAULT,)
    models = tuple(FAMILIES) if options.everything else tuple(options.model) or default
    require_models(models)
    if fault is not None and fault not in FAULTS:
        close = difflib.get_close_matches(fault, FAULTS, n=1)
        raise UserError(f"unknown fault {fault!r}", f"use {close[0]}" if close else "seatrial probe bridge --fault list")
    text = options.rungs or (",".join(FAULTS[fault].rungs) if fault else None)
    rungs = require_rungs(text) if text else tuple(TABLE)
    if options.device == "cuda" and options.python is None:
        raise UserError("--device cuda needs an interpreter with CUDA and Megatron", "name it with --python")
    return BridgeRequest(
        models=models,
        rungs=rungs,
        models_named=not options.everything,
        rungs_named=options.rungs is not None,
        device=options.device,
        engine=options.engine,
        fault=fault,
    )


def _changes(words: Sequence[str], base: str | None) -> tuple[RepoState, ...]:
    """The checkouts under test, with what each differs in from its base."""
    states, _ = checkouts(words, base)
    for state in states:
        if not set(PROVIDED) & set(state.packages):
            raise UserError(
                f"{state.path}: provides {', '.join(state.packages) or 'no package'}, and the ladder runs none of that",
                "name a checkout of Megatron-Bridge, Megatron-LM or transformers",
            )
    return states


def _interpreter(own: Path | None, tell: Tell) -> Path:
    """The interpreter with Megatron; ours is built when it is absent."""
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
    if asked.engine != "vllm" or "loop" not in asked.rungs:
        return {}
    python = own or engine_interpreters().get(loops.VLLM_CPU)
    if python is None:
        fix = f"seatrial env build {loops.VLLM_CPU}, or name your own interpreter with --engine-python"
        raise BlockedError(Boundary.ENVIRONMENT, f"the environment {loops.VLLM_CPU} is not built", fix)
    return {"engine_python": str(python.absolute())}
