"""Known real-world bugs, injected on purpose where a real bug acted. A trial that passes with one of them is broken.

`break_step` runs before the recorder is attached, so that the record sees a broken method as it would see one that somebody wrote;
`break_run` after it. fault_names.py says what each fault does and which stage names it. Faults of a refit act in the generation process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import TrainerCallback
from trl.trainer import grpo_trainer

from seatrial.instruments.trl.fault_names import FAULTS

# Faults of one step


def break_step(trainer: Any, fault: str | None) -> None:
    """Break a trainer that is built and not yet watched; names of other faults do nothing here."""
    name = fault or ""
    for path, value in ATTRIBUTES.get(name, {}).items():
        owner, attribute = owner_of(trainer, path)
        setattr(owner, attribute, value(getattr(owner, attribute)) if callable(value) else value)
    if name in METHODS:
        path, change = METHODS[name]
        wrap(trainer, path, functools.partial(change, trainer))
    if name in REWARDS:
        wrap(trainer, "_calculate_rewards", lambda original, *args: REWARDS[name](original(*args)))
    if name in LOGPS:
        wrap(trainer, "_get_per_token_logps_and_entropies", lambda original, *args, **kw: with_first(original(*args, **kw), LOGPS[name]))
    if name in ORDERS:
        wrap(trainer, "_get_train_sampler", lambda original, *args: ORDERS[name](trainer, list(original(*args))))
    if name in RATES:
        wrap(trainer, "create_scheduler", lambda original, *args, **kw: with_rate(original(*args, **kw), RATES[name]))
    for table, method in ((OUTPUTS, "_generate_and_score_completions"), (OPTIMIZERS, "create_optimizer")):
        if name in table:
            wrap(trainer, method, functools.partial(with_change, trainer, table[name]))
    if name in MODELS:
        MODELS[name](trainer)


def owner_of(trainer: Any, path: str) -> tuple[Any, str]:
    """The object below the trainer that has the last attribute of a dotted path, and that attribute's name."""
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, trainer), name


def wrap(trainer: Any, path: str, change: Callable[..., Any]) -> None:
    """Replace a method by `change(original, *arguments)`."""
    owner, name = owner_of(trainer, path)
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def with_change(trainer: Any, change: Callable[[Any, Any], object], original: Any, *args: Any) -> Any:
    """What a method made, once `change(trainer, made)` has changed it."""
    made = original(*args)
    change(trainer, made)
    return made


def with_first(values: Any, change: Callable[[Any], Any]) -> tuple[Any, ...]:
    first, *rest = values
    return (change(first), *rest)


def with_rate(scheduler: Any, change: Callable[[Callable[[int], float], int], float]) -> Any:
    scheduler.lr_lambdas = [functools.partial(change, right) for right in scheduler.lr_lambdas]
    return scheduler


def swapped_weights(trainer: Any) -> None:
    first, second = (layer.self_attn.q_proj.weight for layer in trainer.model.model.layers[:2])
    first.data, second.data = second.data, first.data


def lora_scaled_twice(trainer: Any) -> None:
    for module in adapted(trainer):
        module.scaling = {key: value**2 for key, value in module.scaling.items()}


def adapted(trainer: Any) -> Any:
    """The layers that have adapters."""
    return (module for module in trainer.model.modules() if getattr(module, "lora_A", None))


def lora_added_twice(trainer: Any) -> None:
    for module in adapted(trainer):
        module.lora_B.default.register_forward_hook(lambda _, __, output: 2 * output)


def rounded(parameters: Iterable[Any]) -> None:
    for value in parameters:
        value.data = value.data.bfloat16().float()


def stale_generation(trainer: Any) -> None:
    named = dict(trainer.model.named_parameters())
    first = {name: value.detach().clone() for name, value in named.items()}

    def generated(original: Any, *args: Any, **kwargs: Any) -> Any:
        now = {name: value.detach().clone() for name, value in named.items()}
        load(named, first)
        try:
            return original(*args, **kwargs)
        finally:
            load(named, now)

    wrap(trainer, "model.generate", generated)


