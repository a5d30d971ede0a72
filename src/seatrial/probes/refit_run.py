"""`seatrial probe refit`: runs a driver in an engine's interpreter, asks a running server, or reads facts; judges, and stores the verdict.

A vLLM server that runs already with our worker extension is compared once: its live weights against the safetensors of a directory, which
the server reads itself, under the same path. It is paused meanwhile: learning the map loads other values through its loader and puts every
bit back. Without a policy, later refits, samples and base stay unproven.
"""

from __future__ import annotations

import difflib
import importlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Any, Literal

import seatrial
from seatrial.checks import refit_weights
from seatrial.checks.probe_facts import Facts, Row, proof, read_all
from seatrial.checks.refit_facts import Rows, typed
from seatrial.checks.refit_judge import (
    TRANSPORTS,
    JudgedRefitProbe,
    RefitLine,
    RefitProbe,
    RefitRequest,
    describe,
    judge_refit_probe,
    lines,
    whole,
)
from seatrial.core.config import RunSection
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import write_json, write_text
from seatrial.core.guarded import parse_json
from seatrial.core.records import CheckResult, replace
from seatrial.core.text import number, one_line
from seatrial.core.verdict import Boundary, Verdict
from seatrial.evidence.redact import Redactor
from seatrial.instruments.engines.tiny_models import KINDS
from seatrial.instruments.engines.vllm_server import ServerError, VllmClient
from seatrial.instruments.refit.refit_driver import NO_SUCH_FAULT
from seatrial.loops import get_loop
from seatrial.probes.bridge_verdict import BridgeProbe
from seatrial.probes.probe_process import FACTS, LOG, Driver, Follower, ProbeInterrupted, Tell, require_weights, trouble, vllm_python
from seatrial.report.build import schema_text
from seatrial.report.markdown import prose
from seatrial.runtime.interrupt import Interrupted, Interruptible, check_stop
from seatrial.trial import run_dir
from seatrial.trial.level import SERVER_LOG
from seatrial.trial.staging import find_interpreter, stage

Engine = Literal["vllm", "transformers"]
Transport = Literal["full", "packed", "sparse", "all"]
DEFAULT = "tiny-llama"
STEPS = 4
MINUTES = 30.0
DRIVERS = {"vllm": "seatrial.instruments.engines.vllm_loop", "transformers": "seatrial.instruments.engines.transformers_loop"}
MAKER = "seatrial.instruments.engines.tiny_models"
MODEL = "model"
_MAKE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitSetup:
    """Where and how a driver runs."""

    wanted: RefitRequest
    python: Path
    out: Path
    """An empty directory."""
    deadline_s: float
    server: tuple[str, ...] = ()
    """Options for the engine's server."""


def faults(engine: str) -> dict[str, str]:
    """The seeded faults of an engine's driver, each with what it does."""
    known: dict[str, str] = importlib.import_module(DRIVERS[engine]).FAULTS
    return known


def require_model(model: str) -> None:
    place = Path(model)
    if model in KINDS:
        return
    if not place.is_dir():
        raise UserError(f"--model {model}: no such directory", f"name a local model directory, or one of {', '.join(KINDS)}")
    if not (place / "config.json").is_file():
        raise UserError(f"{place}: config.json is missing", f"copy the model's config.json into {place}")
    require_weights(place, str(place))


