"""Rung policy: after every policy-gradient step on the Megatron model, transformers finds the same log-probabilities in what it exports.

Step 0 is before any update: the floor of what two implementations differ by. The control is stale weights: transformers with what was
exported at step 0, which a missing refit would leave it with.

Equal log-probabilities say nothing about gradients: a parameter that is frozen or detached computes as ever. So one plain step down the
gradient is taken by Megatron and by transformers, and what Megatron exports then is compared with what transformers holds, tensor by tensor.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from typing import Any

from seatrial.probes.bridge import forward, training
from seatrial.probes.bridge.rank import Rank
from seatrial.probes.bridge.session import Session, unwrapped
from seatrial.probes.bridge.training import Batch, Trainer, unequal
from seatrial.probes.bridge.weights import listed

STEPS = 4
RATE = 100.0
"""Of the plain step: so large that rounding of the weights does not hide the gradient. Nothing is computed with them afterwards."""
NOISE = 16.0
"""How many times the noise of float32 (transformers against itself in float64) two gradients of a tensor may be apart."""
SHARE = 1e-4
"""Of the tensor's largest gradient, in addition, as norms and rotary angles of transformers are float32 even then."""
ROUNDING = 1e-7
"""Of the largest gradient of all, in addition: what is zero by its nature, as behind a softmax, is rounding in both."""


def run(rank: Rank) -> None:
    """Step, export, recompute."""
    session = rank.session()
    given = training.batch(session)
    rank.write("gradients", **gradients(rank, session, given))
    trainer = Trainer(session, sharded=True)
    first = session.export(trainer.chunks)
    stale = recomputed(rank, session, first, given)
    # What comes from buffers, such as a router's bias, no step moves.
    buffers = [value for value in unwrapped(trainer.chunks[0]).buffers() if value.is_floating_point()]
    fixed = training.fed_by(session, trainer.chunks, buffers, first)
    last, held = first, trainer.parameters()
    for step in range(STEPS + 1):
        value, norm = trainer.step(given) if step else (None, None)
        now, holds = session.export(trainer.chunks), trainer.parameters()
        own = training.evaluated(trainer.chunks, lambda: training.chosen(forward.logits(session, trainer.chunks, given.ids), given.ids))
        still = {"unmoved": unmoved(held, holds), "unchanged": unmoved(last, now, fixed)}
        fields = {"loss": value, "norm": norm, **still} if step else {}
        rank.write(
            "step",
            step=step,
            tensors=len(now),
            parameters=len(holds),
            **fields,
            **errors(own, recomputed(rank, session, now, given), stale),
        )
        last, held = now, holds


def gradients(rank: Rank, session: Session, given: Batch) -> dict[str, Any]:
    """Fields of a fact: each tensor's gradient, as Megatron's export shows it, against transformers'; the worst of them."""
    import torch

    # Transformers keeps the gradient of the padding's embedding at zero; a batch of a loop has none.
    padding = rank.config().pad_token_id
    given = Batch(
        torch.where(given.ids == (-1 if padding is None else padding), (given.ids + 1) % forward.vocabulary(session), given.ids),
        given.advantages,
    )
    chunks = session.build(provider=session.provider(**training.UNBALANCED))
    descend(unwrapped(chunks[0]), training.loss(session, chunks, given))
    made = training.in_transformers(session, session.export(chunks), rank.out / "descended")
    shutil.rmtree(rank.out / "descended")
    before, after, exact = session.hf(), forward.plain_hf(session, "float32"), forward.plain_hf(session, "float64")
    for model in (after, exact):
        logp = training.chosen(model(given.ids.to(session.device), use_cache=False).logits, given.ids)
        descend(model, -(given.advantages.to(logp.device)[:, None] * logp).mean())
    start, found, wanted, best = (
        {name: value.detach() for name, value in each.named_parameters()} for each in (before, made, after, exact)
    )
    rows = []
    with torch.no_grad():
        for name, value in wanted.items():
            size, noise = training.distance(value, start[name]) / RATE, training.distance(value, best[name]) / RATE
            rows.append({"name": name, "apart": training.distance(found[name], value) / RATE, "size": size, "noise": noise})
    largest = max(row["size"] for row in rows)
    rows.sort(key=lambda row: row["apart"] / (allowed(row["size"], row["noise"], largest) or 1.0), reverse=True)
    return {"tensors": len(rows), "largest": largest, "worst": listed(rows)}


def descend(model: Any, loss: Any) -> None:
    """One step down the gradient, without any optimizer; what has no gradient stays."""
    import torch

    loss.backward()
    with torch.no_grad():
        for value in model.parameters():
            if value.grad is not None:
                value.sub_(RATE * value.grad)


def allowed(size: float, noise: float, largest: float) -> float:
    """How far apart two gradients of a tensor may be: by its largest one, its noise, and the largest one of all tensors."""
    return NOISE * noise + SHARE * size + ROUNDING * largest


def unmoved(before: dict[str, Any], after: dict[str, Any], fixed: Collection[str] = ()) -> dict[str, Any]:
    """Tensors that a step left as they were, but for those that no step moves."""
    return listed(sorted(after.keys() - set(unequal(before, after)) - set(fixed)))


def recomputed(rank: Rank, session: Session, exported: dict[str, Any], given: Batch) -> Any:
    """Log-probabilities of the batch by transformers, with exported weights."""
    import torch

    place = rank.out / "exported"
    model = training.in_transformers(session, exported, place)
    with torch.no_grad():
        made = training.chosen(model(given.ids.to(session.device)).logits, given.ids)
    shutil.rmtree(place)
    return made


def errors(own: Any, theirs: Any, stale: Any) -> dict[str, Any]:
    """How many log-probabilities there are, and exp|difference| of them: the largest, the mean, and the mean with stale weights."""
    away, old = (own - theirs).double().abs().exp(), (own - stale).double().abs().exp()
    finite = bool(own.isfinite().all()) and bool(theirs.isfinite().all())
    return {"count": own.numel(), "finite": finite, "largest": float(away.max()), "mean": float(away.mean()), "stale": float(old.mean())}
