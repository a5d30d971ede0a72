"""Rungs build, import, roundtrip, reload, mapping and order: every weight and every name goes where it belongs, and comes back.

- build: the provider has those values of the HF configuration whose meaning is certain.
- import: before the Bridge loads, every parameter is filled with NaN: what still has one afterwards was never written.
- roundtrip: the export right after the import is the checkpoint on disk, in fp32 and in bf16 (through Megatron's Float16Module, as training
  casts: without it local norms stay fp32). reload: transformers loads what save_hf_pretrained writes, and computes the same with it.
- mapping: the Bridge takes the first mapping that matches a name and only warns where none does, so each name is held against all
  mappings. Mappings that match nothing are for other variants.
- order: parts that vLLM stacks arrive before another layer begins, experts bring the same kinds of tensors, and an export after every
  weight has changed has changed everywhere.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.bridge import training
from seatrial.instruments.bridge.rungs import BridgeSession, Missing, Rank, tokens, unwrapped
from seatrial.instruments.megatron.shims import NORMS

SAME: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "vocab_size": ("vocab_size",),
    "layernorm_epsilon": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "rotary_base": ("rope_theta",),
    "seq_length": ("max_position_embeddings",),
    "init_method_std": ("initializer_range",),
    "share_embeddings_and_output_weights": ("tie_word_embeddings",),
}
"""A provider's value, and the names that HF configurations have for it."""
PLAIN_ATTENTION = {"num_query_groups": ("num_key_value_heads",), "kv_channels": ("head_dim",)}
EXPERTS = {
    "num_moe_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
}
DENSE = {"ffn_hidden_size": ("intermediate_size",)}


def run_build(rank: Rank) -> None:
    session = rank.session()
    provider = session.provider(load=False)
    (chunk,) = session.build(load=False, provider=provider)
    model = unwrapped(chunk)
    parameters = {name: list(value.shape) for name, value in model.named_parameters()}
    rank.write(
        "build",
        provider=type(session.bridge._model_bridge).__name__,
        parameters=parameters,
        settings=provider_settings(rank.config(), provider),
    )


def provider_settings(config: Any, provider: Any) -> list[dict[str, Any]]:
    """Every value that the configuration says and the provider has to carry: both sides."""
    experts = any(_said(config, name) for name in EXPERTS["num_moe_experts"])
    asked = {**SAME, **(EXPERTS if experts else DENSE), **({} if getattr(provider, "multi_latent_attention", False) else PLAIN_ATTENTION)}
    found = []
    for field, names in asked.items():
        said = next(((name, _said(config, name)) for name in names if _said(config, name) is not None), None)
        if said is not None and hasattr(provider, field):
            held = getattr(provider, field)
            held = held if isinstance(held, bool | int | float) or held is None else str(held)
            found.append({"key": said[0], "config": said[1], "field": field, "provider": held})
    return found


def _said(config: Any, name: str) -> Any:
    """A number of the configuration. transformers 5 keeps the rotary base in `rope_parameters`, some models one per kind of layer."""
    value = getattr(config, name, None)
    if value is None and name == "rope_theta":
        value = (getattr(config, "rope_parameters", None) or {}).get(name)
    return value if isinstance(value, (bool, int, float)) else None


VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


def run_import(rank: Rank) -> None:
    import torch

    stored = training.on_disk(rank.directory)
    session = rank.session()
    chunks = session.build(load=False)
    model = unwrapped(chunks[0])
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(torch.nan)
    read = _load(session, chunks)
    config = rank.config()
    tied = training.copies(stored, training.tied(config))
    unreached, padding = _left(model, config.vocab_size)
    rank.write(
        "import",
        parameters=sum(1 for _ in model.parameters()),
        unreached=training.listed(unreached),
        padding_rows=padding,
        stored=len(stored),
        read=sum(name in read for name in stored),
        unread=training.listed(name for name in stored if name not in read and name not in tied),
        tied_heads=training.listed(name for name in tied if name not in read),
        nan_on_disk=training.listed(name for name, value in stored.items() if value.is_floating_point() and bool(value.isnan().any())),
    )