def probe_refit(setup: RefitSetup, tell: Tell) -> JudgedRefitProbe:
    redactor = Redactor(os.environ)
    driver = Driver(out=setup.out, instruments=stage(setup.out), redactor=redactor)
    model = _model(setup, driver, tell)
    wanted = setup.wanted
    argv = [str(setup.python), "-m", DRIVERS[wanted.engine], "--model", str(model), "--out", str(setup.out), "--steps", str(wanted.steps)]
    argv += ["--transport", "all" if len(wanted.transports) > 1 else wanted.transports[0]]
    argv += ["--fault", wanted.fault] if wanted.fault else []
    argv += ["--", *setup.server] if setup.server else []
    tell(f"starting policy and generator ({wanted.engine}): {setup.out / LOG}")
    follower = Follower(setup.out / FACTS, "refit", _said, tell)
    outcome = driver.run(argv, LOG, setup.deadline_s, follower.tick)
    follower.look()
    facts = driver.facts(("probe_error",))
    redactor.file(setup.out / SERVER_LOG)
    check_stop()
    said = trouble(outcome, setup.out / LOG, setup.deadline_s)
    if wanted.fault and any(row.get("where") == NO_SUCH_FAULT for row in facts.of("probe_error")):
        raise UserError(
            f"--fault {wanted.fault}: {wanted.model} cannot have it: nothing was injected", "use another model: --model tiny-qwen2"
        )
    return judge_refit_probe(facts, wanted, said)


def _model(setup: RefitSetup, driver: Driver, tell: Tell) -> Path:
    """The directory of the model; a tiny one is made in the engine's own interpreter."""
    if setup.wanted.model not in KINDS:
        return Path(setup.wanted.model).absolute()
    place, log = setup.out / MODEL, "model.log"
    tell(f"making the model {setup.wanted.model}")
    argv = [str(setup.python), "-m", MAKER, setup.wanted.model, str(place)]
    outcome = driver.run(argv, log, _MAKE_S)
    check_stop()
    if said := trouble(outcome, setup.out / log, _MAKE_S):
        raise BlockedError(
            Boundary.ENVIRONMENT, f"the model {setup.wanted.model} was not made: {said}", f"check that {setup.python} has torch"
        )
    return place


def _said(line: bytes) -> str:
    try:
        row = parse_json(line)
        size = f"{row['bytes'] / 1e6:.2f} MB"
        state = f"refused: {row['refused']}" if row["refused"] else f"{len(row['wrong_names'])} of {row['names']} tensors wrong"
        return f"refit {row['index']} (step {row['step']}, {row['transport']}, {size}): {row['stale_names']} stale before, {state}"
    except (ValueError, KeyError, TypeError):
        return "a refit whose fact cannot be read"


EQUAL = "live weights against the files: bit-equal"


def ask_server(url: str, directory: Path, seconds: float) -> Facts:
    """Ask every rank of the server for map, comparison, coverage and version; an unreachable server is Blocked."""
    require_weights(directory, f"--weights {directory}")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--attach {url}: not a URL", "write it as http://host:port")
    reference = str(directory.absolute())
    client = VllmClient(url, timeout_s=seconds)
    try:
        client.versions()  # asked first: what cannot be looked at is not disturbed
        client.call("/pause?mode=abort&clear_cache=true", {})
        try:
            maps = client.rpc("seatrial_map", reference=reference)
            verified = client.rpc("seatrial_verify", reference=reference)
            covered, versions = client.rpc("seatrial_coverage"), client.versions()
        finally:
            client.call("/resume", {})
    except ServerError as error:
        raise BlockedError(Boundary.ENVIRONMENT, *_why(url, str(error))) from error
    answers = zip(maps, verified, covered, versions, strict=True)
    return Facts(tuple(row for rank, each in enumerate(answers) for row in _facts(str(rank), *each)))


def _why(url: str, said: str) -> tuple[str, str]:
    """What an error of the server means, and the fix."""
    extension = "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls seatrial.instruments.engines.vllm_extension.Extension"
    if "refused" in said or "Name or service" in said:
        return f"nothing listens at {url}", "name the address of a running vLLM server"
    if "seatrial_" in said and "has no attribute" in said:
        return f"the vLLM server at {url} runs without our worker extension", f"start it with {extension}"
    if any(f"status {code}" in said for code in (404, 405, 501)) or "not JSON" in said:
        return f"{url} is no vLLM server in development mode: {said.partition('<')[0][:200]}", f"start vLLM with {extension}"
    return said, f"see the server's log; it needs {extension}"


