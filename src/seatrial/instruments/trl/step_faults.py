"""Silent faults of one training step, each where a real bug would be: in the trainer's methods, its model, optimizer or sampler.

`inject` runs before the recorder is attached, so that the record sees a broken method as it would see one that somebody wrote. The
table in fault_names.py says what each fault does and which stage names it; the name of a function is that of its fault.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from trl.trainer import grpo_trainer

INJECTORS: dict[str, Callable[[Any], None]] = {}


def inject(trainer: Any, name: str | None) -> None:
    """Break a trainer that is built and not yet watched; names of other faults do nothing here."""
    if name in INJECTORS:
        INJECTORS[name](trainer)


def fault(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """Enter a function into the table."""
    INJECTORS[function.__name__.replace("_", "-")] = function
    return function


def wrap(owner: Any, method: str, change: Callable[..., Any]) -> None:
    """Replace a method by `change(original, *arguments)`."""
    original = getattr(owner, method)
    setattr(owner, method, lambda *args, **kwargs: change(original, *args, **kwargs))


def change_output(trainer: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what generation and scoring hand to the loss."""

    def scored(original: Any, inputs: Any) -> Any:
        output = original(inputs)
        change(output)
        return output

    wrap(trainer, "_generate_and_score_completions", scored)


# weights


@fault
def reinitialised_layer(trainer: Any) -> None:
    torch.nn.init.normal_(trainer.model.model.layers[1].mlp.down_proj.weight, std=0.02)


@fault
def rounded_weights(trainer: Any) -> None:
    for value in trainer.model.parameters():
        value.data = value.data.bfloat16().float()


@fault
def swapped_weights(trainer: Any) -> None:
    first, second = (layer.self_attn.q_proj.weight for layer in trainer.model.model.layers[:2])
    first.data, second.data = second.data, first.data


@fault
def lora_scaled_twice(trainer: Any) -> None:
    for module in adapted(trainer):
        module.scaling = {key: value**2 for key, value in module.scaling.items()}


@fault
def lora_frozen_layer(trainer: Any) -> None:
    next(adapted(trainer)).lora_A.requires_grad_(False)


def adapted(trainer: Any) -> Any:
    """The layers that have adapters."""
    return (module for module in trainer.model.modules() if getattr(module, "lora_A", None))


# data


class Listed(torch.utils.data.Sampler[int]):  # type: ignore[misc]
    """A sampler with a fixed order."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __iter__(self) -> Any:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def reorder(trainer: Any, change: Callable[[list[int]], list[int]]) -> None:
    """Change the order that the sampler gives."""
    wrap(trainer, "_get_train_sampler", lambda original, *args: Listed(change(list(original(*args)))))


@fault
def stuck_sampler(trainer: Any) -> None:
    size = trainer.args.generation_batch_size
    reorder(trainer, lambda order: order[:size] * (len(order) // size))


@fault
def unshuffled_data(trainer: Any) -> None:
    reorder(trainer, lambda order: ranks(order))


def ranks(order: list[int]) -> list[int]:
    """Each prompt's place in the order in which prompts first come."""
    places = {row: place for place, row in enumerate(dict.fromkeys(order))}
    return [places[row] for row in order]


@fault
def split_groups(trainer: Any) -> None:
    size, group = trainer.args.generation_batch_size, trainer.num_generations

    def mixed(order: list[int]) -> list[int]:
        chunks = [order[start : start + size] for start in range(0, len(order), size)]
        return [row for chunk in chunks for offset in range(group) for row in chunk[offset::group]]

    reorder(trainer, mixed)


@fault
def repeated_micro_batch(trainer: Any) -> None:
    def prepared(original: Any, batch: Any) -> Any:
        made = original(batch)
        last = trainer._step % trainer.args.steps_per_generation == trainer.args.steps_per_generation - 1
        return trainer._buffered_inputs[0] if last else made

    wrap(trainer, "_prepare_inputs", prepared)


@fault
def shifted_columns(trainer: Any) -> None:
    group = trainer.num_generations
    wrap(trainer, "_calculate_rewards", lambda original, inputs, *rest: original(inputs[group:] + inputs[:group], *rest))


# sampling and length


@fault
def cold_generation(trainer: Any) -> None:
    trainer.generation_config.temperature *= 0.7