def _load(session: BridgeSession, chunks: list[Any]) -> set[str]:
    """Import as training does; the names that were read from disk."""
    read: set[str] = set()
    source = session.bridge.hf_pretrained.state.source
    plain = source.load_tensors

    def load_tensors(keys: list[str]) -> Any:
        read.update(keys)
        return plain(keys)

    source.load_tensors = load_tensors
    try:
        session.bridge.load_hf_weights(chunks)
    finally:
        del source.load_tensors
    return read


def _left(model: Any, vocabulary: int) -> tuple[list[dict[str, Any]], int]:
    unreached, padding = [], 0
    for name, value in model.named_parameters():
        empty = value.isnan()
        if name.endswith(VOCABULARY):
            padding += int(empty[vocabulary:].flatten(1).any(1).sum())
            empty = empty[:vocabulary]
        count = int(empty.sum())
        if count:
            unreached.append({"name": name, "looks": f"{count} of {empty.numel()} values never written"})
    return unreached, padding


def run_roundtrip(rank: Rank) -> None:
    from megatron.core.transformer.module import Float16Module

    stored = training.on_disk(rank.directory)
    tied = training.tied(rank.config())
    for dtype in ("float32", "bfloat16"):
        session = rank.session(dtype)
        made = session.export(session.build(mixed_precision_wrapper=Float16Module))
        rank.write("roundtrip", dtype=dtype, **training.compare_checkpoints(made, stored, session.torch_dtype(), tied))