def _facts(rank: str, mapped: dict[str, Any], verified: dict[str, Any], covered: dict[str, Any], version: dict[str, Any]) -> list[Row]:
    """The answers of one rank as facts, with one comparison in the place of a refit."""
    held = {"replica": rank, "incarnation": version["incarnation"], "version": version["version"]}
    comparison = {"index": 0, "step": 0, "transport": "attached", "names": verified["names"], "bytes": 0}
    comparison |= {"produced": None, "consumed": None, "touched_names": 0}
    comparison |= {"wrong_names": list(verified["wrong"]), "stale_names": len(verified["wrong"])}
    comparison |= {"methods": verified["methods"], "refused": None, "wrong": verified["wrong"]}
    return [
        {"fact": "version", **held},
        {"fact": "map", "replica": rank, **mapped},
        {"fact": "refit", **held, **comparison},
        {"fact": "coverage", "never_changed": [], **covered, "replica": rank},
    ]


def judge_attached(facts: Facts, wanted: RefitRequest) -> JudgedRefitProbe:
    rows = typed(facts)
    wrong = refit_weights.wrong_tensors(rows)
    checks = [whole(rows), _equal(rows), refit_weights.methods(rows), *refit_weights.coverage_checks(rows), _version(rows)]
    missed = [check for check in checks if not check.passed]
    limits = (
        "one look at a server: nothing is said about the refits that led here or that follow",
        "the server read the files itself: on another host they may be others under the same path",
        *refit_weights.weaker(rows),
        *refit_weights.coverage_limitations(rows),
    )
    split = len(rows.refits) > 1 and any(row.unconsumed for row in rows.coverages)
    refused = refit_weights.refused_all(rows)
    made = JudgedRefitProbe(verdict=Verdict.PASS, reason="", checks=tuple(checks), wrong=wrong, refits=lines(rows), limitations=limits)
    if wrong:
        reason = f"the server does not hold the weights of {wanted.model}: {describe(wrong[0])}"
        return replace(made, verdict=Verdict.FAIL, reason=reason, boundary=Boundary.REFIT)
    if split or refused:
        # Counts of elements cannot tell a shard that another rank has from one that no rank has.
        reason = (
            f"the coordinate map could not be made for any name: {refused}"
            if refused
            else "the weights are sharded over ranks: that some rank takes each element is not shown"
        )
        return replace(made, verdict=Verdict.BLOCKED, reason=reason, boundary=Boundary.REFIT)
    if missed:
        reason = f"not proven: {missed[0].name} ({missed[0].value}): {missed[0].message}"
        return replace(made, verdict=Verdict.FAIL, reason=reason, boundary=missed[0].boundary)
    reason = f"{refit_weights.claim(rows)}: the server holds {wanted.model}"
    return replace(made, reason=reason)


def _equal(rows: Rows) -> CheckResult:
    bad = sum(bool(row.wrong_names) for row in rows.refits)
    names = sum(row.names for row in rows.refits)
    good = bool(rows.refits) and not bad and all(row.names for row in rows.refits)
    said = ", ".join(name for row in rows.refits for name in row.wrong_names[:3])
    return proof(EQUAL, good, f"{names} tensors, {bad} of {len(rows.refits)} ranks wrong", Boundary.REFIT, "all", said)


def _version(rows: Rows) -> CheckResult:
    held = sorted({row.version for row in rows.versions()})
    return proof("all ranks hold one version", len(held) == 1, f"version {', '.join(map(str, held)) or 'none'}", Boundary.REFIT)


SHOWN = 10


