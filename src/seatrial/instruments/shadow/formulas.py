"""The published formulas of a policy-gradient step, its schedules and optimizers, in the precision of their arguments. No code of any loop.

Shapes: B rows, T completion tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from seatrial.instruments.shadow.interface import ShadowSettings

Tensor = Any
REDUCTIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
"""How a clipped loss is summed up over the rows of one optimizer step."""
KL_BOUND, KL_LIMIT = 20.0, 10.0  # k3-bounded is made of differences up to the first, and counts up to the second
WHITEN_FLOOR = 1e-8
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def nan_std(values: Tensor, dim: int | None = None) -> Tensor:
    """Standard deviation with Bessel's correction, without NaN."""
    known = ~torch.isnan(values)
    over = {} if dim is None else {"dim": dim, "keepdim": True}
    count = known.sum(**over).to(values.dtype)
    mean = torch.where(known, values, 0).sum(**over) / count
    made = (torch.where(known, (values - mean) ** 2, 0).sum(**over) / (count - 1)).sqrt()
    return made if dim is None else made.squeeze(dim)


def total_rewards(rewards: Tensor, settings: ShadowSettings) -> Tensor:
    """Weighted sum over functions [rows, functions], without NaN; NaN where every function gave none."""
    total = torch.nansum(rewards * torch.tensor(settings.reward_weights, dtype=rewards.dtype), dim=1)
    return torch.where(torch.isnan(rewards).all(1), torch.nan, total)


def compared_rewards(rewards: Tensor, settings: ShadowSettings) -> tuple[Tensor, Tensor, Tensor]:
    """What advantages are made of, for each row: its total reward, the mean it is compared with, and the spread it may be divided by."""
    group = settings.group
    if settings.aggregation == "normalize_then_sum":
        grouped = rewards.view(-1, group, rewards.shape[1])
        scaled = (grouped - torch.nanmean(grouped, dim=1, keepdim=True)) / (nan_std(grouped, 1).unsqueeze(1) + settings.std_floor)
        total = total_rewards(scaled.view(-1, rewards.shape[1]), settings)
        return total, torch.nanmean(total), nan_std(total).expand(len(total))
    total = total_rewards(rewards, settings)
    grouped = total.view(-1, group)
    mean = torch.nanmean(grouped, 1).repeat_interleave(group)
    batch = settings.scale == "batch"
    return total, mean, nan_std(total).expand(len(total)) if batch else nan_std(grouped, 1).repeat_interleave(group)


def advantages(rewards: Tensor, settings: ShadowSettings) -> Tensor:
    """Advantages of whole groups, rows in the order of their groups."""
    total, mean, spread = compared_rewards(rewards, settings)
    divides = settings.aggregation == "normalize_then_sum" or settings.scale in ("group", "batch")
    return torch.nan_to_num((total - mean) / (spread + settings.std_floor) if divides else total - mean, nan=0.0)


def zero_std(rewards: Tensor, settings: ShadowSettings) -> Tensor:
    """Which rows are in a group (or batch) without spread, but for rounding."""
    return compared_rewards(rewards, settings)[2] < 1e-6


def exact(rewards: Tensor) -> Tensor:
    """Rows whose rewards are short binary fractions: equal ones have no spread in any precision."""
    return (torch.nan_to_num(rewards) * 4096 % 1 == 0).all(1)


def advantage_noise(rewards: Tensor, settings: ShadowSettings, eps: float) -> Tensor:
    """How far rounding in the loop's precision may move each advantage: a small spread enlarges it."""
    error = 16 * eps * max(1.0, float(torch.nan_to_num(rewards).abs().max()))
    group, floor = settings.group, settings.std_floor
    spread = torch.nan_to_num(compared_rewards(rewards, settings)[2], nan=0.0)
    if settings.aggregation == "normalize_then_sum":
        weights = torch.tensor(settings.reward_weights, dtype=rewards.dtype)
        spreads = torch.nan_to_num(nan_std(rewards.view(-1, group, rewards.shape[1]), 1), nan=0.0).unsqueeze(1)
        noise = (error / (spreads + floor) * weights.abs()).sum(-1).expand(-1, group).reshape(-1)
        return (noise + float(noise.mean())) / (spread + floor)
    if settings.scale == "none":
        return torch.full((len(rewards),), error, dtype=torch.float64)
    noise = error / (spread + floor)
    if settings.scale == "batch":
        return noise
    return torch.where(zero_std(rewards, settings) & exact(rewards), torch.zeros_like(noise), noise)