OTHER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""What a saved configuration may say differently."""
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def run_reload(rank: Rank) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    session = rank.session()
    place = rank.out / "saved"
    try:
        session.bridge.save_hf_pretrained(session.build(), place, show_progress=False)
    except (ValueError, OSError) as error:
        if "tokenizer" not in str(error) or any((rank.directory / name).is_file() for name in TOKENIZER):
            raise
        raise Missing(f"a tokenizer in {rank.directory}: save_hf_pretrained insists on one") from error
    config = rank.config()
    stored, saved = training.on_disk(rank.directory), training.on_disk(place)
    rank.write("saved", **training.compare_checkpoints(saved, stored, session.torch_dtype(), training.tied(config)))
    model, info = AutoModelForCausalLM.from_pretrained(
        place, dtype=session.torch_dtype(), attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    ids = tokens(config.vocab_size).to(session.device)
    with torch.no_grad():
        ours, theirs = (each(ids).logits.cpu() for each in (model.eval().to(session.device), session.hf()))
    rank.write(
        "reload",
        loading={key: training.listed(sorted(map(str, found))) for key, found in info.items()},
        logits_equal=training.same(ours, theirs),
        logits_finite=bool(ours.isfinite().all()),
        max_difference=float((ours - theirs).abs().max()) if ours.shape == theirs.shape else None,
        config=training.listed(_config(rank.directory, place)),
        tokenizer=_tokenizer(rank.directory, place),
    )


def _config(original: Path, saved: Path) -> list[dict[str, Any]]:
    from transformers import AutoConfig

    left, right = (AutoConfig.from_pretrained(place, local_files_only=True).to_dict() for place in (original, saved))
    keys = [key for key in {**left, **right} if key not in OTHER and left.get(key) != right.get(key)]
    return [{"name": key, "looks": f"{right.get(key)!r} instead of {left.get(key)!r}"} for key in keys]


def _tokenizer(original: Path, saved: Path) -> dict[str, Any]:
    """Tokenizer files that were there and are not, and whether both give the same tokens."""
    from transformers import AutoTokenizer

    there = [name for name in TOKENIZER if (original / name).is_file()]
    lost = [name for name in there if not (saved / name).is_file()]
    if not there or lost:
        return {"files": there, "lost": lost, "same": None}
    text = "The answer is 12 * (3 + 4) = 84."
    left, right = (AutoTokenizer.from_pretrained(place, local_files_only=True)(text)["input_ids"] for place in (original, saved))
    return {"files": there, "lost": lost, "same": bool(left) and left == right}


def run_mapping(rank: Rank) -> None:
    session = rank.session()
    chunks = session.build(load=False)
    stored = training.on_disk(rank.directory)
    tasks = [task for task in session.bridge.get_conversion_tasks(chunks) if task is not None]
    ours = {name for chunk in chunks for name, _ in unwrapped(chunk).named_parameters()}
    ours |= {task.global_param_name for task in tasks}
    registry = session.bridge._model_bridge.mapping_registry()
    held = {name: _matching(name, registry) for name in sorted(ours)}
    chosen = {name: registry.megatron_to_hf_lookup(name) for name in sorted(ours)}
    claims = _claims(chosen)
    renamed = [name for name, mapping in chosen.items() if getattr(mapping, "allow_hf_name_mismatch", False)]
    heads = training.copies(stored, training.tied(rank.config()))
    strangers = {name: found for name, found in claims.items() if name not in stored and not set(found) & set(renamed)}
    rank.write(
        "mapping",
        megatron=len(ours),
        stored=len(stored),
        unmapped=training.listed(name for name, mapping in chosen.items() if mapping is None),
        ambiguous=training.listed(_named(name, found) for name, found in held.items() if len(set(map(_mapping_said, found))) > 1),
        repeated=training.listed(
            _named(name, found) for name, found in held.items() if len(found) > 1 and len(set(map(_mapping_said, found))) == 1
        ),
        hf_unmapped=training.listed(name for name in stored if name not in claims and name not in heads),
        hf_ambiguous=training.listed({"name": name, "looks": ", ".join(found)} for name, found in claims.items() if len(found) > 1),
        hf_absent=training.listed({"name": name, "looks": ", ".join(found)} for name, found in strangers.items()),
        renamed=training.listed(renamed),
        norms=sum(mapping.megatron_param in NORMS for mapping in registry),
        norms_unlike=training.listed(_norms_unlike(registry, stored)),
    )


def _matching(name: str, registry: Any) -> list[Any]:
    """Every mapping whose pattern has the name, resolved: `*` is a number, `**` is anything."""
    found = []
    for mapping in registry:
        pattern = re.escape(mapping.megatron_param).replace(r"\*\*", "(.*)").replace(r"\*", r"(\d+)")
        match = re.fullmatch(pattern, name)
        if match:
            found.append(mapping.resolve(match.groups()) if match.groups() else mapping)
    return found


def _hf_names(mapping: Any) -> list[str]:
    return [mapping.hf_param] if isinstance(mapping.hf_param, str) else list(mapping.hf_param.values())


def _mapping_said(mapping: Any) -> str:
    return f"{type(mapping).__name__} to {', '.join(_hf_names(mapping))}"


def _named(name: str, found: Iterable[Any]) -> dict[str, str]:
    return {"name": name, "looks": "; ".join(map(_mapping_said, found))}


def _claims(chosen: dict[str, Any]) -> dict[str, list[str]]:
    """HF name -> the Megatron names that are converted into it; the experts of one tensor as their first."""
    made: dict[str, list[str]] = {}
    for name, mapping in chosen.items():
        for target in _hf_names(mapping) if mapping is not None else ():
            claimed = made.setdefault(target, [])
            if not (claimed and getattr(mapping, "is_grouped_export", False)):
                claimed.append(name)
    return made


def _norms_unlike(registry: Any, stored: Collection[str]) -> list[dict[str, str]]:
    """Mappings of fused norms that are not those of their local twins, or whose name in the first layer is not on disk."""
    known: dict[str, list[Any]] = {}
    for mapping in registry:
        known.setdefault(mapping.megatron_param, []).append(mapping)
    found = []
    for fused, local in NORMS.items():
        twins = sorted(set(map(_mapping_said, known.get(local, ()))))
        for mapping in known.get(fused, ()):
            absent = [name for name in (name.replace("*", "0") for name in _hf_names(mapping)) if name not in stored]
            if twins != [_mapping_said(mapping)]:
                found.append({"name": fused, "looks": f"{_mapping_said(mapping)}; {local}: {', '.join(twins) or 'not mapped'}"})
            elif absent:
                found.append({"name": fused, "looks": f"not on disk: {', '.join(absent)}"})
    return found


EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.+)$")


def run_order(rank: Rank) -> None:
    session = rank.session()
    chunks = session.build()
    live = {value.untyped_storage().data_ptr() for chunk in chunks for value in unwrapped(chunk).parameters()}
    streams = (session.bridge.export_hf_weights(chunks, cpu=False, show_progress=False) for _ in range(2))
    # Names as they come, and whether each shares memory with a parameter.
    first, second = ([(name, value.untyped_storage().data_ptr() in live) for name, value in stream] for stream in streams)
    names = [name for name, _ in first]
    tasks = [_hf_names(task.mapping) for task in session.bridge.get_conversion_tasks(chunks) if task is not None]
    config = rank.config()
    stored = training.on_disk(rank.directory)
    heads = {**training.copies(stored, training.tied(config)), **({"lm_head.weight": ""} if training.tied(config) else {})}
    other = [a for (a, _), (b, _) in zip(first, second, strict=False) if a != b]
    count = next((found for name in EXPERTS["num_moe_experts"] if isinstance(found := getattr(config, name, None), int)), None)
    rank.write(
        "order",
        names=len(names),
        stored=len(stored),
        missing=training.listed(name for name in stored if name not in names and name not in heads),
        unknown=training.listed(name for name in dict.fromkeys(names) if name not in stored and name not in heads),
        twice=training.listed(name for name, times in Counter(names).items() if times > 1),
        second=len(second),
        moved=training.listed(other),
        out_of_order=training.listed(_out_of_order(names, tasks)),
        stacks=sum(len(targets) > 1 for targets in tasks),
        split=training.listed(_split(names, tasks)),
        experts=count,
        **_experts(names, count),
        aliases=training.listed(name for name, shared in first if shared),
        stale=training.listed(_stale(session, chunks)),
    )


def _stale(session: BridgeSession, chunks: list[Any]) -> list[str]:
    """Names whose export stays the same when every weight changes. The model is of no use afterwards."""
    import torch

    before = {name: fingerprint.tensor_hash(value) for name, value in session.stream(chunks)}
    with torch.no_grad():
        for chunk in chunks:
            for value in unwrapped(chunk).state_dict().values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.add_(1)
    return [name for name, value in session.stream(chunks) if before.get(name) == fingerprint.tensor_hash(value)]


def _out_of_order(names: list[str], tasks: list[list[str]]) -> list[str]:
    """Names that come after one that a later conversion task made. A tensor of all experts is made by the last of its tasks."""
    place = {name: number for number, targets in enumerate(tasks) for name in targets}
    late, found = -1, []
    for name in names:
        if place.get(name, late) < late:
            found.append(name)
        late = max(late, place.get(name, late))
    return found


def _split(names: list[str], tasks: list[list[str]]) -> list[dict[str, str]]:
    """Groups that are torn: another layer's tensor comes between two parts."""
    place = {name: number for number, name in enumerate(names)}
    found = []
    for targets in tasks:
        there = sorted(place[name] for name in targets if name in place)
        between = names[there[0] : there[-1]] if there else []
        stranger = next((name for name in between if fingerprint.layer(name) != fingerprint.layer(targets[0])), None)
        if stranger:
            found.append({"name": targets[0], "looks": f"{stranger} before {names[there[-1]]}"})
    return found


def _experts(names: list[str], count: int | None) -> dict[str, Any]:
    """Layers with experts of their own names, and experts that lack a tensor which others of the model have."""
    held: dict[str, dict[int, set[str]]] = {}
    for match in filter(None, map(EXPERT.match, names)):
        held.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(match[3])
    kinds = {kind for experts in held.values() for found in experts.values() for kind in found}
    lacking = [
        f"{layer}.{number}.{kind}"
        for layer, experts in held.items()
        for number in range(max(count or 0, 1 + max(experts)))
        for kind in sorted(kinds - experts.get(number, set()))
    ]
    return {"expert_layers": len(held), "expert_tensors": len(held) * len(kinds) * (count or 0), "expert_lacking": training.listed(lacking)}
