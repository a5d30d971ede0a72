"""Running a driver of the refit probe: one process of an engine's interpreter, judged by the facts it leaves.

The driver owns policy and generator, each a process of its own.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path

from seatrial.evidence.redact import Redactor
from seatrial.launch.interrupt import check_stop
from seatrial.model.errors import BlockedError, UserError
from seatrial.model.guarded import parse_json
from seatrial.model.verdict import Boundary
from seatrial.probes.engines.tiny_models import KINDS
from seatrial.probes.refit.export_faults import NO_SUCH_FAULT
from seatrial.proving.checkpoint import require_weights
from seatrial.proving.driver import FACTS, LOG, Driver, Follower, Tell, trouble
from seatrial.proving.judge import judge
from seatrial.proving.record import Judged, Wanted
from seatrial.trial.inject import stage_packages
from seatrial.trial.level import SERVER_LOG

DRIVERS = {"vllm": "seatrial.probes.engines.vllm_loop", "transformers": "seatrial.probes.engines.transformers_loop"}
MAKER = "seatrial.probes.engines.tiny_models"
MODEL = "model"
_MAKE_S = 300.0


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
    driver = Driver(out=setup.out, instruments=stage_packages((), setup.out), redactor=redactor)
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
    if wanted.fault and NO_SUCH_FAULT in said:
        raise UserError(
            f"--fault {wanted.fault}: {wanted.model} cannot have it: nothing was injected", "use another model: --model tiny-qwen2"
        )
    return judge(facts, wanted, said)


def _model(setup: Setup, driver: Driver, tell: Tell) -> Path:
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
