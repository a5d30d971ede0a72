"""Running a driver of the refit probe: one process of an engine's interpreter, followed to its end, judged by the facts it leaves.

The driver owns policy and generator, each a process of its own; `launch` ends all of them whatever happens. What the driver
prints is in run.log, redacted; what it found is in facts.jsonl, row by row, so that an interrupted probe still shows how far it came.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.files import read_text, write_text
from seatrial.launch.interrupt import check_stop
from seatrial.launch.process import Outcome, ProcessSpec, Tick, run
from seatrial.loops.facts import Facts, read_facts
from seatrial.loops.lines import lines
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.verdict import Boundary
from seatrial.probes.engines.export_faults import NO_SUCH_FAULT
from seatrial.probes.engines.tiny_models import KINDS
from seatrial.proving.checkpoint import require_weights
from seatrial.proving.judge import judge
from seatrial.proving.record import Judged, Wanted
from seatrial.trial.inject import stage_packages
from seatrial.trial.level import SERVER_LOG
from seatrial.trial.preflight import child_environment

DRIVERS = {"vllm": "seatrial.probes.engines.vllm_loop", "transformers": "seatrial.probes.engines.transformers_loop"}
MAKER = "seatrial.probes.engines.tiny_models"
FACTS, LOG, MODEL = "facts.jsonl", "run.log", "model"
_MAKE_S = 300.0
_STALL_S = 600.0
"""A server may load for minutes without a word."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where and how a driver runs."""

    wanted: Wanted
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
    """A model that we make ourselves, or a directory with a configuration and weights."""
    place = Path(model)
    if model in KINDS:
        return
    if not place.is_dir():
        raise UserError(f"--model {model}: no such directory", f"name a local model directory, or one of {', '.join(KINDS)}")
    if not (place / "config.json").is_file():
        raise UserError(f"{place}: config.json is missing", f"copy the model's config.json into {place}")
    require_weights(place, str(place))


def prove(setup: Setup, tell: Tell) -> Judged:
    """Run the driver to its end and judge its facts. Raises `Interrupted` when Seatrial is asked to stop."""
    redactor = Redactor(os.environ)
    instruments = stage_packages((), setup.out)
    model = _model(setup, instruments, redactor, tell)
    wanted = setup.wanted
    argv = [str(setup.python), "-m", DRIVERS[wanted.engine], "--model", str(model), "--out", str(setup.out), "--steps", str(wanted.steps)]
    argv += ["--transport", "all" if len(wanted.transports) > 1 else wanted.transports[0]]
    argv += ["--fault", wanted.fault] if wanted.fault else []
    argv += ["--", *setup.server] if setup.server else []
    tell(f"starting policy and generator ({wanted.engine}): {setup.out / LOG}")
    follower = _Follower(setup.out / FACTS, tell)
    outcome = _run(setup, instruments, redactor, argv, LOG, setup.deadline_s, follower.tick)
    follower.look()
    facts = _redacted(setup.out / FACTS, redactor)
    redactor.file(setup.out / SERVER_LOG)
    check_stop()
    said = trouble(outcome, setup.out / LOG, setup.deadline_s)
    if wanted.fault and NO_SUCH_FAULT in said:
        raise UserError(
            f"--fault {wanted.fault}: {wanted.model} cannot have it: nothing was injected", "use another model: --model tiny-qwen2"
        )
    return judge(facts, wanted, said)


def trouble(outcome: Outcome, log: Path, deadline_s: float) -> str:
    """How a process ended, when not well; "" else."""
    if outcome.ended == "exited" and outcome.exit_code == 0:
        return ""
    if outcome.ended == "deadline":
        return f"no end within {deadline_s / 60:g} minutes"
    if outcome.ended == "stalled":
        return f"nothing happened for {_STALL_S / 60:g} minutes"
    said = [text for _, _, text in lines(log) if text.strip()] if log.is_file() else []
    return f"exit code {outcome.exit_code}: {said[-1].strip()[:300] if said else 'it said nothing'} ({log})"


def _model(setup: Setup, instruments: Path, redactor: Redactor, tell: Tell) -> Path:
    """The directory of the model; a tiny one is made in the engine's own interpreter."""
    if setup.wanted.model not in KINDS:
        return Path(setup.wanted.model).absolute()
    place, log = setup.out / MODEL, "model.log"
    tell(f"making the model {setup.wanted.model}")
    argv = [str(setup.python), "-m", MAKER, setup.wanted.model, str(place)]
    outcome = _run(setup, instruments, redactor, argv, log, _MAKE_S, None)
    check_stop()
    if said := trouble(outcome, setup.out / log, _MAKE_S):
        raise BlockedError(
            Boundary.ENVIRONMENT, f"the model {setup.wanted.model} was not made: {said}", f"check that {setup.python} has torch"
        )
    return place


def _run(
    setup: Setup,
    instruments: Path,
    redactor: Redactor,
    argv: list[str],
    log: str,
    deadline_s: float,
    tick: Callable[[Tick], None] | None,
) -> Outcome:
    extra = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    spec = ProcessSpec(
        argv=tuple(argv),
        env=child_environment(os.environ, (str(instruments),), extra),
        cwd=instruments,
        log=setup.out / log,
        run_id=f"{setup.out.name}-refit-{time.time_ns()}",
        deadline_s=deadline_s,
        stall_s=_STALL_S,
        watch=(setup.out / FACTS,),
        line_filter=redactor.lines(program=True).line,
    )
    return run(spec, tick)


def _redacted(path: Path, redactor: Redactor) -> Facts:
    """The facts. Errors that a probe met are free text and cleared of secrets; hashes beside names like `embed_tokens` are not text."""
    if not path.is_file():
        return Facts(())
    text = read_text(path)
    cleared = "\n".join(_cleared(line, redactor) if "probe_error" in line else line for line in text.split("\n"))
    if cleared != text:
        write_text(path, cleared)
    return read_facts(path)


def _cleared(line: str, redactor: Redactor) -> str:
    try:
        return json.dumps(redactor.value(json.loads(line)), ensure_ascii=False)
    except ValueError:  # torn: it stays damage
        return redactor.text(line)


class _Follower:
    """Says each refit as its fact appears."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self.path, self.tell, self.read = path, tell, 0

    def tick(self, beat: Tick) -> None:
        """Called about twice a second."""
        del beat
        self.look()

    def look(self) -> None:
        """Read what was added. A row that cannot be read is the judge's to report."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as stream:
            stream.seek(self.read)
            added = stream.read()
        whole = added[: added.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            if line.startswith(b'{"fact": "refit"'):
                self.tell(_said(line))


def _said(line: bytes) -> str:
    try:
        row = json.loads(line)
        size = f"{row['bytes'] / 1e6:.2f} MB"
        state = f"refused: {row['refused']}" if row["refused"] else f"{len(row['wrong_names'])} of {row['names']} tensors wrong"
        return f"refit {row['index']} (step {row['step']}, {row['transport']}, {size}): {row['stale_names']} stale before, {state}"
    except (ValueError, KeyError, TypeError):
        return "a refit whose fact cannot be read"
