"""The processes of a level: the import check, then each call of a script, by our driver.

The driver keeps what earlier runs left in the checkout (the scripts delete it), runs the script in the checkout, and
moves what it wrote into the level directory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from seatrial.loops.nemo_rl.runs import assertions, checkout, converted, witness
from seatrial.loops.nemo_rl.runs.variant import Call
from seatrial.loops.nemo_rl.runs.variants import variants
from seatrial.model.guarded import parse_count
from seatrial.model.knowledge import Level
from seatrial.model.loop import Context, Phase

CHECKED = ("nemo_rl", "megatron.core", "megatron.bridge")
STEPS = ("grpo.max_num_steps=", "sft.max_num_steps=")
SAVING, CHECKPOINTS = "checkpointing.enabled", "checkpoints"
FUNCTIONAL = "seatrial.loops.nemo_rl.drive.functional"


def phases(level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
    """The import check, then each call of a script."""
    calls = variants(level.name, context)
    return (_imports(calls, context, directory), *(training(call, context, directory) for call in calls))


def _imports(calls: Sequence[Call], context: Context, directory: Path) -> Phase:
    place = checkout.checkout_of(context) or Path()
    said = {
        call.name: {"script": call.script, "expressions": assertions.assertions_in(place / call.script)}
        for call in calls
        if call.assertions
    }
    return Phase(
        name="imports",
        argv=(
            *(str(context.python), "-m", "seatrial.loops.nemo_rl.drive.imports"),
            *("--out", str(directory), "--phase-dir", str(directory / "imports"), "--checkout", str(place)),
            *("--packages", ",".join(CHECKED), "--claims", json.dumps({call.name: call.claims for call in calls})),
            *("--assertions", json.dumps(said)),
        ),
        env=witness.witness_variables(context, directory),
        processes=("imports-driver", "imports-worker"),
        cwd=place,
    )


def training(call: Call, context: Context, directory: Path) -> Phase:
    """One call of a script."""
    place = checkout.checkout_of(context) or Path()
    return Phase(
        name=call.name,
        argv=(
            *(str(context.python), "-m", FUNCTIONAL, "--checkout", str(place), "--script", call.script),
            *("--out", str(directory / call.name), *_sources(context), "--", *words(call, context, directory)),
        ),
        env={**call.variables, **witness.witness_variables(context, directory), **_unbuffered(), **_converted(context, directory)},
        steps=_steps(call, context.arguments),
        processes=("driver", "worker"),
        cwd=place,
    )


def words(call: Call, context: Context, directory: Path | None = None) -> tuple[str, ...]:
    """What the script is called with, in a level directory. Checkpoints go to a place of their own there: a script's own may
    hold those of a run that was killed, from which NeMo-RL would go on."""
    saves = call.claims.get(SAVING) is True
    place = (f"checkpointing.checkpoint_dir={directory / call.name / CHECKPOINTS}",) if directory and saves else ()
    return (*call.overrides, *place, *context.arguments)


def _unbuffered() -> dict[str, str]:
    """Lines must arrive when they are written: a stall would be seen where there is none."""
    return {"PYTHONUNBUFFERED": "1", "RAY_DEDUP_LOGS": "0", "HYDRA_FULL_ERROR": "1"}


def _converted(context: Context, directory: Path) -> dict[str, str]:
    """The Bridge under test must convert the model itself, not take what an earlier run left in the user's cache."""
    return {converted.VARIABLE: str(converted.place(directory, context.run_dir.name))}


def _sources(context: Context) -> tuple[str, ...]:
    """Where the Bridge under test is put, and where its helpers are built."""
    made: list[str] = []
    for repo in context.changes:
        if repo.synced:
            made += ["--sync", f"{repo.path}={repo.synced}"]
    if context.options.get("helpers") == "local":
        made += [word for core in checkout.bundled_core(context)[:1] for word in ("--helpers", str(core))]
    return tuple(made)


def _steps(call: Call, arguments: Sequence[str]) -> int:
    """Steps to reach: the user's own number counts, since it is what the loop will do."""
    given = [word.partition("=")[2] for word in arguments if word.lstrip("+").startswith(STEPS)]
    return parse_count(given[-1]) if given and given[-1].isascii() and given[-1].isdecimal() else call.steps
