"""Rung mapping: every Megatron name and every HF name on disk is mapped exactly once.

- The Bridge takes the first mapping that matches a name, and warns where none does: a glob that is too wide, or a name that is left
  out, changes nothing that one would see. Here each name is held against all mappings.
- Two mappings that match a name and say the same are only noted. Mappings that match nothing are for other variants of the family.
- Local layers have norms of their own, those of Transformer Engine have them fused into a linear layer. Only the local names are in this
  model; the mapping of the fused ones, which production takes, is held against them.
- One HF tensor may hold all experts of a layer (`is_grouped_export`): those count as one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from seatrial.probes.bridge import weights
from seatrial.probes.bridge.rank import Rank
from seatrial.probes.bridge.session import unwrapped
from seatrial.probes.megatron.local_names import NORMS


def run(rank: Rank) -> None:
    """Resolve all names both ways."""
    session = rank.session()
    chunks = session.build(load=False)
    stored = weights.on_disk(rank.directory)
    tasks = [task for task in session.bridge.get_conversion_tasks(chunks) if task is not None]
    ours = {name for chunk in chunks for name, _ in unwrapped(chunk).named_parameters()}
    ours |= {task.global_param_name for task in tasks}
    registry = session.bridge._model_bridge.mapping_registry()
    held = {name: _matching(name, registry) for name in sorted(ours)}
    chosen = {name: registry.megatron_to_hf_lookup(name) for name in sorted(ours)}
    claims = _claims(chosen)
    renamed = [name for name, mapping in chosen.items() if getattr(mapping, "allow_hf_name_mismatch", False)]
    heads = weights.copies(stored, weights.tied(rank.config()))
    strangers = {name: found for name, found in claims.items() if name not in stored and not set(found) & set(renamed)}
    rank.write(
        "mapping",
        megatron=len(ours),
        stored=len(stored),
        unmapped=weights.listed(name for name, mapping in chosen.items() if mapping is None),
        ambiguous=weights.listed(_named(name, found) for name, found in held.items() if len(set(map(_said, found))) > 1),
        repeated=weights.listed(_named(name, found) for name, found in held.items() if len(found) > 1 and len(set(map(_said, found))) == 1),
        hf_unmapped=weights.listed(name for name in stored if name not in claims and name not in heads),
        hf_ambiguous=weights.listed({"name": name, "looks": ", ".join(found)} for name, found in claims.items() if len(found) > 1),
        hf_absent=weights.listed({"name": name, "looks": ", ".join(found)} for name, found in strangers.items()),
        renamed=weights.listed(renamed),
        unused=weights.listed(_unused(registry, held)),
        norms=sum(mapping.megatron_param in NORMS for mapping in registry),
        norms_unlike=weights.listed(_norms_unlike(registry, stored)),
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


def _said(mapping: Any) -> str:
    """What a mapping does with a name: which class, and the HF names."""
    return f"{type(mapping).__name__} to {', '.join(_hf_names(mapping))}"


def _named(name: str, found: Iterable[Any]) -> dict[str, str]:
    return {"name": name, "looks": "; ".join(map(_said, found))}


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
        twins = sorted(set(map(_said, known.get(local, ()))))
        for mapping in known.get(fused, ()):
            absent = [name for name in (name.replace("*", "0") for name in _hf_names(mapping)) if name not in stored]
            if twins != [_said(mapping)]:
                found.append({"name": fused, "looks": f"{_said(mapping)}; {local}: {', '.join(twins) or 'not mapped'}"})
            elif absent:
                found.append({"name": fused, "looks": f"not on disk: {', '.join(absent)}"})
    return found


def _unused(registry: Any, held: dict[str, list[Any]]) -> list[str]:
    """Patterns that no name of this model has."""
    return [mapping.megatron_param for mapping in registry if not any(_matching(name, [mapping]) for name in held)]
