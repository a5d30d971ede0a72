"""Rungs optimizer, checkpoint, lora and policy: training through the Bridge steps, resumes and exports as transformers and torch do.

- optimizer: two data-parallel ranks, each with half of a batch, step like torch's AdamW on all of it; the control never sees the second
  rank's half and must end up elsewhere.
- checkpoint: a distributed checkpoint, loaded into others, is what was saved, bit for bit; a spoiled second model loads it and takes the
  same two steps as the uninterrupted run. In bfloat16 the optimizer has float32 copies, which a resume can lose: both precisions are tried.
- lora: adapters sit on the modules that were asked for, only they train, and both exports are what Megatron computes.
- policy: after every policy-gradient step transformers finds the same log-probabilities in the export. Step 0 is the floor; the control
  is stale weights: transformers with the export of step 0.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from seatrial.instruments.bridge import forward, rungs_numbers, training
from seatrial.instruments.bridge.rungs import BridgeSession, Missing, Rank, unwrapped
from seatrial.instruments.bridge.training import Batch, Trainer, distance, furthest, listed, same, unequal

OPTIMIZER_STEPS = 3
DECAY = 0.1


def run_optimizer(rank: Rank) -> None:
    session = rank.session()
    given = training.batch(session)
    half = len(given.ids) // rank.world
    mine = given.rows(rank.rank * half, (rank.rank + 1) * half)
    reference = plain(session, given)
    control = plain(session, given.rows(0, half))
    start = reference[0]["weights"]
    for step in range(1, OPTIMIZER_STEPS + 1):
        now = reference[step]
        moved, where = furthest(now["weights"], start)
        away, _ = furthest(now["weights"], control[step]["weights"])
        rank.write("reference", step=step, loss=now["loss"], norm=now["norm"], moved=moved, where=where, control=away)
    for kind, sharded in (("ddp", False), ("distributed", True)):
        trainer = Trainer(session, sharded, decay=DECAY)
        compare_optimizers(rank, kind, 0, trainer, reference[0], float("nan"), float("nan"))
        for step in range(1, OPTIMIZER_STEPS + 1):
            value, norm = trainer.step(mine)
            compare_optimizers(rank, kind, step, trainer, reference[step], value, norm)


def plain(session: BridgeSession, given: Batch) -> list[dict[str, Any]]:
    """Loss, gradient norm and weights of each step under torch's AdamW; of step 0, the weights. Megatron takes no weight decay on
    vectors."""
    import torch

    chunks = session.build(provider=session.provider(**training.UNBALANCED))
    parameters = list(chunks[0].parameters())
    groups = [
        {"params": [value for value in parameters if value.ndim > 1], "weight_decay": DECAY},
        {"params": [value for value in parameters if value.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=training.LR, betas=training.BETAS, eps=training.EPSILON)
    found: list[dict[str, Any]] = [{"weights": training.parameters(chunks)}]
    for _ in range(OPTIMIZER_STEPS):
        optimizer.zero_grad()
        value = training.loss(session, chunks, given)
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, training.CLIP)
        optimizer.step()
        found.append({"loss": float(value.detach()), "norm": float(norm), "weights": training.parameters(chunks)})
    return found


def compare_optimizers(rank: Rank, kind: str, step: int, trainer: Trainer, reference: dict[str, Any], value: float, norm: float) -> None:
    import torch

    own = (*furthest(trainer.parameters(), reference["weights"]), value, norm)
    ranks: list[Any] = [None] * rank.world
    torch.distributed.all_gather_object(ranks, own)
    difference, worst = max(found[:2] for found in ranks)
    fields = {"loss": sum(found[2] for found in ranks) / len(ranks), "norms": [found[3] for found in ranks]} if step else {}
    rank.write("step", kind=kind, step=step, ranks=len(ranks), difference=difference, worst=worst, **fields)


BEFORE, AFTER = 2, 2
SETTINGS = ("lr", "weight_decay", "betas", "eps")
"""Of a group of parameters: a schedule moves the first two, so a run that goes on must have them back."""
SHARDING = {"distrib_optim_sharding_type": "dp_reshardable"}


def run_checkpoint(rank: Rank) -> None:
    import torch

    # On CUDA some gradients are summed in any order unless this is asked for; warnings only, as a few kernels have no other way.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    for dtype in ("float32", "bfloat16"):
        resume(rank, dtype)


def resume(rank: Rank, dtype: str) -> None:
    from megatron.core import dist_checkpointing

    session = rank.session(dtype)
    batches = [training.batch(session, seed=seed) for seed in range(BEFORE + AFTER)]
    place = rank.out / f"checkpoint-{dtype}"
    first = Trainer(session, sharded=True, decay=0.1)
    start = first.parameters()
    for given in batches[:BEFORE]:
        first.step(given)
    place.mkdir()
    dist_checkpointing.save(sharded(first, loading=False), str(place))
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


def kinds(found: dict[str, Any]) -> dict[str, int]:
    return dict(Counter(name.split(" ")[0] for name in found))


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


def spoil(trainer: Trainer) -> None:
    """No weight and no setting of the optimizer keeps its value: what the load leaves alone is seen."""
    import torch

    for group in trainer.optimizer.param_groups:
        group.update({kind: [value / 4 for value in group[kind]] if kind == "betas" else group[kind] + 0.25 for kind in SETTINGS})

    with torch.no_grad():
        for parameter in trainer.chunks[0].parameters():
            parameter.add_(1.0)


def same_settings(first: Trainer, second: Trainer) -> list[str]:
    pairs = enumerate(zip(first.optimizer.param_groups, second.optimizer.param_groups, strict=True))
    return [f"{kind} of group {place}" for place, (one, two) in pairs for kind in SETTINGS if one[kind] == two[kind]]


def sharded(trainer: Trainer, loading: bool) -> dict[str, Any]:
    model = unwrapped(trainer.chunks[0]).sharded_state_dict()
    return {"model": model, "optimizer": trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=SHARDING)}


def load(trainer: Trainer, place: Path) -> None:
    import torch
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        found = dist_checkpointing.load(sharded(trainer, loading=True), str(place))
        unwrapped(trainer.chunks[0]).load_state_dict(found["model"])
        trainer.optimizer.load_state_dict(found["optimizer"])


TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
PLACEMENTS = (TARGETS, ["linear_proj"], ["*.layers.0.*.linear_proj"])
"""What is asked for in turn: everything, one name, a pattern."""
DIM, ALPHA = 4, 8
"""Unequal on purpose: a scale that is forgotten shows."""
LORA_STEPS = 4
LR = 1e-2
ADAPTER = ".adapter."
EXPERTS = ".experts."
PREFIX = "base_model.model."


def run_lora(rank: Rank) -> None:
    from safetensors.torch import load_file

    if importlib.util.find_spec("peft") is None:
        raise Missing("the package peft")
    session = rank.session()
    base = session.build(provider=session.provider(**training.UNBALANCED))
    for targets in PLACEMENTS:
        placed(rank, session, base, targets)

    lora = adapters(TARGETS)
    trainer = Trainer(session, sharded=True, hook=lambda chunks: lora(chunks, training=True), lr=LR)
    given = training.batch(session, rows=8, width=32)
    logits = {"base": computed(session, base, given.ids), "start": computed(session, trainer.chunks, given.ids)}
    before = trainer.parameters()
    trained(rank, trainer, given, before, training.parameters(base))
    logits["trained"] = computed(session, trainer.chunks, given.ids)
    logits["hf base"] = in_hf(session, session.hf(), given.ids)

    merged = session.export(trainer.chunks, merge_adapter_weights=True)
    plain = session.export(base)
    # The Bridge gives weights below adapters PEFT's name for them.
    unmerged = {
        name.replace(".base_layer.", "."): value for name, value in session.export(trainer.chunks, merge_adapter_weights=False).items()
    }
    modules = dict(unwrapped(base[0]).named_modules())
    below = training.fed_by(session, base, [modules[name].weight for name in matching(base, TARGETS)], plain)
    logits["merged"] = in_hf(session, training.in_transformers(session, merged, rank.out / "merged"), given.ids)
    rank.write(
        "merged",
        tensors=len(plain),
        unmerged=listed(unequal(plain, unmerged)),
        changed=len(unequal(plain, merged)),
        wrong=listed(sorted(set(unequal(plain, merged)) ^ below)),
    )
    place, owner = rank.out / "adapter", str(session.directory)
    session.bridge.save_hf_adapter(trainer.chunks, place, peft_config=lora, base_model_name_or_path=owner, show_progress=False)
    saved: dict[str, Any] = load_file(place / "adapter_model.safetensors")
    rank.write("sum", **summed(saved, plain, merged))
    logits["adapter"] = in_hf(session, adapted(rank, session, saved), given.ids)
    rank.write(
        "outputs",
        scale=float(logits["trained"].abs().max()),
        start=distance(logits["start"], logits["base"]),
        effect=distance(logits["trained"], logits["base"]),
        floor=distance(logits["hf base"], logits["base"]),
        merged=distance(logits["merged"], logits["trained"]),
        adapter=distance(logits["adapter"], logits["trained"]),
    )


def adapters(targets: list[str]) -> Any:
    from megatron.bridge.peft.lora import LoRA

    return LoRA(target_modules=targets, dim=DIM, alpha=ALPHA)


def matching(base: list[Any], targets: list[str]) -> set[str]:
    """Modules of the base model that the targets name: by their own name, or by a pattern of the whole one."""
    names = [name for name, _ in unwrapped(base[0]).named_modules()]
    return {name for name in names if any(name.split(".")[-1] == target or fnmatch.fnmatchcase(name, target) for target in targets)}


def placed(rank: Rank, session: BridgeSession, base: list[Any], targets: list[str]) -> None:
    lora = adapters(targets)
    provider = session.provider(load=False, **training.UNBALANCED)
    provider.register_pre_wrap_hook(lambda chunks: lora(chunks, training=True))
    chunks = session.build(provider=provider)
    named = dict(unwrapped(chunks[0]).named_parameters())
    asked, found = matching(base, targets), {name.split(ADAPTER)[0] for name in named if ADAPTER in name}
    trains = [name for name, value in named.items() if value.requires_grad]
    rank.write(
        "placed",
        targets=targets,
        asked=len(asked),
        found=len(found),
        without=listed(sorted(asked - found)),
        beside=listed(sorted(found - asked)),
        trainable=len(trains),
        base_trains=listed([name for name in trains if ADAPTER not in name]),
    )


def trained(rank: Rank, trainer: Trainer, given: training.Batch, before: dict[str, Any], base: dict[str, Any]) -> None:
    steps = [trainer.step(given) for _ in range(LORA_STEPS)]
    after = trainer.parameters()
    own = {name: value for name, value in after.items() if ADAPTER in name}
    moved = set(unequal({name: before[name] for name in own}, own))
    rest = {name.replace(".to_wrap.", "."): value for name, value in after.items() if name not in own}
    rank.write(
        "trained",
        losses=[value for value, _ in steps],
        norms=[norm for _, norm in steps],
        adapters=len(own),
        unmoved=listed(sorted(own.keys() - moved)),
        base=len(base),
        base_moved=listed(unequal(base, rest)),
    )


def summed(saved: dict[str, Any], plain: dict[str, Any], merged: dict[str, Any]) -> dict[str, Any]:
    """The merged export against base plus scaled product of the adapter export, tensor by tensor."""
    apart: list[tuple[float, str]] = []
    for name, left in saved.items():
        weight = name.removeprefix(PREFIX).replace(".lora_A.", ".")
        right = saved.get(name.replace(".lora_A.", ".lora_B."))
        if ".lora_A." in name and right is not None and weight in plain:
            apart.append((distance(merged[weight], plain[weight] + ALPHA / DIM * (right.float() @ left.float())), weight))
    return {"compared": len(apart), "apart": max(apart)[0] if apart else None, "worst": max(apart)[1] if apart else ""}


def adapted(rank: Rank, session: BridgeSession, saved: dict[str, Any]) -> Any:
    """The base model in transformers with the exported adapter, loaded by PEFT: its names and values must be PEFT's."""
    from peft import PeftModel, get_peft_model_state_dict

    model = PeftModel.from_pretrained(session.hf(), str(rank.out / "adapter")).eval()
    loaded = get_peft_model_state_dict(model)
    # PEFT packs adapters of experts into tensors of its own as it loads them: whether those are right, the logits say.
    packed = {name for name in loaded.keys() ^ saved.keys() if EXPERTS in name}
    unexpected = saved.keys() - loaded.keys() - packed
    bare = added(rank, session, model, saved, unexpected) if unexpected else set()
    rank.write(
        "adapter",
        tensors=len(saved),
        packed=len(packed),
        bare=listed(sorted(bare)),
        missing=listed(sorted(loaded.keys() - saved.keys() - packed)),
        unexpected=listed(sorted(unexpected - bare)),
        unequal=listed([name for name in saved if name in loaded and not same(saved[name], loaded[name].cpu())]),
    )
    return model


