"""What the scripts of a level really start, assert and write: known by running them with stand-ins."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from seatrial.loops.nemo_rl.after.results import RESULTS
from seatrial.loops.nemo_rl.ahead.record import ScriptError, Training, record
from seatrial.loops.nemo_rl.runs import calls, checkout
from seatrial.loops.nemo_rl.runs.variant import Call
from seatrial.loops.nemo_rl.runs.variants import variants
from seatrial.model.knowledge import Level
from seatrial.model.loop import Context


def shown(level: Level, context: Context, directory: Path) -> tuple[str, ...]:
    """For each call: how it trains, with which variables, what the script asserts, and where its files will be."""
    place = checkout.checkout_of(context)
    if place is None:
        return ("no NeMo-RL checkout was named: what its scripts start is not known",)
    layout = checkout.layout(place)
    if not layout.ok:
        return (f"what its scripts start is not known: {layout.message}",)
    return tuple(line for call in variants(level.name, context) for line in _call(call, context, place, directory))


def _call(call: Call, context: Context, place: Path, directory: Path) -> Iterator[str]:
    path = checkout.python_path(context)
    environment = {**os.environ, **call.variables, "PYTHONPATH": path}
    yield f"{call.script} ({call.name}) starts:"
    try:
        found = record(place / call.script, place, calls.words(call, context, directory), environment)
    except (ScriptError, ValueError) as error:
        yield f"  not known: {error}"
        return
    for training in found.trainings:
        yield f"  {shlex.join(training.argv)}"
        yield f"  with {_variables(training, environment)}"
    for expression in found.assertions if call.assertions else ():
        yield f"  asserts {expression}"
    for file in found.files:
        yield f"  writes {file}, kept as $OUT/{call.name}/{RESULTS}"
    yield f"  metrics: $OUT/{call.name}/{RESULTS}/**/*tfevents*, claims: {len(call.claims)} values of the configuration"


def _variables(training: Training, before: dict[str, str]) -> str:
    """What the script sets on top of the environment."""
    own = {key: value for key, value in training.environment.items() if before.get(key) != value and key.isupper()}
    ours = ("HOME", "PATH", "GIT_CONFIG_GLOBAL", "SHLVL", "PWD", "OLDPWD", "TMPDIR")
    return " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(own.items()) if key not in ours) or "no variable of its own"
