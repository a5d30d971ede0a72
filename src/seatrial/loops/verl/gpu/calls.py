"""The processes of a level on GPUs: the import check, then each call of a script of the checkout.

Settings of ours are appended to the script's own, and the user's come last: Hydra takes the last one. The wrapper passes
them on unquoted, so none may hold white space.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.loops.verl import witness
from seatrial.loops.verl.gpu import checkout
from seatrial.loops.verl.gpu.variant import Variant
from seatrial.loops.verl.gpu.variants import variants
from seatrial.model.guarded import parse_count
from seatrial.model.knowledge import Level
from seatrial.model.loop import Context, Phase

PROCESSES = ("driver", "worker")
CHECKED = ("verl", "megatron.core", "megatron.bridge")
"""Packages that driver and workers must find at the same place."""
RAY_ENV = "++ray_kwargs.ray_init.runtime_env.env_vars."


def phases(level: Level, context: Context, directory: Path) -> tuple[Phase, ...]:
    """The import check, then each call of a script."""
    calls = variants(level.name, context, directory)
    return (_imports(calls, context, directory), *(training(call, context, directory) for call in calls))


def _imports(calls: Sequence[Variant], context: Context, directory: Path) -> Phase:
    said = json.dumps({call.name: call.claims for call in calls})
    worker = checkout.worker_command(context, calls[0].extras)
    variables = witness.witness_variables(context, directory)
    del variables["VERL_USE_EXTERNAL_MODULES"]  # the witness speaks for training only
    return Phase(
        name="imports",
        argv=(
            *(*checkout.start_words(context, calls[0].extras), "-m", "seatrial.probes.ray_imports"),
            *("--out", str(directory), "--phase-dir", str(directory / "imports"), "--packages", ",".join(CHECKED), "--claims", said),
            *(("--py-executable", worker) if worker else ()),
        ),
        env=variables,
        processes=("imports-driver", "imports-worker"),
        cwd=checkout.checkout_of(context),
    )


def training(call: Variant, context: Context, directory: Path) -> Phase:
    own = _inside(call, context, directory)
    return Phase(
        name=call.name,
        argv=("bash", call.script, *_overrides(call, context, directory, own), *context.arguments),
        env={**call.variables, **own},
        steps=_steps(call, context.arguments),
        processes=PROCESSES,
        cwd=checkout.checkout_of(context),
    )


def _inside(call: Variant, context: Context, directory: Path) -> dict[str, str]:
    """Variables that every process of the run must see, on whichever node it is."""
    plugins = tuple(name for name in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name)
    made = witness.witness_variables(context, directory, plugins)
    made["VERL_FILE_LOGGER_PATH"] = str(directory / call.name / "metrics.jsonl")
    return {key: value for key, value in made.items() if value}


def _overrides(call: Variant, context: Context, directory: Path, inside: Mapping[str, str]) -> tuple[str, ...]:
    """What is appended to the script's own settings; Hydra takes the last one. The wrapper splits them at white space."""
    place = directory / call.name
    everywhere = {"PYTHONPATH": checkout.python_path(context), **inside}
    return (
        *("trainer.logger=[console,file]", f"hydra.run.dir={place / 'hydra'}", "global_profiler.steps=null"),
        *(f"trainer.default_local_dir={call.checkpoints or place / 'checkpoints'}", f"trainer.rollout_data_dir={place / 'rollouts'}"),
        *(f"{RAY_ENV}{key}='{value}'" for key, value in everywhere.items()),
        *(() if context.options.get("reward_model") else ("reward.reward_model.enable=False",)),
        *call.overrides,
    )


def _steps(call: Variant, arguments: Sequence[str]) -> int:
    """Steps to reach: the user's own number counts, since it is what the loop will do."""
    given = [word.partition("=")[2] for word in arguments if word.lstrip("+").startswith("trainer.total_training_steps=")]
    return parse_count(given[-1]) if given and given[-1].isascii() and given[-1].isdecimal() else call.steps
