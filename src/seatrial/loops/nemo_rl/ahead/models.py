"""The models of a run: where they are, and what is wrong with them. No network is ever used.

A model is a local directory, or the name of one on the hub. A name is downloaded by NeMo-RL itself, unless it is told to
be offline; where the cache has it, the overrides that use the cached snapshot are told.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from seatrial.files import read_table
from seatrial.loops.hub import hub_cache, snapshot
from seatrial.loops.model_files import Use
from seatrial.loops.model_files import model_findings as file_findings
from seatrial.loops.model_kinds import KINDS, is_kind
from seatrial.loops.nemo_rl.ahead.record import Training
from seatrial.loops.nemo_rl.runs.checkout import CLONE, sync_command
from seatrial.loops.nemo_rl.runs.variant import DEFAULT_MODEL
from seatrial.loops.options import number
from seatrial.loops.overrides import key_of
from seatrial.model.loop import Context
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

MODEL = "policy.model_name"
TOKENIZER = "policy.tokenizer.name"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_YES = ("1", "true", "yes", "on")


def model_findings(trainings: Sequence[Training], context: Context) -> tuple[Finding, ...]:
    """What there is to say of each model that the trainings name."""
    named = dict.fromkeys(item for training in trainings for item in _named(training))
    return tuple(found for model, tokenizer in named for found in _model(model, tokenizer, context))


def given(context: Context) -> tuple[Finding, ...]:
    """The same of the trial's own model, where no script could be asked for what it trains."""
    return _model(context.model, True, context)


def experts(context: Context) -> Iterator[Finding]:
    """Expert parallelism is about a model with experts: on a dense one it would show nothing."""
    wanted = context.options.get("architecture") == "moe" and "architecture" in context.levels
    wanted = wanted or ("parallelism" in context.levels and number(context.options, "ep", 1) > 1)
    if not wanted or "recipe" in context.options:
        return
    place = Path(context.model) if Path(context.model).is_dir() else snapshot(context.model)
    file = place / "config.json"
    if not file.is_file() and context.model != DEFAULT_MODEL:
        yield _data(True, f"{context.model}: whether it has experts is not known before it is downloaded")
    elif not file.is_file() or not is_kind(read_table(file), "moe"):
        fix = "--model with a model that has experts, or --set options.recipe=…"
        yield _data(False, f"{context.model} has no experts ({', '.join(KINDS['moe'])}), so expert parallelism would show nothing", fix)


def _named(training: Training) -> Iterator[tuple[str, bool]]:
    """Models by the last override of each key, and whether the tokenizer comes from there."""
    last = {key_of(word): word.partition("=")[2].strip("'\"") for word in training.overrides}
    for key, value in last.items():
        if key.endswith(".model_name") and value not in ("", "null"):
            yield value, key == MODEL and last.get(TOKENIZER, value) == value


def _model(model: str, tokenizer: bool, context: Context) -> tuple[Finding, ...]:
    if model.startswith(("/", ".", "~")):
        return _directory(Path(model).expanduser(), tokenizer, context)
    cached = snapshot(model)
    if (cached / "config.json").is_file():
        message = f"{model}: cached; to use no network: HF_HUB_OFFLINE=1, -- {MODEL}={cached} {TOKENIZER}={cached}"
        return (_data(True, message),)
    if any(os.environ.get(name, "").lower() in _YES for name in OFFLINE):
        fix = f"hf download {model} where there is a network, with the same HF_HOME"
        return (_data(False, f"{model}: offline, and no snapshot of it below {hub_cache()}", fix),)
    return (_data(True, f"{model}: no snapshot below {hub_cache()}: NeMo-RL will download it"),)


def _directory(directory: Path, tokenizer: bool, context: Context) -> tuple[Finding, ...]:
    # Weights that were converted before need not be there any more; what is there must be whole.
    weights = any(directory.glob("*.safetensors")) or any(directory.glob("*.index.json"))
    named = context.options.get("nemo_rl")
    build = sync_command(Path(named)) if named else CLONE
    return file_findings(directory, context, Use(build=build, weights=weights, tokenizer=tokenizer))


def _data(ok: bool, message: str, fix: str = "") -> Finding:
    return Finding(name="model", ok=ok, boundary=Boundary.DATA, message=message, fix=fix)
