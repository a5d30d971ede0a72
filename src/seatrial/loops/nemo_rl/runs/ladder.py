"""The ladder with options in force: what cannot be run says why, what is run is in the title, what is left out is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.loops.nemo_rl.runs import architecture, variants
from seatrial.loops.nemo_rl.runs.checkout import VERSION, Generation, generation
from seatrial.loops.nemo_rl.runs.variant import GPUS
from seatrial.loops.options import number
from seatrial.loops.sizes import KEYS
from seatrial.model.knowledge import Level

NO_LORA = (
    "a Megatron run of two steps that was cut after the first and resumed is the run that was not cut, within the tolerances of "
    "NeMo-RL's own comparison; LoRA was not run"
)


def ladder(levels: Sequence[Level], options: Mapping[str, str]) -> tuple[Level, ...]:
    """The levels; a cluster is asked for the GPUs that are used."""
    count = number(options, "gpus", GPUS)
    made = [level.model_copy(update={"cost": level.cost.model_copy(update={"gpus": count})}) for level in levels]
    return tuple(level.model_copy(update=_changed(level, options)) for level in made)


def _changed(level: Level, options: Mapping[str, str]) -> dict[str, object]:
    match level.name:
        case "lora-checkpoint":
            return _without_lora(options)
        case "refit":
            offers = _offered(options)
            named = options.get("transports", ",".join(variants.available(offers) if offers else ())).replace(",", ", ")
            return {**_titled(level, named), **_too_few(options)}
        case "megatron-generation":
            return _megatron_generation(options)
        case "parallelism":
            sizes = ", ".join(f"{name.upper()} {number(options, name, 2 if name == 'tp' else 1)}" for name in KEYS)
            return {**_titled(level, options.get("recipe", sizes)), **_too_few(options)}
        case "architecture":
            named = options.get("architecture", options.get("recipe", ""))
            return {**_titled(level, named), "skip": architecture.why_not(options)}
        case "learning":
            return {"steps": number(options, "steps", variants.LEARNING_STEPS[0], *variants.LEARNING_STEPS)}
    return {}


def _offered(options: Mapping[str, str]) -> Generation | None:
    """What the checkout offers; None when none was named, or what was named is none: the preflight says so."""
    place = Path(options["nemo_rl"]) if "nemo_rl" in options else None
    return generation(place) if place is not None and (place / VERSION).is_file() else None


def _titled(level: Level, what: str) -> dict[str, object]:
    return {"title": f"{level.title} ({what})"} if what else {}


def _too_few(options: Mapping[str, str]) -> dict[str, object]:
    """One GPU has nothing to transfer to, and nothing to be parallel with."""
    few = number(options, "gpus", GPUS) < 2
    return {"skip": "one GPU is not enough for it: name more with --set options.gpus=N"} if few else {}


def _without_lora(options: Mapping[str, str]) -> dict[str, object]:
    """LoRA that this checkout does not have, or that is known to be broken there, is no fault of the change."""
    offers = _offered(options)
    why = variants.no_peft(options, offers) if offers else None
    return {"title": "Checkpoint (LoRA blocked by NeMo-RL)", "proves": NO_LORA, "left_out": (why,)} if why else {}


def _megatron_generation(options: Mapping[str, str]) -> dict[str, object]:
    offers = _offered(options)
    if offers is None:
        return {}
    supported = offers.megatron_generation and Path(variants.MEGATRON_GENERATION).name in offers.scripts
    return {} if supported else {"skip": "this NeMo-RL checkout does not support policy.generation.backend=megatron"}
