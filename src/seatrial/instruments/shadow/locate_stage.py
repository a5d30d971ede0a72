"""Names the stage of a wrong gradient: the first value of the trainer's own that is not ours, or the weight that explains it.

Values of the trainer come first (`inputs`). Where they are all ours, the gradient is fitted: as a weighted sum of micro-batches and
KL terms (`weights`), then by changed weights of single tokens, one family of weights per stage (`tokens`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch

from seatrial.instruments.batch_record import sample
from seatrial.instruments.shadow import formulas
from seatrial.instruments.shadow.formulas import EPS
from seatrial.instruments.shadow.interface import Diverged, ShadowSettings
from seatrial.instruments.shadow.rounds import MicroBatch, Round

Tensor = Any
Gradient = dict[str, Tensor]
LOGPS = (
    ("old_per_token_logps", "logprob", "old log-probability"),
    ("logps", "logprob", "log-probability in the loss"),
    ("sampling_per_token_logps", "sampling", "log-probability that the generator said"),
    ("importance_sampling_ratio", "ratio", "correction for the generator's log-probabilities"),
    ("ref_per_token_logps", "reference", "reference log-probability"),
)
"""The reference last: where the policy's are wrong, too, both come from the same wrong forward pass."""
BINS = 32  # classes of ratios that a wrong clip is looked for in
LAST = 12  # tensors whose gradients are fitted by token weights
EXPLAINED = 0.3  # A family of token weights names its stage if it leaves at most this share of the deviation unexplained
STAGE_OF = {"kl": "kl", "entropy": "loss"}
NAME_OF = {"kl": "KL", "entropy": "entropy"}


def kept(own: Tensor, got: Tensor) -> Tensor:
    """What is recorded of a tensor: all of it, or a sample."""
    return own if own.shape == got.shape else sample(own)


def widened(got: Tensor, like: Tensor) -> Tensor:
    """A trainer's values per token, cut or filled up to the width of ours."""
    made = torch.zeros(like.shape, dtype=got.dtype)
    width = min(got.shape[1], like.shape[1])
    made[:, :width] = got[:, :width]
    return made


def advantages_off(part: MicroBatch, s: ShadowSettings) -> tuple[int, int] | None:
    """Row and token of the first advantage of the trainer that is not ours, None if all agree; a tiny spread enlarges rounding."""
    own, got = part.round.advantages[part.rows], part.trainer.get("advantages")
    if got is None:
        return None
    mask = part.round.mask[part.rows]
    if own.dim() == 2 or got.dim() == 2:
        got = widened(got.double(), mask) if got.dim() == 2 else got.double().unsqueeze(1)
        per_token = own if own.dim() == 2 else own.unsqueeze(1)
        allowed = 1e-4 * per_token.abs().clamp(min=1.0)
        if own.dim() == 1:
            allowed = torch.max(allowed, formulas.advantage_noise(part.round.table, s, EPS)[part.rows].unsqueeze(1))
        wrong = ~((per_token - got).abs() <= allowed) & (mask > 0)
    elif got.shape != own.shape:
        return None
    else:
        noise = formulas.advantage_noise(part.round.table, s, EPS)[part.rows]
        allowed = torch.where(own.abs() < noise, noise, 1e-4 * own.abs().clamp(min=1.0))
        wrong = (~((own - got.double()).abs() <= allowed)).unsqueeze(1)
    if not bool(wrong.any()):
        return None
    row, position = (int(value) for value in wrong.nonzero()[0])
    return row, position


def inputs(part: MicroBatch, index: int, s: ShadowSettings) -> None:
    """Raise Diverged at the first advantage, log-probability or mask of the trainer that is not ours."""
    made, rows, trainer = part.round, part.rows, part.trainer
    _mask(part, Diverged)
    place = advantages_off(part, s)
    if place is not None:
        row, position = place
        own, got = (value[position] if value.dim() else value for value in (made.advantages[rows[row]], trainer["advantages"][row]))
        raise Diverged("advantage", "an advantage", own, got, row=rows[row])
    known = {"ref_per_token_logps": made.ref, "old_per_token_logps": made.old, "sampling_per_token_logps": made.said}
    known["importance_sampling_ratio"] = made.correction
    ours = {"logps": part.own_logps, **{name: value[rows] for name, value in known.items() if value is not None}}
    _values(part, index, ((name, stage, what, ours.get(name)) for name, stage, what in LOGPS), Diverged)


def value_inputs(part: MicroBatch, index: int, diverged: Callable[..., Diverged]) -> None:
    """Raise Diverged at the first value, return or mask of the critic's trainer that is not ours."""
    _mask(part, diverged)
    values, returns = (table[part.rows] for table in (part.round.values, part.round.returns))
    named = (("values", "value", "an old value", values), ("returns", "advantage", "a return", returns))
    _values(part, index, (*named, ("predicted", "value", "a value in the loss", part.values)), diverged)