@fault
def no_top_p(trainer: Any) -> None:
    trainer.generation_config.top_p = 1.0


@fault
def no_repetition_penalty(trainer: Any) -> None:
    trainer.generation_config.repetition_penalty = 1.0


@fault
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

    wrap(trainer.model, "generate", generated)


def load(named: dict[str, Any], values: dict[str, Any]) -> None:
    """Copy values into parameters."""
    for name, value in values.items():
        named[name].data.copy_(value)


@fault
def biased_draws(trainer: Any) -> None:
    draw = torch.multinomial

    def generated(original: Any, *args: Any, **kwargs: Any) -> Any:
        torch.multinomial = lambda shares, *rest, **more: draw(shares**2, *rest, **more)
        try:
            return original(*args, **kwargs)
        finally:
            torch.multinomial = draw

    wrap(trainer.model, "generate", generated)


@fault
def short_completions(trainer: Any) -> None:
    trainer.generation_config.max_new_tokens -= 2


@fault
def ignored_end(trainer: Any) -> None:
    trainer.eos_token_ids = [-1]


@fault
def stripped_end(trainer: Any) -> None:
    def generated(original: Any, *args: Any, **kwargs: Any) -> Any:
        completions, logprobs = original(*args, **kwargs)
        return [ids[:-1] if len(ids) > 1 and ids[-1] in trainer.eos_token_ids else ids for ids in completions], logprobs

    wrap(trainer, "_generate_single_turn", generated)


# reward and advantage


def change_rewards(trainer: Any, change: Callable[[Any], Any]) -> None:
    """Change the trainer's table of rewards [completions, functions]."""
    wrap(trainer, "_calculate_rewards", lambda original, *args: change(original(*args)))


@fault
def shifted_rewards(trainer: Any) -> None:
    change_rewards(trainer, lambda table: table.roll(-1, 0))


@fault
def shifted_texts(trainer: Any) -> None:
    def calculated(original: Any, inputs: Any, prompts: Any, texts: Any, ids: Any) -> Any:
        return original(inputs, prompts, texts[1:] + texts[:1], ids)

    wrap(trainer, "_calculate_rewards", calculated)


@fault
def swapped_rewards(trainer: Any) -> None:
    change_rewards(trainer, lambda table: table.flip(1))


@fault
def clipped_rewards(trainer: Any) -> None:
    change_rewards(trainer, lambda table: table.clamp(max=0.5))


@fault
def batch_deviation(trainer: Any) -> None:
    trainer.scale_rewards = "batch"


@fault
def swapped_reward_weights(trainer: Any) -> None:
    trainer.reward_weights = trainer.reward_weights.flip(0)


@fault
def absolute_advantages(trainer: Any) -> None:
    change_output(trainer, lambda output: output.update(advantages=output["advantages"].abs()))


@fault
def population_deviation(trainer: Any) -> None:  # noqa: ARG001 - all act on a trainer
    def population(original: Any, values: Any, dim: Any = None, **kwargs: Any) -> Any:
        count = values.shape[dim] if dim is not None else values.numel()
        return original(values, dim=dim, **kwargs) * ((count - 1) / count) ** 0.5

    wrap(grpo_trainer, "nanstd", population)


# reference and log-probabilities


@fault
def other_sync_alpha(trainer: Any) -> None:
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "sync_target_model"):
            wrap(callback, "sync_target_model", lambda original, model, target, alpha: original(model, target, alpha / 2))


@fault
def never_synced(trainer: Any) -> None:
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "sync_target_model"):
            callback.sync_target_model = lambda *_: None


@fault
def live_reference(trainer: Any) -> None:
    trainer.ref_model = trainer.model


@fault
def adapted_reference(trainer: Any) -> None:  # noqa: ARG001 - all act on a trainer
    wrap(grpo_trainer, "use_adapter", lambda _, model, **__: contextlib.nullcontext(model))


def change_logps(trainer: Any, change: Callable[[Any], Any]) -> None:
    """Change the log-probabilities that every forward pass of the trainer gives."""

    def computed(original: Any, *args: Any, **kwargs: Any) -> Any:
        logps, *rest = original(*args, **kwargs)
        return (change(logps), *rest)

    wrap(trainer, "_get_per_token_logps_and_entropies", computed)