def token_rewards(total: Tensor, mask: Tensor, old: Tensor | None, ref: Tensor | None, s: ShadowSettings) -> Tensor:
    """Rewards of tokens [B, T]: that of the completion at its last token, less the KL penalty of each token."""
    made = torch.zeros(mask.shape, dtype=total.dtype)
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    made[torch.arange(len(total)), last] = total
    if s.reward_beta and old is not None and ref is not None:
        made = made - s.reward_beta * kl_estimate(old, ref, s.reward_kl) * mask
    return made


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: whitened advantages and returns, both [B, T]."""
    raw = torch.zeros_like(values)
    ahead = torch.zeros(len(values), dtype=values.dtype)
    value_ahead = torch.zeros_like(ahead)
    for place in reversed(range(values.shape[1])):
        inside = mask[:, place].to(values.dtype)
        delta = rewards[:, place] + gamma * value_ahead - values[:, place]
        ahead = torch.where(inside > 0, delta + gamma * lam * ahead, ahead)
        value_ahead = torch.where(inside > 0, values[:, place], value_ahead)
        raw[:, place] = ahead
    return whitened(raw, mask), raw + values


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the masked tokens of the whole batch."""
    count = mask.sum().to(values.dtype)
    mean = (values * mask).sum() / count
    spread = ((values - mean) ** 2 * mask).sum() / (count - 1)
    return (values - mean) / (spread + WHITEN_FLOOR).sqrt()


KL_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda gap: gap,
    "abs": lambda gap: gap.abs(),
    "k2": lambda gap: 0.5 * gap**2,
    "k3": lambda gap: (-gap).exp() + gap - 1,
    "k3-bounded": lambda gap: _bounded_k3((-gap).clamp(-KL_BOUND, KL_BOUND)),
}
KL_TYPES = tuple(KL_ESTIMATES)


def _bounded_k3(gap: Tensor) -> Tensor:
    return (gap.exp() - gap - 1).clamp(-KL_LIMIT, KL_LIMIT)


def kl_estimate(logps: Tensor, ref: Tensor, kind: str) -> Tensor:
    """An estimate of the KL divergence from the reference, per token; `+` keeps the value and takes the gradient of k2."""
    base = kind.removesuffix("+")
    if base not in KL_ESTIMATES:
        raise ValueError(f"no formula for the KL estimate {kind}")
    made = KL_ESTIMATES[base](logps - ref)
    if base == kind or base == "k2":
        return made
    square = KL_ESTIMATES["k2"](logps - ref)
    return square - square.detach() + made.detach()


