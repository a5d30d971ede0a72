"""Rung lora: adapters sit on the modules that were asked for, only they train, and both exports are what Megatron computes.

The base is the same model without adapters. Merged and adapter export are judged by transformers (and PEFT): what they compute against
what the Megatron model with adapters computes. Their floor is how far transformers and Megatron are apart on the base model.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
from typing import Any

from seatrial.probes.bridge import forward, training
from seatrial.probes.bridge.rank import Missing, Rank
from seatrial.probes.bridge.session import Session, unwrapped
from seatrial.probes.bridge.training import Trainer, distance, unequal
from seatrial.probes.bridge.weights import listed, same

TARGETS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
PLACEMENTS = (TARGETS, ["linear_proj"], ["*.layers.0.*.linear_proj"])
"""What is asked for in turn: everything, one name, a pattern."""
DIM, ALPHA = 4, 8
"""Unequal on purpose: a scale that is forgotten shows."""
STEPS = 4
LR = 1e-2
ADAPTER = ".adapter."
EXPERTS = ".experts."
PREFIX = "base_model.model."


def run(rank: Rank) -> None:
    """Placement, training, exports."""
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
    saved = exported(rank, session, trainer, lora)
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
    """The Bridge's LoRA."""
    from megatron.bridge.peft.lora import LoRA

    return LoRA(target_modules=targets, dim=DIM, alpha=ALPHA)


def carriers(chunks: list[Any]) -> set[str]:
    """Modules that have an adapter."""
    return {name.split(ADAPTER)[0] for name, _ in unwrapped(chunks[0]).named_parameters() if ADAPTER in name}


def matching(base: list[Any], targets: list[str]) -> set[str]:
    """Modules of the base model that the targets name: by their own name, or by a pattern of the whole one."""
    names = [name for name, _ in unwrapped(base[0]).named_modules()]
    return {name for name in names if any(name.split(".")[-1] == target or fnmatch.fnmatchcase(name, target) for target in targets)}


def placed(rank: Rank, session: Session, base: list[Any], targets: list[str]) -> None:
    """Where adapters land."""
    lora = adapters(targets)
    provider = session.provider(load=False, **training.UNBALANCED)
    provider.register_pre_wrap_hook(lambda chunks: lora(chunks, training=True))
    chunks = session.build(provider=provider)
    asked, found = matching(base, targets), carriers(chunks)
    trains = [name for name, value in unwrapped(chunks[0]).named_parameters() if value.requires_grad]
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
    """Some steps: which adapters and which weights of the base moved."""
    steps = [trainer.step(given) for _ in range(STEPS)]
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


def exported(rank: Rank, session: Session, trainer: Trainer, lora: Any) -> dict[str, Any]:
    """The tensors of the adapter export, under PEFT's names."""
    from safetensors.torch import load_file

    place, base = rank.out / "adapter", str(session.directory)
    session.bridge.save_hf_adapter(trainer.chunks, place, peft_config=lora, base_model_name_or_path=base, show_progress=False)
    saved: dict[str, Any] = load_file(place / "adapter_model.safetensors")
    return saved


def summed(saved: dict[str, Any], plain: dict[str, Any], merged: dict[str, Any]) -> dict[str, Any]:
    """The merged export against base plus scaled product of the adapter export, tensor by tensor."""
    apart: list[tuple[float, str]] = []
    for name, left in saved.items():
        weight = name.removeprefix(PREFIX).replace(".lora_A.", ".")
        right = saved.get(name.replace(".lora_A.", ".lora_B."))
        if ".lora_A." in name and right is not None and weight in plain:
            apart.append((distance(merged[weight], plain[weight] + ALPHA / DIM * (right.float() @ left.float())), weight))
    return {"compared": len(apart), "apart": max(apart)[0] if apart else None, "worst": max(apart)[1] if apart else ""}


def adapted(rank: Rank, session: Session, saved: dict[str, Any]) -> Any:
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


def added(rank: Rank, session: Session, model: Any, saved: dict[str, Any], unexpected: set[str]) -> set[str]:
    """Add adapters to modules that PEFT leaves bare, and give their names; whether they are right, the logits say.

    With transformers 5, PEFT takes every gate, up and down of a model with experts for a fused expert: dense layers and shared experts get
    no adapter, whoever exported it. Which these are, a control says that knows nothing of the Bridge but the last names of modules.
    """
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


def computed(session: Session, chunks: list[Any], ids: Any) -> Any:
    """Megatron's logits."""
    return training.evaluated(chunks, lambda: forward.logits(session, chunks, ids))


def in_hf(session: Session, model: Any, ids: Any) -> Any:
    """Logits of transformers."""
    import torch

    with torch.no_grad():
        return model(ids.to(session.device)).logits
