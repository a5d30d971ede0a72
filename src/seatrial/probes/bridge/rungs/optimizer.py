"""Rung optimizer: two data-parallel ranks, each with half of a batch, step like one that has it all.

The reference is the same model without DDP under torch's AdamW, on the whole batch. Megatron's DDP is tried with its plain and with its
distributed optimizer. The control is a reference that never sees the second rank's half: it must end up elsewhere.
"""

from __future__ import annotations

from typing import Any

from seatrial.probes.bridge import training
from seatrial.probes.bridge.rank import Rank
from seatrial.probes.bridge.session import Session
from seatrial.probes.bridge.training import Batch, Trainer, furthest

STEPS = 3
DECAY = 0.1


def run(rank: Rank) -> None:
    """Reference, control, and both optimizers against the reference."""
    session = rank.session()
    given = training.batch(session)
    half = len(given.ids) // rank.world
    mine = given.rows(rank.rank * half, (rank.rank + 1) * half)
    reference = plain(session, given)
    control = plain(session, given.rows(0, half))
    start = reference[0]["weights"]
    for step in range(1, STEPS + 1):
        now = reference[step]
        moved, where = furthest(now["weights"], start)
        away, _ = furthest(now["weights"], control[step]["weights"])
        rank.write("reference", step=step, loss=now["loss"], norm=now["norm"], moved=moved, where=where, control=away)
    for kind, sharded in (("ddp", False), ("distributed", True)):
        trainer = Trainer(session, sharded, decay=DECAY)
        compare(rank, kind, 0, trainer, reference[0], float("nan"), float("nan"))
        for step in range(1, STEPS + 1):
            value, norm = trainer.step(mine)
            compare(rank, kind, step, trainer, reference[step], value, norm)


def plain(session: Session, given: Batch) -> list[dict[str, Any]]:
    """Loss, gradient norm and weights of each step under torch's AdamW; of step 0, the weights.

    Megatron takes no weight decay on vectors.
    """
    import torch

    chunks = session.build(provider=session.provider(**training.UNBALANCED))
    parameters = list(chunks[0].parameters())
    groups = [
        {"params": [value for value in parameters if value.ndim > 1], "weight_decay": DECAY},
        {"params": [value for value in parameters if value.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=training.LR, betas=training.BETAS, eps=training.EPSILON)
    found: list[dict[str, Any]] = [{"weights": training.parameters(chunks)}]
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = training.loss(session, chunks, given)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, training.CLIP)
        optimizer.step()
        found.append({"loss": float(value.detach()), "norm": float(norm), "weights": training.parameters(chunks)})
    return found


def compare(rank: Rank, kind: str, step: int, trainer: Trainer, reference: dict[str, Any], value: float, norm: float) -> None:
    """This step against the reference, on every rank: the worst of all ranks is the fact."""
    import torch

    own = (*furthest(trainer.parameters(), reference["weights"]), value, norm)
    ranks: list[Any] = [None] * rank.world
    torch.distributed.all_gather_object(ranks, own)
    difference, worst = max(found[:2] for found in ranks)
    fields = {"loss": sum(found[2] for found in ranks) / len(ranks), "norms": [found[3] for found in ranks]} if step else {}
    rank.write("step", kind=kind, step=step, ranks=len(ranks), difference=difference, worst=worst, **fields)