def value_terms(predicted: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The clipped squared error of values per token, before it is reduced; and where clipping made it larger."""
    free = (predicted - returns) ** 2
    bounded = (torch.min(torch.max(predicted, old - clip), old + clip) - returns) ** 2
    return 0.5 * torch.max(free, bounded), bounded > free


def processed(scores: Tensor, prefix: Tensor, mask: Tensor, settings: ShadowSettings, removed: Counter[str]) -> tuple[Tensor, Tensor]:
    """Scores after every processor, for one position [B, V]; and where rounding alone may decide whether a token stays.

    `prefix` holds the tokens so far, with the padding on the left, and `mask` says what is none: transformers penalises padding as
    repeated, too, vLLM does not, and has min-p before the others. What each processor removed is counted.
    """
    near = torch.zeros_like(scores, dtype=torch.bool)
    vllm = settings.processors == "vllm"
    if settings.processors in ("none", "temperature"):
        return scores / (settings.temperature if settings.processors == "temperature" else 1.0), near
    if settings.repetition_penalty != 1.0:
        counted = mask if vllm else torch.ones_like(prefix)
        seen = torch.zeros_like(scores, dtype=torch.long).scatter_add_(1, prefix, counted.long()) > 0
        penalised = torch.where(scores < 0, scores * settings.repetition_penalty, scores / settings.repetition_penalty)
        scores = torch.where(seen, penalised, scores)
    scores = scores / settings.temperature
    if settings.suppressed:
        scores = scores.index_fill(1, torch.tensor(settings.suppressed), -math.inf)
    if settings.min_p and vllm:
        scores = _unlikely(scores, settings.min_p, near, removed)
    if settings.top_k and settings.top_k < scores.shape[-1]:
        ordered = torch.topk(scores, settings.top_k + 1).values
        edge, tie = ordered[:, -2:-1], ordered[:, -2:-1] - ordered[:, -1:] < 1e-5
        near |= tie & ((scores - edge).abs() < 1e-5)
        removed["top_k"] += int((scores < edge).sum())
        scores = scores.masked_fill(scores < edge, -math.inf)
    if settings.top_p < 1.0:
        ordered, order = torch.sort(scores)
        below = ordered.softmax(-1).cumsum(-1)
        out = below <= 1 - settings.top_p
        out[:, -1] = False
        close = (below - (1 - settings.top_p)).abs() < 1e-5
        near |= torch.zeros_like(near).scatter(1, order, close)
        last = ordered.masked_fill(~out, -math.inf).max(-1, keepdim=True).values
        first = ordered.masked_fill(out, math.inf).min(-1, keepdim=True).values
        near |= (first - last < 1e-5) & ((scores - first).abs() < 1e-5)
        removed["top_p"] += int((out & torch.isfinite(ordered)).sum())
        scores = scores.masked_fill(torch.zeros_like(near).scatter(1, order, out), -math.inf)
    if settings.min_p and not vllm:
        scores = _unlikely(scores, settings.min_p, near, removed)
    return scores, near


def _unlikely(scores: Tensor, share: float, near: Tensor, removed: Counter[str]) -> Tensor:
    """Scores without tokens below `share` of the likeliest one; adds to `near` and `removed`."""
    shares = scores.softmax(-1)
    edge = share * shares.max(-1, keepdim=True).values
    near |= (shares - edge).abs() < 1e-6
    removed["min_p"] += int(((shares < edge) & torch.isfinite(scores)).sum())
    return scores.masked_fill(shares < edge, -math.inf)


def correction(old: Tensor, said: Tensor, mask: Tensor, settings: ShadowSettings) -> Tensor:
    """What a loss is multiplied by because its generator said `said` where the policy says `old`: [B, T], or [B, 1] by sequence.

    A token that the generator said nothing of (NaN) counts as alike.
    """
    gap = torch.nan_to_num((old - said) * mask, nan=0.0)
    kind, _, bound = str(settings.correction).partition("_")
    ratio = (gap.sum(-1, keepdim=True) if kind == "sequence" else gap).exp()
    low, high = settings.correction_bounds
    return ratio.clamp(low, high) if bound == "truncate" else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def off_policy_mask(advantage: Tensor, logps: Tensor, old: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Rows that stay: a positive advantage, or a small mean divergence from what was sampled."""
    drift = (torch.nan_to_num(old - logps.detach(), nan=0.0) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1.0)
    return ((advantage >= 0) | (drift <= threshold)).to(mask.dtype)


def entropy_mask(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    known = entropies[mask.bool()].float()
    edge = torch.quantile(known, 1 - quantile)
    return ((entropies * mask).float() >= edge) & mask.bool()


def vespo_weights(advantage: Tensor, log_ratio: Tensor, mask: Tensor, settings: ShadowSettings, correction: Tensor | None = None) -> Tensor:
    """Gamma weights of a whole sequence; the correction for another generator's probabilities is part of its ratio."""
    k_pos, l_pos, k_neg, l_neg = settings.vespo
    log_w = (log_ratio.clamp(-20, 20) * mask).sum(-1, keepdim=True)
    if correction is not None:
        log_w = log_w + correction.log().clamp(math.log(1e-8), 20).sum(-1, keepdim=True)
    log_w = log_w.clamp(math.log(1e-8), 20)
    positive = advantage >= 0
    k = torch.where(positive, k_pos, k_neg)
    rate = torch.where(positive, l_pos, l_neg).clamp(min=1e-4)
    return torch.exp(rate + k * log_w - rate * log_w.exp()).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).detach()


class Terms:
    """What one micro-batch contributes: the policy's part and the KL part, each before it is summed.

    `said` is what another generator said of its tokens, and `correction` what the loss makes of that.
    """

    def __init__(
        self,
        logps: Tensor,
        old: Tensor,
        ref: Tensor | None,
        entropies: Tensor,
        mask: Tensor,
        advantage: Tensor,
        s: ShadowSettings,
        said: Tensor | None = None,
        correction: Tensor | None = None,
    ) -> None:
        advantage = advantage.unsqueeze(1) if advantage.dim() == 1 else advantage
        log_ratio = logps - old
        weight = log_ratio
        if s.level == "sequence":
            weight = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        ratio = weight.exp()
        self.ratio, self.mask, self.advantage, self.entropies = ratio, mask, advantage, entropies
        self.clipped: Tensor | None = None
        self.kl: Tensor | None = None
        if ref is not None:
            self.kl = kl_estimate(logps, ref, s.kl_type)
            if s.kl_correction:
                self.kl = self.kl * ratio
        if s.loss_type == "cispo":
            policy = -ratio.clamp(max=s.epsilon_high).detach() * advantage * logps
        elif s.loss_type == "sapo":
            heat = torch.where(advantage > 0, s.sapo[0], s.sapo[1])
            policy = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantage
        elif s.loss_type == "vespo":
            self.phi = vespo_weights(advantage, log_ratio, mask, s, correction)
            policy = -self.phi * advantage * logps
        else:
            bounded = ratio.clamp(1 - s.epsilon_low, 1 + s.epsilon_high)
            free = ratio.clamp(max=s.delta) if s.delta is not None else ratio
            policy = -torch.min(free * advantage, bounded * advantage)
            self.clipped = bounded * advantage < free * advantage
            if s.dual_clip is not None:
                policy = torch.where(advantage < 0, torch.min(policy, -s.dual_clip * advantage), policy)
        self.kept = advantage  # advantages of what was not left out as too far off the policy
        if s.off_policy_threshold is not None:
            stays = off_policy_mask(advantage, logps, old if said is None else said, mask, s.off_policy_threshold)
            policy, self.kept = policy * stays, advantage * stays
        self.entropy_mask = entropy_mask(entropies, mask, s.quantile) if s.quantile < 1.0 else None
        if self.entropy_mask is not None:
            policy = policy * self.entropy_mask
        if correction is not None and s.loss_type != "vespo":
            policy = policy * correction
        self.policy = policy.expand(-1, mask.shape[1]) if policy.shape[1] == 1 and s.loss_type != "luspo" else policy

    def is_clipped(self) -> bool:
        return self.clipped is not None and bool((self.clipped & (self.mask > 0)).any())

    def per_row(self, values: Tensor) -> Tensor:
        """Mean over the tokens of each row; rows without a token are left out."""
        if values.shape[1] == 1:
            return values.squeeze(1) if self.mask.shape[1] != 1 else (values * self.mask).squeeze(1)
        count = self.mask.sum(-1)
        return ((values * self.mask).sum(-1) / count)[count > 0]


def masked_mean(parts: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Mean over the masked tokens of several micro-batches together, or over rows where there is one value per row."""
    total = count = 0.0
    for values, mask in parts:
        total += float((values * mask).sum() if values.shape[1] == mask.shape[1] else values.sum())
        count += float(len(values) if values.shape[1] == 1 else mask.sum())
    return total / max(count, 1.0)


BY_TOKENS = ("cispo", "dapo", "vespo")  # loss types that divide by the tokens of the whole generation


def reduced(values: Tensor, mask: Tensor, tokens: float, s: ShadowSettings, step_tokens: float = 0.0) -> Tensor:
    """One micro-batch's share of the loss of an optimizer step. `tokens` are those of the whole generation, `step_tokens` of the step."""
    if s.loss_type in REDUCTIONS:
        return _by_name(values, mask, step_tokens, s)
    if s.loss_type in ("grpo", "sapo"):
        return ((values * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / s.accumulation
    if s.loss_type == "bnpo":
        return (values * mask).sum() / mask.sum().clamp(min=1.0) / s.accumulation
    if s.loss_type == "dr_grpo":
        return (values * mask).sum() / (len(values) * s.max_tokens) / s.accumulation
    if s.loss_type in BY_TOKENS:
        return (values * mask).sum() / (max(tokens, 1.0) / s.world * s.accumulation / s.splits)
    if s.loss_type == "luspo":
        return (values * mask).sum(-1).mean() / s.accumulation
    raise ValueError(f"no formula for loss_type {s.loss_type}")


def _by_name(values: Tensor, mask: Tensor, tokens: float, s: ShadowSettings) -> Tensor:
    """By one of `REDUCTIONS`: rows and tokens are counted over all micro-batches of an optimizer step."""
    rows = float(s.micro_batch * s.accumulation)
    summed = (values * mask).sum(-1)
    if s.loss_type == "token-mean":
        return summed.sum() / max(tokens, 1.0)
    if s.loss_type == "token-sum":
        return summed.sum()
    if s.loss_type == "seq-mean-token-mean":
        return (summed / (mask.sum(-1) + 1e-8)).sum() / rows
    if s.loss_type == "seq-mean-token-sum-norm":
        longest = float(mask.sum(-1).max()) if s.loss_scale is None else s.loss_scale
        return summed.sum() / rows / longest
    return summed.sum() / rows


EPS = 1.2e-7  # the spacing of fp32 numbers around 1
NO_DECAY = tuple(re.compile(pattern) for pattern in (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"))
ADAM = ("adamw", "adam")
OPTIMIZERS = (*ADAM, "sgd", "adagrad", "rmsprop")
SCHEDULES = (
    *("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"),
    "cosine_with_min_lr",
)

BOUNDED = ("bounded_constant", "bounded_linear", "bounded_cosine")
"""Schedules from `init_lr` up to the learning rate, then down to `min_lr` at `decay_steps`."""


def rate(step: int, s: ShadowSettings) -> float:
    """The learning rate of an optimizer step, counted from 1."""
    done = (step - 1) // s.steps_per_round() if s.rate_per_round else step - 1
    done += int(s.schedule_options.get("ahead", 0))
    warm, total = s.warmup, s.max_steps
    if s.schedule in BOUNDED:
        return _bounded(done, s)
    if s.schedule == "constant":
        return s.learning_rate
    if done < warm:
        return s.learning_rate * done / max(1, warm)
    if s.schedule == "constant_with_warmup":
        return s.learning_rate
    if s.schedule == "linear":
        return s.learning_rate * max(0.0, (total - done) / max(1, total - warm))
    if s.schedule == "inverse_sqrt":
        span = s.schedule_options.get("timescale") or warm or 10_000
        return s.learning_rate / math.sqrt((done + span - warm) / span)
    share = (done - warm) / max(1, total - warm)
    if s.schedule == "cosine_with_restarts":
        cycles = s.schedule_options.get("num_cycles", 1)
        return s.learning_rate * (0.0 if share >= 1 else max(0.0, 0.5 * (1 + math.cos(math.pi * ((cycles * share) % 1.0)))))
    if s.schedule in ("cosine", "cosine_with_min_lr"):
        low = 0.0
        if s.schedule == "cosine_with_min_lr":
            low = s.schedule_options.get("min_lr_rate", s.schedule_options.get("min_lr", 0.0) / s.learning_rate)
        cycles = s.schedule_options.get("num_cycles", 0.5)
        return s.learning_rate * max(0.0, 0.5 * (1 + math.cos(math.pi * cycles * 2 * share)) * (1 - low) + low)
    if s.schedule == "polynomial":
        end, power = s.schedule_options.get("lr_end", 1e-7), s.schedule_options.get("power", 1.0)
        if done > total:
            return end
        return float((s.learning_rate - end) * (1 - (done - warm) / (total - warm)) ** power + end)
    raise ValueError(f"no formula for the schedule {s.schedule}")


def _bounded(done: int, s: ShadowSettings) -> float:
    low, start = s.schedule_options.get("min_lr", 0.0), s.schedule_options.get("init_lr", 0.0)
    warm, end = s.warmup, s.schedule_options.get("decay_steps", s.max_steps)
    if warm > 0 and done <= warm:
        return start + (s.learning_rate - start) * done / warm
    if s.schedule == "bounded_constant":
        return s.learning_rate
    if done > end:
        return low
    share = (done - warm) / max(1.0, end - warm)
    kept = 1 - share if s.schedule == "bounded_linear" else 0.5 * (1 + math.cos(math.pi * share))
    return low + kept * (s.learning_rate - low)


class Moments:
    """The optimizer's state in fp64, fed with the gradients that were recorded."""

    def __init__(self, settings: ShadowSettings, norms: Container[str] = ()) -> None:
        self.settings, self.norms = settings, norms
        self.state: dict[str, dict[str, Any]] = {}
        self.slack: dict[str, Any] = {}  # what rounding in fp32 may change of each weight, where a gradient and a decay nearly cancel

    def decays(self, name: str, dimensions: int) -> bool:
        """Whether weight decay applies to a parameter, by the rule of `Settings.decays`: `named` also knows norms as layers of torch."""
        if self.settings.decays == "all":
            return True
        if self.settings.decays == "matrices":
            return dimensions > 1 and not name.endswith(".bias")
        plain = name.removeprefix("base_model.model.")
        return plain not in self.norms and not any(pattern.search(name.lower()) for pattern in NO_DECAY)

    def step(self, weights: Mapping[str, Any], gradients: Mapping[str, Any], lr: float) -> dict[str, Any]:
        return {name: self._one(name, weights[name].double(), gradients[name].double(), lr) for name in gradients}

    def _one(self, name: str, weight: Any, gradient: Any, lr: float) -> Any:
        s = self.settings
        kept = self.state.setdefault(name, {"count": 0})
        kept["count"] += 1
        decay = s.weight_decay if self.decays(name, weight.dim()) else 0.0
        if s.optimizer in ADAM:
            return self._adam(kept, weight, gradient, lr, decay)
        lost = 8 * EPS * lr * (gradient.abs() + (decay * weight).abs())
        gradient = gradient + decay * weight
        options = s.optimizer_options
        if s.optimizer == "sgd":
            momentum = float(options.get("momentum", 0.0))
            if momentum:
                kept["buffer"] = gradient.clone() if "buffer" not in kept else momentum * kept["buffer"] + gradient
                kept["lost"] = momentum * kept.get("lost", 0.0) + lost
                lost = kept["lost"] + lost
                gradient = gradient + momentum * kept["buffer"] if options.get("nesterov") else kept["buffer"]
            self.slack[name] = lost
            return weight - lr * gradient
        if s.optimizer not in ("adagrad", "rmsprop"):
            raise ValueError(f"no formula for the optimizer {s.optimizer}")
        alpha = float(options.get("alpha", 0.99))
        old, new, eps = (1.0, 1.0, 1e-10) if s.optimizer == "adagrad" else (alpha, 1 - alpha, 1e-8)
        kept["square"] = old * kept.get("square", torch.zeros_like(weight)) + new * gradient**2
        below = kept["square"].sqrt() + float(options.get("eps", eps))
        self.slack[name] = lost / below
        return weight - lr * gradient / below

    def _adam(self, kept: dict[str, Any], weight: Any, gradient: Any, lr: float, decay: float) -> Any:
        s = self.settings
        one, two = s.betas
        if s.optimizer == "adam" and decay:
            gradient = gradient + decay * weight
        kept["mean"] = one * kept.get("mean", torch.zeros_like(weight)) + (1 - one) * gradient
        kept["square"] = two * kept.get("square", torch.zeros_like(weight)) + (1 - two) * gradient**2
        mean, square = kept["mean"] / (1 - one ** kept["count"]), kept["square"] / (1 - two ** kept["count"])
        shrunk = weight * (1 - lr * decay) if s.optimizer == "adamw" else weight
        return shrunk - lr * mean / (square.sqrt() + s.epsilon)
