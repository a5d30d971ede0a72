"""Rung checkpoint: a distributed checkpoint of model and distributed optimizer, loaded into others, is what was saved, bit for bit.

Two steps, save, two more steps: that is the uninterrupted run. A second model, every weight of which was spoiled, with a fresh optimizer
loads the checkpoint, is compared right away, and takes the same two steps. In float32 the optimizer works on the model's weights; in
bfloat16 it has float32 copies of its own, which a resume can lose: both are tried. Dropout is off, so no random state takes part.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from seatrial.probes.bridge import training
from seatrial.probes.bridge.rank import Rank
from seatrial.probes.bridge.session import unwrapped
from seatrial.probes.bridge.training import Trainer, unequal
from seatrial.probes.bridge.weights import listed

BEFORE, AFTER = 2, 2
SETTINGS = ("lr", "weight_decay", "betas", "eps")
"""Of a group of parameters: a schedule moves the first two, so a run that goes on must have them back."""
SHARDING = {"distrib_optim_sharding_type": "dp_reshardable"}


def run(rank: Rank) -> None:
    """Both precisions."""
    import torch

    # On CUDA some gradients are summed in any order unless this is asked for; warnings only, as a few kernels have no other way.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for dtype in ("float32", "bfloat16"):
        resume(rank, dtype)


def resume(rank: Rank, dtype: str) -> None:
    """Save, load, go on."""
    session = rank.session(dtype)
    batches = [training.batch(session, seed=seed) for seed in range(BEFORE + AFTER)]
    place = rank.out / f"checkpoint-{dtype}"
    first = Trainer(session, sharded=True, decay=0.1)
    start = first.parameters()
    for given in batches[:BEFORE]:
        first.step(given)
    save(first, place)
    saved = state(first)
    rank.write(
        "saved", dtype=dtype, tensors=len(saved), kinds=kinds(saved), moved=len(unequal(start, first.parameters())), weights=len(start)
    )

    second = Trainer(session, sharded=True, decay=0.1, load=False)
    spoil(second)
    right = sorted(start.keys() - set(unequal(first.parameters(), second.parameters())))
    rank.write("spoiled", dtype=dtype, equal=listed([*right, *same_settings(first, second)]))
    load(second, place)
    loaded = state(second)
    rank.write("loaded", dtype=dtype, tensors=len(loaded), kinds=kinds(loaded), unequal=listed(unequal(saved, loaded)))

    losses = [[trainer.step(given) for given in batches[BEFORE:]] for trainer in (first, second)]
    ended, resumed = state(first), state(second)
    rank.write(
        "resumed",
        dtype=dtype,
        steps=AFTER,
        uninterrupted=losses[0],
        resumed=losses[1],
        tensors=len(resumed),
        moved=len(unequal(saved, ended)),
        unequal=listed(unequal(ended, resumed)),
    )


def state(trainer: Trainer) -> dict[str, Any]:
    """Everything that goes on: weights, and per parameter what the optimizer keeps, as `<kind> of <parameter>`."""
    import torch

    (chunk,) = trainer.chunks
    names = {id(value): name for name, value in unwrapped(chunk).named_parameters()}
    found = {f"weight of {name}": value for name, value in trainer.parameters().items()}
    for part in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        for parameter, (group, place) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][place]
            for kind, value in {"main": main, **part.optimizer.state[main]}.items():
                found[f"{kind} of {names[id(parameter)]}"] = torch.as_tensor(value).detach().to("cpu", copy=True)
            # FusedAdam counts its steps in the group, torch's AdamW in every parameter's state.
            for kind in (*SETTINGS, "step"):
                settings = part.optimizer.param_groups[group]
                if kind in settings:
                    found.setdefault(f"{kind} of {names[id(parameter)]}", torch.tensor(settings[kind], dtype=torch.float64))
    return found


def kinds(found: dict[str, Any]) -> dict[str, int]:
    """How many values there are of each kind."""
    made: dict[str, int] = {}
    for name in found:
        made[name.split(" ")[0]] = made.get(name.split(" ")[0], 0) + 1
    return made


def spoil(trainer: Trainer) -> None:
    """No weight and no setting of the optimizer keeps its value: what the load leaves alone is seen."""
    import torch

    for group in trainer.optimizer.param_groups:
        group.update({kind: [value / 4 for value in group[kind]] if kind == "betas" else group[kind] + 0.25 for kind in SETTINGS})

    with torch.no_grad():
        for parameter in trainer.chunks[0].parameters():
            parameter.add_(1.0)


def same_settings(first: Trainer, second: Trainer) -> list[str]:
    """Settings that groups of parameters of both optimizers have alike."""
    pairs = enumerate(zip(first.optimizer.param_groups, second.optimizer.param_groups, strict=True))
    return [f"{kind} of group {place}" for place, (one, two) in pairs for kind in SETTINGS if one[kind] == two[kind]]


def sharded(trainer: Trainer, loading: bool) -> dict[str, Any]:
    """What is saved, or what is to be loaded."""
    (chunk,) = trainer.chunks
    model = unwrapped(chunk).sharded_state_dict()
    return {"model": model, "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=SHARDING)}


def save(trainer: Trainer, place: Path) -> None:
    """Megatron's distributed checkpoint."""
    from megatron.core import dist_checkpointing

    place.mkdir()
    dist_checkpointing.save(sharded(trainer, loading=False), str(place))


def load(trainer: Trainer, place: Path) -> None:
    """Into model and optimizer."""
    import torch
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        found = dist_checkpointing.load(sharded(trainer, loading=True), str(place))
        unwrapped(trainer.chunks[0]).load_state_dict(found["model"])
        trainer.optimizer.load_state_dict(found["optimizer"])
