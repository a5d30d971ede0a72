"""Rung policy: after every policy-gradient step on the Megatron model, transformers finds the same log-probabilities in what it exports.

Step 0 is before any update: the floor of what two implementations differ by. The control is stale weights: transformers with what was
exported at step 0, which a missing refit would leave it with.

Before that, gradients are compared (`gradients`).
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from typing import Any

from seatrial.probes.bridge import forward, gradients, training
from seatrial.probes.bridge.rank import Rank
from seatrial.probes.bridge.session import Session, unwrapped
from seatrial.probes.bridge.training import Batch, Trainer, unequal
from seatrial.probes.bridge.weights import listed

STEPS = 4


def run(rank: Rank) -> None:
    """Step, export, recompute."""
    session = rank.session()
    given = training.batch(session)
    rank.write("gradients", **gradients.compared(session, given, rank.out / "descended"))
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