def refit_summary(probe: RefitProbe, out: Path | None) -> str:
    """The summary; recorded texts are no markup, and stay on one line each, so that none can imitate a heading."""
    judged, wanted = probe.judged, probe.wanted
    what = {
        "driver": f"policy -> {wanted.engine}, {wanted.steps} steps",
        "attach": f"a server that runs: {wanted.engine}",
        "facts": "facts of another run",
    }
    asked = [
        what[wanted.source],
        f"transports {', '.join(wanted.transports)}" if wanted.transports else "",
        f"fault {wanted.fault}" if wanted.fault else "",
    ]
    head = [
        f"Result: {judged.verdict} - {prose(judged.reason)}",
        f"Requested coverage: refit proof; {prose('; '.join(filter(None, asked)))}",
        f"Model: {prose(wanted.model or 'as in the facts')}",
    ]
    more = [f"and {len(judged.wrong) - SHOWN} more, in probe.json"] if len(judged.wrong) > SHOWN else []
    evidence = [f"Command: {' '.join(probe.command)}"]
    evidence += [f"Interpreter: {probe.python}"] if probe.python else []
    evidence += [f"Refits: {len(judged.refits)}, {sum(row.bytes for row in judged.refits)} bytes"] if wanted.source != "attach" else []
    evidence += [_spread(judged)] if judged.mismatch else []
    evidence += [f"Facts and logs: {out}"] if out else []
    sections = (
        ("Checks", (check_line(check) for check in judged.checks)),
        ("Wrong tensors", [*map(describe, judged.wrong[:SHOWN]), *more]),
        ("Evidence", evidence),
        ("Limitations", judged.limitations),
        ("Follow-ups", _follow_ups(judged, wanted.source)),
    )
    return "\n\n".join(["\n".join(head), *(section(title, bullets) for title, bullets in sections)]) + "\n"


def section(title: str, bullets: Iterable[str]) -> str:
    return "\n".join([f"{title}:", *([f"- {prose(bullet)}" for bullet in bullets] or ["- none"])])


def check_line(check: CheckResult) -> str:
    wanted = f" (wanted: {check.threshold})" if check.threshold else ""
    said = f": {check.message}" if check.message else ""
    return f"{check.name}: {'met' if check.passed else 'MISSED'} - {number(check.value)}{wanted}{said}"


def _spread(judged: JudgedRefitProbe) -> str:
    last = judged.mismatch[-1]
    figures = ", ".join(f"{key} {number(getattr(last, key))}" for key in ("p50", "p90", "p99", "max_sequence", "outlier_share"))
    return f"token_mult_prob_error after the last refit (weak, never a proof alone): {number(last.value)}; {figures}; {last.tokens} tokens"


def _follow_ups(judged: JudgedRefitProbe, source: str) -> list[str]:
    if judged.verdict is Verdict.FAIL and judged.wrong and source == "driver":
        return ["the same run with --transport full separates the transport from the loader: a tensor that is still wrong is the loader's"]
    if judged.verdict is Verdict.BLOCKED and judged.vacuous:
        return ["let the weights move and the transport be used (more --steps, --transport), then prove again"]
    return []


def refit_table(refits: Iterable[RefitLine]) -> str:
    head = ("refit", "step", "version", "replica", "transport", "MB", "changed", "stale before", "wrong after", "proven by")
    return columns([head, *(_cells(row) for row in refits)])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, each column as wide as its widest cell."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _cells(row: RefitLine) -> tuple[str, ...]:
    changed = f"{row.changed / row.elements:.2%}" if row.changed is not None and row.elements else "-"
    proven = ", ".join(f"{method} {count}" for method, count in row.methods.items() if count) or "-"
    after = f"refused: {row.refused}" if row.refused else f"{row.wrong} of {row.names}"
    transport = f"{row.transport} ({row.kind})" if row.kind else row.transport
    figures = (str(row.index), str(row.step), str(row.version), row.replica, transport, f"{row.bytes / 1e6:.2f}", changed)
    return tuple(one_line(cell) for cell in (*figures, str(row.stale), after, proven))


DIRECTORY = Path(__file__).parent / "schemas"