@fault
def untempered_logprobs(trainer: Any) -> None:
    grpo_trainer.add_fused_lm_head(trainer.model, temperature=1.0, outputs=("log_probs", "entropy"))


@fault
def shifted_logprobs(trainer: Any) -> None:
    change_logps(trainer, lambda logps: logps.roll(1, 1))


@fault
def half_precision_logprobs(trainer: Any) -> None:
    change_logps(trainer, lambda logps: logps.bfloat16().float())


@fault
def truncated_old_logprobs(trainer: Any) -> None:
    def cut(output: dict[str, Any]) -> None:
        output["old_per_token_logps"][:, 3:] = 0.0

    change_output(trainer, cut)


# ratio, KL, mask, loss


@fault
def other_epsilon(trainer: Any) -> None:
    trainer.epsilon_low, trainer.epsilon_high = 0.2, 0.28


@fault
def unclipped_ratio(trainer: Any) -> None:
    trainer.epsilon_low = trainer.epsilon_high = 1e9


@fault
def forgotten_policy(trainer: Any) -> None:
    change_output(trainer, lambda output: output.pop("old_per_token_logps"))


@fault
def one_sided_clip(trainer: Any) -> None:
    trainer.epsilon_low = 1.0


@fault
def sequence_ratio(trainer: Any) -> None:
    trainer.importance_sampling_level = "sequence"


@fault
def double_kl(trainer: Any) -> None:
    trainer.beta *= 2


@fault
def no_kl(trainer: Any) -> None:
    trainer.beta = 1e-12  # 0 would also drop the metric


@fault
def uncorrected_kl(trainer: Any) -> None:
    trainer.args.use_bias_correction_kl = False


def change_mask(trainer: Any, change: Callable[[Any, Any], Any]) -> None:
    """Change the loss mask, given with the completions."""
    change_output(trainer, lambda output: output.update(completion_mask=change(output["completion_mask"], output["completion_ids"])))


@fault
def unmasked_end(trainer: Any) -> None:
    change_mask(trainer, lambda mask, ids: mask * ~torch.isin(ids, torch.tensor(trainer.eos_token_ids)))


@fault
def masked_truncation(trainer: Any) -> None:
    trainer.mask_truncated_completions = True


@fault
def padding_in_loss(trainer: Any) -> None:
    change_mask(trainer, lambda mask, _: torch.ones_like(mask))


@fault
def masked_first_token(trainer: Any) -> None:
    def first(output: dict[str, Any]) -> None:
        output["tool_mask"] = torch.ones_like(output["completion_mask"])
        output["tool_mask"][:, 0] = 0

    change_output(trainer, first)


@fault
def double_loss(trainer: Any) -> None:
    wrap(trainer, "_compute_loss", lambda original, *args, **kwargs: 2 * original(*args, **kwargs))


@fault
def sequence_mean_loss(trainer: Any) -> None:
    trainer.loss_type = "grpo"


@fault
def undivided_loss(trainer: Any) -> None:
    def computed(original: Any, *args: Any, **kwargs: Any) -> Any:
        trainer.current_gradient_accumulation_steps = 1
        return original(*args, **kwargs)

    wrap(trainer, "_compute_loss", computed)


@fault
def own_token_count(trainer: Any) -> None:
    def computed(original: Any, model: Any, inputs: Any) -> Any:
        tokens = inputs["completion_mask"].sum() * trainer.args.steps_per_generation
        return original(model, {**inputs, "num_items_in_batch": tokens})

    wrap(trainer, "_compute_loss", computed)


# gradient and clip


@fault
def dropped_micro_batch(trainer: Any) -> None:
    def stepped(original: Any, model: Any, *rest: Any) -> Any:
        made = original(model, *rest)
        if trainer._step % trainer.args.gradient_accumulation_steps == 1:
            model.zero_grad()
        return made

    wrap(trainer, "training_step", stepped)


@fault
def detached_layer(trainer: Any) -> None:
    def detached(_: Any, args: Any, kwargs: Any) -> Any:
        return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in args), kwargs

    trainer.model.model.layers[1].register_forward_pre_hook(detached, with_kwargs=True)


@fault
def kept_gradient(trainer: Any) -> None:
    trainer.model.zero_grad = lambda *_, **__: None