def _mask(part: MicroBatch, diverged: Callable[..., Diverged]) -> None:
    mask, theirs = part.round.mask[part.rows], part.trainer.get("completion_mask")
    if theirs is None:
        return
    if part.trainer.get("tool_mask") is not None:
        theirs = theirs * part.trainer["tool_mask"]
    theirs = widened(theirs.long(), mask)
    if not torch.equal(theirs, mask):
        row, position = (int(value) for value in (theirs != mask).nonzero()[0])
        raise diverged("mask", "loss mask", int(mask[row, position]), int(theirs[row, position]), row=part.rows[row], position=position)


def _values(part: MicroBatch, index: int, named: Iterable[tuple[str, str, str, Tensor]], diverged: Callable[..., Diverged]) -> None:
    """Compare what the trainer has per token with ours: its name, stage, what it is, our values (None: not known)."""
    mask = part.round.mask[part.rows]
    for name, stage, what, own in named:
        if own is None or part.trainer.get(name) is None:
            continue
        theirs = widened(part.trainer[name].double(), own)
        off = (own - theirs).abs() * mask[:, : own.shape[1]]
        if not float(off.max()) <= 1e-3:
            row, position = divmod(int(torch.nan_to_num(off, nan=math.inf).argmax()), own.shape[1])
            at = {"row": part.rows[row], "position": position}
            raise diverged(stage, f"{what} (micro-batch {index + 1})", own[row, position], theirs[row, position], **at)


def rewards(made: Round) -> None:
    """Raise Diverged at the first reward that the trainer's table does not have as its function gave it."""
    taken = made.taken
    if taken is None or taken.shape != made.table.shape:
        return
    same = torch.isclose(taken.double(), made.table, rtol=1e-5, atol=1e-6, equal_nan=True)
    if not bool(same.all()):
        row, column = (int(value) for value in (~same).nonzero()[0])
        what = f"the reward that the trainer took from {list(made.rewards)[column]}"
        raise Diverged("reward", what, made.table[row, column], taken[row, column], row=row)


@dataclass(frozen=True)
class WrongStage:
    batch: Sequence[MicroBatch]
    expected: Gradient  # ours, before clipping
    seen: Gradient  # what the optimizer saw, after clipping: whole tensors, or samples
    accumulated: Mapping[str, float]  # the norm of each tensor's gradient before clipping, where one process sees all of it
    norm: float
    clip: float  # ours: what clipping multiplies the gradient by
    tensor: str  # the one that is off most
    same_norms: bool  # whether the norms before clipping are ours, as far as they are known
    settings: ShadowSettings
    diverged: Callable[..., Diverged] = Diverged

    @cached_property
    def lost(self) -> list[int]:
        """The micro-batches whose loss in the trainer is not ours; without any, it went wrong after the loss."""
        close = [part.loss is None or math.isclose(part.own_loss, part.loss, rel_tol=1e-3, abs_tol=1e-5) for part in self.batch]
        return [index for index, same in enumerate(close) if not same]

    @cached_property
    def after(self) -> float:
        return math.sqrt(sum(float((value.double() ** 2).sum()) for value in self.seen.values()))

    @cached_property
    def got(self) -> Gradient:
        before = math.sqrt(sum(value**2 for value in self.accumulated.values()))
        whole = all(value.shape == self.expected[name].shape for name, value in self.seen.items())
        scale = before / self.after if before and self.after and whole and self.settings.world == 1 else 1 / self.clip
        return {name: value.double() * scale for name, value in self.seen.items()}

    def flat(self, gradient: Gradient) -> Tensor:
        """A gradient as one vector, in the order of the tensors that have one, as far as they are recorded."""
        return torch.cat([kept(gradient[name], value).double().flatten() for name, value in self.seen.items()])


def clipping(wrong: WrongStage) -> None:
    """Raise Diverged if the gradient was right until it was clipped."""
    if wrong.same_norms and wrong.accumulated and wrong.settings.world == 1 and not wrong.lost and wrong.tensor in wrong.seen:
        own = math.sqrt(sum(float((kept(wrong.expected[name], value) ** 2).sum()) for name, value in wrong.seen.items()))
        raise wrong.diverged("clip", "norm of the gradient after clipping", wrong.clip * own, wrong.after, tensor=wrong.tensor)


