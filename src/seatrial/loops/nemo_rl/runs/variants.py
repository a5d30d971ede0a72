"""What each level runs: a maintained functional of the checkout, and what is set on top of it.

Settings of ours follow the script's own, and the user's come last: NeMo-RL takes the last one. The scripts pass them on
unquoted, so none may hold white space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from seatrial.loops.nemo_rl.runs import architecture
from seatrial.loops.nemo_rl.runs.checkout import Generation, checkout_of, generation
from seatrial.loops.nemo_rl.runs.isolations import relaxed
from seatrial.loops.nemo_rl.runs.variant import (
    GRPO,
    Call,
    argument_claims,
    common_claims,
    gpus,
    model_overrides,
    size_claims,
    size_overrides,
)
from seatrial.loops.options import number
from seatrial.loops.sizes import KEYS, Sizes
from seatrial.model.guarded import parse_step
from seatrial.model.loop import Context

LORA = "tests/functional/grpo_megatron_lora.sh"
DIAMOND = "tests/functional/sft_resume_diamond.sh"
RESHARD = "tests/functional/grpo_nccl_reshard_refit.sh"
MEGATRON_GENERATION = "tests/functional/grpo_megatron_generation.sh"
LEARNING_STEPS = (20, 100)
TRANSPORTS = ("full", "packed", "reshard", "delta")
REFIT_STEPS = 3
"""The first refit carries the weights that both sides began with: two more carry trained ones."""
DELTA_SEED = {
    "enabled": "true",
    "dtype": "bfloat16",
    "transport": "sparse_indices",
    "full_sync_interval": "20",
    "sparse_bucket_size_bytes": "5368709120",
    "delta_load_batch_size_bytes": "536870912",
}


def variants(level: str, context: Context) -> tuple[Call, ...]:
    """The calls of one level, in order; a rerun of `seatrial isolate` does not claim what it changes on purpose."""
    return tuple(replace(call, claims=relaxed(call.claims, context.options)) for call in _calls(level, context))


def _calls(level: str, context: Context) -> tuple[Call, ...]:
    match level:
        case "smoke":
            return (_grpo("run", context, 2),)
        case "lora-checkpoint":
            return _lora_and_checkpoint(context)
        case "refit":
            return tuple(_refit(name, context) for name in transports(context))
        case "megatron-generation":
            return (_megatron_generation(context),)
        case "parallelism":
            return (_parallelism(context),)
        case "architecture":
            return (architecture.call(context),)
        case "learning":
            return (_learning(context),)
    raise AssertionError(f"level {level} has no variants")


def _grpo(name: str, context: Context, steps: int, *overrides: str, claims: Mapping[str, Any] | None = None, **fields: Any) -> Call:
    """The GRPO functional with settings on top."""
    count = (f"cluster.gpus_per_node={gpus(context)}",) if "gpus" in context.options else ()
    return Call(
        name=name,
        script=GRPO,
        steps=steps,
        overrides=(*model_overrides(context), *count, *((f"grpo.max_num_steps={steps}",) if steps != 2 else ()), *overrides),
        claims={**common_claims(context, steps), "policy.generation.backend": "vllm", **(claims or {})},
        trainers=fields.pop("trainers", gpus(context)),
        **fields,
    )


def _lora_and_checkpoint(context: Context) -> tuple[Call, ...]:
    """The LoRA functional, which saves; then the resume comparison, which trains with DTensor and with Megatron."""
    made = []
    if not no_peft(context.options, offered(context)):
        claims = {**common_claims(context, 3), "policy.megatron_cfg.peft.enabled": True, "checkpointing.enabled": True}
        made.append(Call("lora", LORA, 3, model_overrides(context), claims, trainers=gpus(context)))
    # Four of its five runs save or resume, two of them with Megatron: what each of them ran with is a proof of its own.
    claims = {"sft.max_num_steps": 2, "logger.tensorboard_enabled": True, **argument_claims(context)}
    return (*made, Call("resume", DIAMOND, 2, model_overrides(context), claims))


def no_peft(options: Mapping[str, Any], offers: Generation) -> str | None:
    """Why the LoRA functional is not run."""
    if options.get("peft") == "broken":
        return "PEFT is broken in this NeMo-RL checkout (options.peft = broken): LoRA was not run; cover it with the Bridge's own tests"
    if not offers.peft or Path(LORA).name not in offers.scripts:
        return "this NeMo-RL checkout has no LoRA with Megatron: LoRA was not run; cover it with the Bridge's own tests"
    return None


def offered(context: Context) -> Generation:
    """What the checkout offers."""
    place = checkout_of(context)
    return generation(place) if place is not None else generation(Path())


def transports(context: Context) -> tuple[str, ...]:
    """Those asked for; else those that the checkout has."""
    asked = context.options.get("transports")
    return tuple(str(asked).split(",")) if asked else available(offered(context))


def available(offers: Generation) -> tuple[str, ...]:
    """Transports that this checkout has, by our names."""
    made = ["full"]
    made += ["packed"] if "packed" in offers.transports else []
    made += ["reshard"] if "nccl_reshard" in offers.transports and Path(RESHARD).name in offers.scripts else []
    made += ["delta"] if offers.refit == "delta_compression" or "vllm_zmq_sparse" in offers.transports else []
    return tuple(made)


def _refit(name: str, context: Context) -> Call:
    """Trainer and generator on GPUs of their own, with one transport."""
    trainers = gpus(context) // 2
    apart = {
        "policy.generation.colocated.enabled": False,
        "policy.generation.colocated.resources.gpus_per_node": gpus(context) - trainers,
        "policy.generation.vllm_cfg.async_engine": True,
    }
    words = [f"{key}={str(value).lower()}" for key, value in apart.items()]
    words += ["policy.generation.colocated.resources.num_nodes=1"]
    claims: dict[str, Any] = {**common_claims(context, REFIT_STEPS), "policy.generation.backend": "vllm", **apart}
    if name == "reshard":
        words = [*model_overrides(context), f"grpo.max_num_steps={REFIT_STEPS}"]
        claims["policy.generation.refit_transport"] = "nccl_reshard"
        return Call(name, RESHARD, REFIT_STEPS, tuple(words), claims, trainers=trainers)
    # Buckets a fortieth of the usual size: a small model would otherwise fit into one, and nothing would be packed.
    variables = {"NRL_REFIT_BUFFER_MEMORY_RATIO": "0.0005", "NRL_REFIT_NUM_BUFFERS": "2"} if name == "packed" else {}
    if name == "delta":
        extra = delta_settings(offered(context))
        words += extra
        claims |= {key.lstrip("+"): _value(text) for key, _, text in (word.partition("=") for word in extra)}
    elif offered(context).refit == "refit_transport":
        claims["policy.generation.refit_transport"] = None
    return _grpo(name, context, REFIT_STEPS, *words, claims=claims, variables=variables, trainers=trainers)


def delta_settings(offers: Generation) -> list[str]:
    """How this generation of NeMo-RL is told to send only what changed."""
    place = "policy.generation"
    if offers.refit == "delta_compression":
        return [f"{place}.delta_compression.{key}={value}" for key, value in DELTA_SEED.items()]
    return [
        f"{place}.refit_transport=vllm_zmq_sparse",
        f"++{place}.refit_cfg.sparse.delta_compression.encoding=xor",
        f"++{place}.refit_cfg.sparse.verify_samples_per_payload=16",
    ]


def _value(text: str) -> Any:
    """A value as the configuration holds it."""
    value = parse_step(text)
    return {"true": True, "false": False}.get(text, text if value is None else value)


def _megatron_generation(context: Context) -> Call:
    claims = {**common_claims(context, 2), "policy.generation.backend": "megatron"}
    return Call("run", MEGATRON_GENERATION, 2, model_overrides(context), claims, trainers=gpus(context))


def stress_sizes(context: Context) -> Sizes:
    """As asked for; else tensor parallel over two GPUs."""
    given = context.options
    return Sizes(*(number(given, name, 2 if name == "tp" else 1) for name in ("tp", "pp", "cp", "ep", "etp")))


def _parallelism(context: Context) -> Call:
    """A maintained recipe, or the GRPO functional with explicit sizes."""
    if recipe := context.options.get("recipe"):
        call = architecture.recipe(str(recipe), context)
        asked = {key: size for key, size in size_claims(stress_sizes(context)).items() if _asked(key, context)}
        return replace(call, claims={**call.claims, **asked})
    sizes = stress_sizes(context)
    sequence = context.options.get("sequence_parallel", "false") == "true"
    claims = {**size_claims(sizes), "policy.megatron_cfg.sequence_parallel": sequence}
    words = [*size_overrides(sizes), f"policy.megatron_cfg.sequence_parallel={str(sequence).lower()}"]
    return _grpo("run", context, 2, *words, claims=claims, sizes=sizes)


def _asked(key: str, context: Context) -> bool:
    """Whether the user named this parallel size."""
    return any(key.endswith(f".{KEYS[name]}") for name in KEYS if name in context.options)


def _learning(context: Context) -> Call:
    """Twenty steps and more on data in a fixed order."""
    steps = number(context.options, "steps", LEARNING_STEPS[0], *LEARNING_STEPS)
    words = (*model_overrides(context), f"grpo.max_num_steps={steps}", "data.shuffle=false", "checkpointing.enabled=false")
    peft = no_peft(context.options, offered(context)) is None
    claims = {**common_claims(context, steps), "data.shuffle": False, **({"policy.megatron_cfg.peft.enabled": True} if peft else {})}
    return Call("run", LORA if peft else GRPO, steps, words, claims, trainers=gpus(context))