def added(rank: Rank, session: BridgeSession, model: Any, saved: dict[str, Any], unexpected: set[str]) -> set[str]:
    """Add adapters to modules that PEFT leaves bare, and give their names; whether they are right, the logits say. With transformers 5,
    PEFT takes every gate, up and down of a model with experts for a fused expert: dense layers and shared experts get no adapter,
    whoever exported it. Which these are, a control says that knows nothing of the Bridge but the last names of modules."""
    import torch
    from peft import LoraConfig, get_peft_model

    asked = sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in saved})
    control = get_peft_model(session.hf(), LoraConfig(r=DIM, target_modules=asked))
    linear = [name for name, module in control.named_modules() if isinstance(module, torch.nn.Linear) and name.rsplit(".", 1)[-1] in asked]
    config = json.loads((rank.out / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    done: set[str] = set()
    for place in linear:
        pair = [f"{place}.lora_B.weight", f"{place}.lora_A.weight"]
        if unexpected.issuperset(pair):
            weight = model.get_submodule(place).weight
            right, left = (saved[name].to(weight) for name in pair)
            weight.data += config["lora_alpha"] / config["r"] * (right @ left)
            done.update(pair)
    return done


def computed(session: BridgeSession, chunks: list[Any], ids: Any) -> Any:
    return training.evaluated(chunks, lambda: forward.logits(session, chunks, ids))


def in_hf(session: BridgeSession, model: Any, ids: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(ids.to(session.device)).logits


POLICY_STEPS = 4


def run_policy(rank: Rank) -> None:
    session = rank.session()
    given = training.batch(session)
    rank.write("gradients", **rungs_numbers.compared(session, given, rank.out / "descended"))
    trainer = Trainer(session, sharded=True)
    first = session.export(trainer.chunks)
    stale = recomputed(rank, session, first, given)
    # What comes from buffers, such as a router's bias, no step moves.
    buffers = [value for value in unwrapped(trainer.chunks[0]).buffers() if value.is_floating_point()]
    fixed = training.fed_by(session, trainer.chunks, buffers, first)
    last, held = first, trainer.parameters()
    for step in range(POLICY_STEPS + 1):
        value, norm = trainer.step(given) if step else (None, None)
        now, holds = session.export(trainer.chunks), trainer.parameters()
        own = training.evaluated(trainer.chunks, lambda: training.chosen(forward.logits(session, trainer.chunks, given.ids), given.ids))
        still = {"unmoved": sorted(holds.keys() - set(unequal(held, holds)))}
        still["unchanged"] = sorted(now.keys() - set(unequal(last, now)) - fixed)
        fields = {"loss": value, "norm": norm, **{key: listed(names) for key, names in still.items()}} if step else {}
        rank.write(
            "step",
            step=step,
            tensors=len(now),
            parameters=len(holds),
            **fields,
            **errors(own, recomputed(rank, session, now, given), stale),
        )
        last, held = now, holds


def recomputed(rank: Rank, session: BridgeSession, exported: dict[str, Any], given: Batch) -> Any:
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