def weights(wrong: WrongStage, pieces: Mapping[str, float], gradient: Callable[[MicroBatch, str], Gradient]) -> None:
    """Fit the gradient as a weighted sum of what it should be made of; raise Diverged where a wrong weight explains it.

    `pieces` are the parts of a loss with their configured weights; the first is the policy's.
    """
    batch, s, target = wrong.batch, wrong.settings, wrong.flat(wrong.got)
    if not bool(torch.isfinite(target).all()):
        return
    first, *more = pieces
    labels = [(index, piece) for index in range(len(batch)) for piece in pieces]
    matrix = torch.stack([wrong.flat(gradient(batch[index], piece)) for index, piece in labels], 1) / s.world
    sizes = matrix.norm(dim=0)
    used = (sizes > 1e-6 * sizes.max()).nonzero().flatten()  # nothing is known of the weight of what is nearly zero
    matrix, labels = matrix[:, used], [labels[place] for place in used.tolist()]
    solution = torch.linalg.lstsq(matrix, target.unsqueeze(1), driver="gelsd").solution.flatten()
    rest = float((matrix @ solution - target).norm() / (target.norm() + 1e-30))
    if not rest < 1e-3:
        return
    found, size = dict(zip(labels, solution.tolist(), strict=True)), dict(zip(labels, sizes[used].tolist(), strict=True))
    largest = max(size.values())
    policy = [value for (index, piece), value in found.items() if piece == first and size[index, piece] > 1e-3 * largest]
    mean = sum(policy) / max(1, len(policy))
    if any(abs(value - mean) > 1e-2 * abs(mean) for value in policy):
        stage, where = ("loss", "loss") if wrong.lost else ("gradient", "accumulated gradient")
        raise wrong.diverged(stage, f"weight of each micro-batch in the {where}", [1.0] * len(policy), policy)
    least = 1e-3 if abs(mean - 1) > 1e-3 else 1e-6  # where the policy's weight is right, a small part is what is wrong
    for piece in more:
        seen = [index for index in range(len(batch)) if pieces[piece] * size.get((index, piece), 0.0) > least * largest]
        ratio = sum(found[index, piece] for index in seen) / max(1, len(seen)) / (mean or 1e-30)
        if seen and not math.isclose(ratio, pieces[piece], rel_tol=1e-2, abs_tol=1e-6):
            raise wrong.diverged(STAGE_OF[piece], f"weight of the {NAME_OF[piece]} term", pieces[piece], ratio)
    before = math.sqrt(sum(value**2 for value in wrong.accumulated.values()))
    if before and wrong.same_norms and not wrong.lost and math.isclose(before, wrong.norm, rel_tol=1e-3):
        raise wrong.diverged("clip", "norm of the gradient after clipping", wrong.clip * wrong.norm, wrong.after, tensor=wrong.tensor)
    stage = "loss" if wrong.lost else "gradient"
    raise wrong.diverged(stage, f"scale of the {stage}", 1.0, mean)


def unexplained(wrong: WrongStage, what: str = "loss") -> NoReturn:
    """Raise Diverged at the first loss that is not ours, or else at the gradient."""
    for index in wrong.lost:
        part = wrong.batch[index]
        raise wrong.diverged("loss", f"the {what} of micro-batch {index + 1}", part.own_loss, part.loss)
    tensor = wrong.tensor
    own = wrong.expected[tensor]
    if tensor not in wrong.seen:
        raise wrong.diverged("gradient", "a tensor has no gradient", float(wrong.clip * own.norm()), "none", tensor=tensor)
    if not wrong.same_norms:
        raise wrong.diverged("gradient", "norm of the gradient before clipping", own.norm(), wrong.accumulated[tensor], tensor=tensor)
    seen = wrong.seen[tensor].double()
    raise wrong.diverged("gradient", "norm of the gradient", wrong.clip * kept(own, seen).norm(), seen.norm(), tensor=tensor)