def load(named: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        named[name].data.copy_(value)


def detached_layer(trainer: Any) -> None:
    def detached(_: Any, args: Any, kwargs: Any) -> Any:
        return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in args), kwargs

    trainer.model.model.layers[1].register_forward_pre_hook(detached, with_kwargs=True)


def change_sync(trainer: Any, change: Callable[..., Any]) -> None:
    """Change how the reference is synced with the policy."""
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "sync_target_model"):
            wrap(callback, "sync_target_model", change)


def population_deviation(_: Any) -> None:
    def population(original: Any, values: Any, dim: Any = None, **kwargs: Any) -> Any:
        count = values.shape[dim] if dim is not None else values.numel()
        return original(values, dim=dim, **kwargs) * ((count - 1) / count) ** 0.5

    wrap(grpo_trainer, "nanstd", population)


def stale_metric(trainer: Any) -> None:
    before: list[float] = [0.0]

    def logged(original: Any, logs: Any, *args: Any) -> Any:
        metrics = trainer._metrics["train"]
        if metrics.get("kl"):
            metrics["kl"], before[:] = list(before), metrics["kl"]
        return original(logs, *args)

    wrap(trainer, "log", logged)


def third_rate_swapped_betas(trainer: Any) -> None:
    trainer.args.learning_rate /= 3
    trainer.args.adam_beta1, trainer.args.adam_beta2 = trainer.args.adam_beta2, trainer.args.adam_beta1


MODELS: dict[str, Callable[[Any], object]] = {
    "reinitialised-layer": lambda trainer: torch.nn.init.normal_(trainer.model.model.layers[1].mlp.down_proj.weight, std=0.02),
    "rounded-weights": lambda trainer: rounded(trainer.model.parameters()),
    "swapped-weights": swapped_weights,
    "lora-scaled-twice": lora_scaled_twice,
    "lora-frozen-layer": lambda trainer: next(adapted(trainer)).lora_A.requires_grad_(False),
    "lora-added-twice": lora_added_twice,
    "stale-generation": stale_generation,
    "live-reference": lambda trainer: setattr(trainer, "ref_model", trainer.model),
    "adapted-reference": lambda _: wrap(grpo_trainer, "use_adapter", lambda _, model, **__: contextlib.nullcontext(model)),
    "other-sync-alpha": lambda trainer: change_sync(trainer, lambda original, model, target, alpha: original(model, target, alpha / 2)),
    "never-synced": lambda trainer: change_sync(trainer, lambda *_: None),
    "untempered-logprobs": lambda trainer: grpo_trainer.add_fused_lm_head(trainer.model, temperature=1.0, outputs=("log_probs", "entropy")),
    "population-deviation": population_deviation,
    "detached-layer": detached_layer,
    "kept-gradient": lambda trainer: wrap(trainer, "model.zero_grad", lambda *_, **__: None),
    "doubled-gradient": lambda trainer: trainer.model.model.layers[0].self_attn.q_proj.weight.register_hook(lambda gradient: 2 * gradient),
    "third-rate-swapped-betas": third_rate_swapped_betas,
    "stale-metric": stale_metric,
}
"""What a fault does to the model, its references, or TRL's own functions."""


ATTRIBUTES: dict[str, dict[str, Any]] = {
    "cold-generation": {"generation_config.temperature": lambda old: old * 0.7},
    "no-top-p": {"generation_config.top_p": 1.0},
    "no-repetition-penalty": {"generation_config.repetition_penalty": 1.0},
    "short-completions": {"generation_config.max_new_tokens": lambda old: old - 2},
    "ignored-end": {"eos_token_ids": [-1]},
    "batch-deviation": {"scale_rewards": "batch"},
    "swapped-reward-weights": {"reward_weights": lambda old: old.flip(0)},
    "other-epsilon": {"epsilon_low": 0.2, "epsilon_high": 0.28},
    "unclipped-ratio": {"epsilon_low": 1e9, "epsilon_high": 1e9},
    "one-sided-clip": {"epsilon_low": 1.0},
    "sequence-ratio": {"importance_sampling_level": "sequence"},
    "double-kl": {"beta": lambda old: old * 2},
    "no-kl": {"beta": 1e-12},  # 0 would also drop the metric
    "uncorrected-kl": {"args.use_bias_correction_kl": False},
    "masked-truncation": {"mask_truncated_completions": True},
    "sequence-mean-loss": {"loss_type": "grpo"},
    "long-warmup": {"args.warmup_steps": lambda old: old + 1},
}
"""What a fault sets in the trainer: a value, or a function of the old one."""