def schemas() -> dict[str, str]:
    """The text of every shipped schema, by file name."""
    return {
        "probe-refit.schema.json": schema_text("probe-refit", RefitProbe),
        "probe-bridge.schema.json": schema_text("probe-bridge", BridgeProbe),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitOptions:
    """The options of `seatrial probe refit`; None: not given."""

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
        return self.engine or "transformers"


def run_refit_probe(options: RefitOptions, tell: Tell, tell_build: Tell) -> tuple[RefitProbe, Path | None]:
    """The probe, and the directory that holds its evidence; None where facts were judged and no place was named."""
    require_one_source(options)
    if options.facts is not None:  # nothing is written unless a place is named
        transports = () if options.transport is None else _transports(options.transport)
        wanted = RefitRequest(source="facts", model=str(options.facts), transports=transports)
        facts = read_all(options.facts)
        return _store(options, wanted, judge_refit_probe(facts, wanted), _directory(options) if options.out else None, facts)
    if options.attach is not None and options.weights is not None:
        wanted = RefitRequest(source="attach", engine=options.attach, model=str(options.weights))
        facts = ask_server(options.attach, options.weights, 60 * options.minutes)
        return _store(options, wanted, judge_attached(facts, wanted), _directory(options), facts)
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
    known = faults(engine)
    if fault not in known:
        close = difflib.get_close_matches(fault, known, n=1)
        fix = f"use {close[0]}" if close else f"seatrial probe refit --engine {engine} --fault list"
        raise UserError(f"unknown fault {fault!r} of the engine {engine}; known: {', '.join(known)}", fix)


def _interpreter(engine: Engine, own: Path | None, tell: Tell) -> Path:
    """The interpreter that the engine runs in; the opt-in environment of vLLM is never built by the way."""
    if own is not None or engine == "transformers":  # the default loop's environment has torch and transformers
        return find_interpreter(get_loop(RunSection().loop), own, tell).python
    return vllm_python("--python")


def _directory(options: RefitOptions) -> Path:
    return run_dir.named_directory(options.out) if options.out is not None else run_dir.new_directory(Path("trials"), "probe-refit")


def _transports(transport: Transport) -> tuple[str, ...]:
    return TRANSPORTS if transport == "all" else (transport,)


def _drive(options: RefitOptions, tell: Tell, tell_build: Tell) -> tuple[RefitProbe, Path | None]:
    model, steps, transports = options.model or DEFAULT, options.steps or STEPS, _transports(options.transport or "all")
    if steps < len(transports):
        raise UserError(
            f"--steps {steps}: each of {len(transports)} transports needs a step", f"--steps {len(transports)}, or --transport full"
        )
    require_model(model)
    wanted = RefitRequest(source="driver", engine=options.engine_used, model=model, steps=steps, transports=transports, fault=options.fault)
    began, seconds = time.monotonic(), 60 * options.minutes
    with Interruptible():
        interpreter = _interpreter(options.engine_used, options.python, tell_build)
        setup = RefitSetup(wanted=wanted, python=interpreter, out=_directory(options), deadline_s=seconds, server=tuple(options.server))
        try:
            judged = probe_refit(setup, tell)
        except Interrupted:
            raise ProbeInterrupted(setup.out) from None
    return _store(options, wanted, judged, setup.out, python=interpreter, seconds=time.monotonic() - began)


def _store(
    options: RefitOptions,
    wanted: RefitRequest,
    judged: JudgedRefitProbe,
    place: Path | None,
    facts: Facts | None = None,
    python: Path | None = None,
    seconds: float = 0,
) -> tuple[RefitProbe, Path | None]:
    """The probe as a record; in its place, if it has one: facts that were read elsewhere, summary.md and probe.json."""
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
        if facts is not None:  # damage is in probe.json
            write_text(place / FACTS, "".join(dumps(row, ensure_ascii=False) + "\n" for row in facts.rows))
        # The verdict last: where it lies, everything else does, too.
        write_text(place / "summary.md", refit_summary(made, place))
        write_json(place / "probe.json", made)
    return made, place