@fault
def doubled_gradient(trainer: Any) -> None:
    trainer.model.model.layers[0].self_attn.q_proj.weight.register_hook(lambda gradient: 2 * gradient)


@fault
def lora_added_twice(trainer: Any) -> None:
    for module in adapted(trainer):
        module.lora_B.default.register_forward_hook(lambda _, __, output: 2 * output)


@fault
def other_clip_norm(trainer: Any) -> None:
    wrap(trainer.accelerator, "clip_grad_norm_", lambda original, values, limit: original(values, limit / 2))


@fault
def no_clip(trainer: Any) -> None:
    wrap(trainer.accelerator, "clip_grad_norm_", lambda original, values, _: original(values, float("inf")))


@fault
def clip_each_tensor(trainer: Any) -> None:
    def clipped(original: Any, values: Any, limit: float) -> Any:
        values = list(values)
        norm = original(values, float("inf"))
        for value in values:
            torch.nn.utils.clip_grad_norm_([value], limit / 2)
        return norm

    wrap(trainer.accelerator, "clip_grad_norm_", clipped)


# schedule and update


def change_optimizer(trainer: Any, change: Callable[[Any], None]) -> None:
    """Change torch's optimizer once it is made."""

    def created(original: Any, *args: Any) -> Any:
        made = original(*args)
        change(made)
        return made

    wrap(trainer, "create_optimizer", created)


def change_rate(trainer: Any, change: Callable[[Callable[[int], float], int], float]) -> None:
    """Change the schedule, given the right one and the number of steps done."""

    def created(original: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler = original(*args, **kwargs)
        scheduler.lr_lambdas = [lambda step, right=right: change(right, step) for right in scheduler.lr_lambdas]
        return scheduler

    wrap(trainer, "create_scheduler", created)


@fault
def long_warmup(trainer: Any) -> None:
    trainer.args.warmup_steps += 1


@fault
def stuck_schedule(trainer: Any) -> None:
    change_rate(trainer, lambda right, step: right(min(step, 2)))


@fault
def double_schedule(trainer: Any) -> None:
    change_rate(trainer, lambda right, step: right(2 * step))


@fault
def third_rate_swapped_betas(trainer: Any) -> None:
    trainer.args.learning_rate /= 3
    trainer.args.adam_beta1, trainer.args.adam_beta2 = trainer.args.adam_beta2, trainer.args.adam_beta1


@fault
def decayed_norms(trainer: Any) -> None:
    wrap(trainer, "get_decay_parameter_names", lambda _, model: [name for name, _ in model.named_parameters()])


@fault
def lost_parameter(trainer: Any) -> None:
    lost = trainer.model.model.layers[0].input_layernorm.weight

    def without(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["params"] = [value for value in group["params"] if value is not lost]

    change_optimizer(trainer, without)


@fault
def rounded_update(trainer: Any) -> None:
    def rounded(optimizer: Any) -> None:
        step = optimizer.step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            made = step(*args, **kwargs)
            for value in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
                value.data = value.data.bfloat16().float()
            return made

        optimizer.step = stepped

    change_optimizer(trainer, rounded)


# logging


@fault
def stale_metric(trainer: Any) -> None:
    before: list[float] = [0.0]

    def logged(original: Any, logs: Any, *args: Any) -> Any:
        metrics = trainer._metrics["train"]
        if metrics.get("kl"):
            metrics["kl"], before[:] = list(before), metrics["kl"]
        return original(logs, *args)

    wrap(trainer, "log", logged)


@fault
def clipped_norm_logged(trainer: Any) -> None:
    wrap(trainer, "_get_grad_norm", lambda original, *args, **kwargs: min(original(*args, **kwargs), trainer.args.max_grad_norm))


@fault
def last_loss_logged(trainer: Any) -> None:
    def stepped(original: Any, *args: Any) -> Any:
        made = original(*args)
        last = trainer._step % trainer.args.gradient_accumulation_steps == 0
        return made if last else made * 0

    wrap(trainer, "training_step", stepped)


@fault
def next_rate_logged(trainer: Any) -> None:
    def logged(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "learning_rate": trainer.lr_scheduler.get_last_lr()[0]})

    wrap(trainer, "_maybe_log_save_evaluate", logged)