def ranks(_: Any, order: list[int]) -> list[int]:
    """Each prompt's place in the order in which prompts first come."""
    places = {row: place for place, row in enumerate(dict.fromkeys(order))}
    return [places[row] for row in order]


def stuck(trainer: Any, order: list[int]) -> list[int]:
    size: int = trainer.args.generation_batch_size
    return order[:size] * (len(order) // size)


def split_groups(trainer: Any, order: list[int]) -> list[int]:
    size, group = trainer.args.generation_batch_size, trainer.num_generations
    chunks = [order[start : start + size] for start in range(0, len(order), size)]
    return [row for chunk in chunks for offset in range(group) for row in chunk[offset::group]]


ORDERS: dict[str, Callable[[Any, list[int]], list[int]]] = {"stuck-sampler": stuck, "unshuffled-data": ranks, "split-groups": split_groups}
"""The order that the sampler gives."""

REWARDS: dict[str, Callable[[Any], Any]] = {
    "shifted-rewards": lambda table: table.roll(-1, 0),
    "swapped-rewards": lambda table: table.flip(1),
    "clipped-rewards": lambda table: table.clamp(max=0.5),
}
"""The trainer's table of rewards [completions, functions]."""

LOGPS: dict[str, Callable[[Any], Any]] = {
    "shifted-logprobs": lambda logps: logps.roll(1, 1),
    "half-precision-logprobs": lambda logps: logps.bfloat16().float(),
}
"""The log-probabilities that every forward pass of the trainer gives."""


def masked_first_token(_: Any, output: dict[str, Any]) -> None:
    output["tool_mask"] = torch.ones_like(output["completion_mask"])
    output["tool_mask"][:, 0] = 0


def unmasked_end(trainer: Any, output: dict[str, Any]) -> None:
    output["completion_mask"] = output["completion_mask"] * ~torch.isin(output["completion_ids"], torch.tensor(trainer.eos_token_ids))


OUTPUTS: dict[str, Callable[[Any, Any], object]] = {
    "absolute-advantages": lambda _, output: output.update(advantages=output["advantages"].abs()),
    "truncated-old-logprobs": lambda _, output: output["old_per_token_logps"][:, 3:].zero_(),
    "forgotten-policy": lambda _, output: output.pop("old_per_token_logps"),
    "unmasked-end": unmasked_end,
    "padding-in-loss": lambda _, output: output.update(completion_mask=torch.ones_like(output["completion_mask"])),
    "masked-first-token": masked_first_token,
}
"""What generation and scoring hand to the loss."""


def lose_parameter(trainer: Any, optimizer: Any) -> None:
    lost = trainer.model.model.layers[0].input_layernorm.weight
    for group in optimizer.param_groups:
        group["params"] = [value for value in group["params"] if value is not lost]


def round_updates(_: Any, optimizer: Any) -> None:
    step = optimizer.step

    def stepped(*args: Any, **kwargs: Any) -> Any:
        made = step(*args, **kwargs)
        rounded(value for group in optimizer.param_groups for value in group["params"])
        return made

    optimizer.step = stepped


OPTIMIZERS: dict[str, Callable[[Any, Any], object]] = {"lost-parameter": lose_parameter, "rounded-update": round_updates}
"""Torch's optimizer, once it is made."""

RATES: dict[str, Callable[[Callable[[int], float], int], float]] = {
    "stuck-schedule": lambda right, step: right(min(step, 2)),
    "double-schedule": lambda right, step: right(2 * step),
}
"""The schedule, given the right one and the number of steps done."""


def repeated_micro_batch(trainer: Any, original: Any, batch: Any) -> Any:
    made = original(batch)
    last = trainer._step % trainer.args.steps_per_generation == trainer.args.steps_per_generation - 1
    return trainer._buffered_inputs[0] if last else made


def shifted_columns(trainer: Any, original: Any, inputs: Any, *rest: Any) -> Any:
    group = trainer.num_generations
    return original(inputs[group:] + inputs[:group], *rest)


def biased_draws(_: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    draw = torch.multinomial
    torch.multinomial = lambda shares, *rest, **more: draw(shares**2, *rest, **more)
    try:
        return original(*args, **kwargs)
    finally:
        torch.multinomial = draw


def stripped_end(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    completions, logprobs = original(*args, **kwargs)
    return [ids[:-1] if len(ids) > 1 and ids[-1] in trainer.eos_token_ids else ids for ids in completions], logprobs


def undivided_loss(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    trainer.current_gradient_accumulation_steps = 1
    return original(*args, **kwargs)


def own_token_count(trainer: Any, original: Any, model: Any, inputs: Any) -> Any:
    tokens = inputs["completion_mask"].sum() * trainer.args.steps_per_generation
    return original(model, {**inputs, "num_items_in_batch": tokens})


def dropped_micro_batch(trainer: Any, original: Any, model: Any, *rest: Any) -> Any:
    made = original(model, *rest)
    if trainer._step % trainer.args.gradient_accumulation_steps == 1:
        model.zero_grad()
    return made


def clip_each_tensor(_: Any, original: Any, values: Any, limit: float) -> Any:
    values = list(values)
    norm = original(values, float("inf"))
    for value in values:
        torch.nn.utils.clip_grad_norm_([value], limit / 2)
    return norm


def last_loss_logged(trainer: Any, original: Any, *args: Any) -> Any:
    made = original(*args)
    return made if trainer._step % trainer.args.gradient_accumulation_steps == 0 else made * 0


def next_rate_logged(trainer: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **{**kwargs, "learning_rate": trainer.lr_scheduler.get_last_lr()[0]})


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "repeated-micro-batch": ("_prepare_inputs", repeated_micro_batch),
    "shifted-columns": ("_calculate_rewards", shifted_columns),
    "shifted-texts": (
        "_calculate_rewards",
        lambda _, original, inputs, prompts, texts, ids: original(inputs, prompts, texts[1:] + texts[:1], ids),
    ),
    "biased-draws": ("model.generate", biased_draws),
    "stripped-end": ("_generate_single_turn", stripped_end),
    "double-loss": ("_compute_loss", lambda _, original, *args, **kwargs: 2 * original(*args, **kwargs)),
    "undivided-loss": ("_compute_loss", undivided_loss),
    "own-token-count": ("_compute_loss", own_token_count),
    "dropped-micro-batch": ("training_step", dropped_micro_batch),
    "other-clip-norm": ("accelerator.clip_grad_norm_", lambda _, original, values, limit: original(values, limit / 2)),
    "no-clip": ("accelerator.clip_grad_norm_", lambda _, original, values, __: original(values, float("inf"))),
    "clip-each-tensor": ("accelerator.clip_grad_norm_", clip_each_tensor),
    "decayed-norms": ("get_decay_parameter_names", lambda _, __, model: [name for name, _ in model.named_parameters()]),
    "clipped-norm-logged": (
        "_get_grad_norm",
        lambda trainer, original, *args, **kwargs: min(original(*args, **kwargs), trainer.args.max_grad_norm),
    ),
    "last-loss-logged": ("training_step", last_loss_logged),
    "next-rate-logged": ("_maybe_log_save_evaluate", next_rate_logged),
}
"""A method of the trainer, and what stands in its place: called with the trainer, the original and the arguments."""

# Faults of a run


class BetweenSteps(TrainerCallback):  # type: ignore[misc]
    """Faults that act between steps."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.kept: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if self.fault == "no-optimizer-step":
            optimizer.step = lambda *_, **__: None
        elif self.fault == "skip-update":
            step = optimizer.step
            optimizer.step = lambda *args, **kw: step(*args, **kw) if state.global_step % 2 else None
        elif self.fault == "forget-optimizer" and state.global_step:
            optimizer.optimizer.state.clear()
        elif self.fault == "frozen-adapter":
            self.kept = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = dict(kwargs["model"].named_parameters())
        if self.fault == "frozen-adapter":
            load(named, self.kept)
        elif self.fault == "train-base":
            next(value for name, value in named.items() if not value.requires_grad).data.view(-1)[0] += 1e-3
        elif self.fault == "nan-weight" and state.global_step == 2:
            next(iter(named.values())).data.view(-1)[0] = float("nan")
        elif self.fault == "early-exit" and state.global_step == 2:
            os._exit(0)
        elif self.fault == "hang" and state.global_step == 2:
            time.sleep(10**6)


def break_reward(function: Any, fault: str | None) -> Any:
    """The reward function, or a broken one of the same name."""
    calls = 0

    def broken(completion_ids: Any, **kwargs: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if fault == "reward-raises" and calls == 3:
            raise RuntimeError("reward backend unavailable")
        return [0.5] * len(completion_ids) if fault == "constant-reward" else function(completion_ids=completion_ids, **kwargs)

    broken.__name__ = function.__name__
    return broken if fault in ("constant-reward", "reward-raises") else function


def break_run(trainer: Any, fault: str | None) -> None:
    """Faults that act on a trainer that is already watched."""
    if fault == "no-grad-sync":
        wrap(trainer, "accelerator.prepare", without_ddp)
    elif fault == "forget-rng":
        trainer._load_rng_state = lambda *_: None
    elif fault == "nan-loss":
        wrap(
            trainer,
            "training_step",
            lambda inner, *args, **kw: inner(*args, **kw) + (float("nan") if trainer.state.global_step == 2 else 0.0),
        )
    elif fault == "frozen-layer":
        trainer.model.model.layers[0].requires_grad_(False)
    elif fault == "wrong-reference":
        for value in trainer.ref_model.parameters():
            value.data *= 1.5
    elif fault == "half-advantages":
        wrap(trainer, "_generate_and_score_completions", functools.partial(with_change, trainer, half_advantages))
    elif fault in ("wrong-mask", "blind-generation", "swapped-pictures"):
        wrap(trainer, "model.generate", functools.partial(misled, fault))
    elif fault == "blind" and hasattr(trainer.processing_class, "image_processor"):
        kind = type(trainer.processing_class.image_processor)  # of the class: a processor is saved with the model
        kind.preprocess = blank(kind.preprocess)
    if fault in FAULTS:
        trainer.add_callback(BetweenSteps(fault))


def half_advantages(_: Any, output: dict[str, Any]) -> None:
    output["advantages"][: len(output["advantages"]) // 2] = 0


def misled(fault: str, generate: Any, **kwargs: Any) -> Any:
    if fault == "wrong-mask":
        kwargs["attention_mask"] = kwargs["attention_mask"] * 0 + 1
    elif "pixel_values" in kwargs:
        pictures = kwargs["pixel_values"]
        kwargs["pixel_values"] = pictures * 0 if fault == "blind-generation" else pictures.roll(len(pictures) // 2 + 4, 0)
    return generate(**kwargs)


def blank(preprocess: Any) -> Any:
    def blanked(processor: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        made = preprocess(processor, images, *args, **kwargs)
        for index, value in enumerate(made["pixel_values"]):
            made["pixel_values"][index] = value * 0
        return made

    return blanked


def without_ddp(prepare: Any, *objects: Any, **kwargs: Any) -> Any:
    """Accelerate's `prepare`, which here leaves the model unwrapped: no gradient is exchanged."""
    placement = [not isinstance(item, torch.nn.Module) for item in objects]
    return prepare(*objects, device_placement=placement, **kwargs) if all(placement) else objects[0] if len(objects) == 1 else objects