def tokens(wrong: WrongStage, directions: Callable[[MicroBatch, Tensor, Gradient], Tensor]) -> None:
    """Fit the deviation by changed weights of tokens; raise Diverged with the stage whose family of weights explains it.

    `directions` gives, for weights [families, rows, tokens] of a micro-batch, the gradients of the weighted log-probabilities for the
    tensors that are given: the last ones suffice, and need no pass through the whole model. A wrong
    ratio changes weights by the advantage and the ratio, a wrong KL term by the distance from the reference, a wrong mask by position,
    a wrong reduction by row.
    """
    some = dict(list(wrong.got.items())[-LAST:])
    deviation = torch.cat([(value - kept(wrong.expected[name], value)).flatten() for name, value in some.items()])
    if not bool(torch.isfinite(deviation).all()):
        return
    families = {stage: parts for stage, parts in _families(wrong).items() if wrong.lost or stage not in ("mask", "loss")}
    best: tuple[float, str, Tensor] = (EXPLAINED, "", None)
    for stage, parts in families.items():
        matrix = sum(directions(part, family, some) for part, family in zip(wrong.batch, parts, strict=True))
        sizes = matrix.norm(dim=1, keepdim=True).clamp(min=1e-30)
        matrix = matrix / sizes
        solution = torch.linalg.pinv(matrix @ matrix.T, rtol=1e-10, hermitian=True) @ (matrix @ deviation)
        rest = float((solution @ matrix - deviation).norm() / (deviation.norm() + 1e-30))
        solution = solution / sizes.flatten()
        if rest < best[0]:
            best = (rest, stage, solution)
    _, stage, solution = best
    if not stage:
        return
    moved = [torch.einsum("f,frt->rt", solution, family) for family in families[stage]]
    index = max(range(len(moved)), key=lambda place: float(moved[place].abs().max()))
    part, off = wrong.batch[index], moved[index]
    row, position = divmod(int(off.abs().argmax()), off.shape[1])
    own = float(_token_weights(part, wrong)[row, position])
    where = {"row": part.rows[row], "position": position}
    raise wrong.diverged(stage, "weight of a token's log-probability in the loss", own, own + float(off[row, position]), **where)


def _families(wrong: WrongStage) -> dict[str, list[Tensor]]:
    """For each stage and micro-batch, the token weights that a fault of the stage may add [families, rows, tokens]."""
    terms = [part.terms for part in wrong.batch if part.terms is not None]
    found: dict[str, list[Tensor]] = {}
    masks = [each.mask for each in terms]
    ratios = [each.ratio.detach().expand_as(each.mask) for each in terms]
    if any(bool(((ratio - 1).abs() * mask > 1e-4).any()) for ratio, mask in zip(ratios, masks, strict=True)):
        counted = [(each.mask > 0) & (each.advantage != 0) for each in terms]
        known = torch.cat([ratio[part] for ratio, part in zip(ratios, counted, strict=True)])
        edges = torch.quantile(known, torch.linspace(0, 1, BINS + 1, dtype=known.dtype))[1:-1]
        found["ratio"] = []
        for each, ratio in zip(terms, ratios, strict=True):
            weight, bins = each.advantage * ratio * each.mask, torch.bucketize(ratio, edges)
            length = each.mask.sum(1, keepdim=True).clamp(min=1.0)
            whole = each.advantage * torch.exp((ratio.log() * each.mask).sum(1, keepdim=True) / length) * each.mask
            made = [weight * (bins == place) * (sign * each.advantage > 0) for place in range(BINS) for sign in (1, -1)]
            found["ratio"].append(torch.stack([*made, each.advantage * each.mask, whole, whole / length]))
    if all(each.kl is not None for each in terms):
        found["kl"] = []
        for part, each, ratio in zip(wrong.batch, terms, ratios, strict=True):
            away = part.round.ref[part.rows] - part.own_logps
            made = [away.exp(), away, torch.ones_like(away), away**2]
            mean = (each.kl.detach() * each.mask).sum(1, keepdim=True) / each.mask.sum(1, keepdim=True).clamp(min=1.0)
            found["kl"].append(torch.stack([*made, *(value * ratio for value in made), mean.expand_as(away)]) * each.mask)
    own = [_token_weights(part, wrong) for part in wrong.batch]
    width = own[0].shape[1]
    found["mask"] = [
        torch.stack([*(value * (torch.arange(width) == place) for place in range(width)), value * _last(each.mask)])
        for value, each in zip(own, terms, strict=True)
    ]
    count = [len(value) for value in own]
    found["loss"] = [
        torch.stack([value * (torch.arange(len(value)) == row - sum(count[:index])).unsqueeze(1) for row in range(sum(count))])
        for index, value in enumerate(own)
    ]
    return found


def _last(mask: Tensor) -> Tensor:
    return mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))


def _token_weights(part: MicroBatch, wrong: WrongStage) -> Tensor:
    terms, made, s = part.terms, part.round, wrong.settings
    together = float(sum(int(each.round.mask[each.rows].sum()) for each in wrong.batch))
    logps = part.own_logps.clone().requires_grad_(True)
    old = made.old[part.rows] if made.old is not None else part.own_logps
    ref = made.ref[part.rows] if made.ref is not None and s.beta else None
    told = made.told(part.rows, logps.dtype)
    own = formulas.Terms(logps, old, ref, terms.entropies.detach(), terms.mask, terms.advantage, s, *told)
    values = own.policy if own.kl is None else own.policy + s.beta * own.kl
    (weight,) = torch.autograd.grad(formulas.reduced(values, terms.mask, float(made.mask.sum()), s, together), logps)
    return weight
