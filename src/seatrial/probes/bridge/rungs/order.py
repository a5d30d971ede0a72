"""Rung order: a refit can be fed from the export: names are the checkpoint's own, each once, always in the same order, groups whole.

- What vLLM stacks (q, k, v; gate, up) is what one Megatron tensor holds: its parts must arrive before another layer begins.
- Every expert of a layer must bring the same kinds of tensors, and there must be as many experts as the configuration says.
- An export after every weight has changed must have changed everywhere: one that is kept from before feeds a refit with old weights.
- Exports that share memory with live parameters are listed: an asynchronous refit must clone those.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from seatrial.probes import fingerprint
from seatrial.probes.bridge import weights
from seatrial.probes.bridge.rank import Rank
from seatrial.probes.bridge.rungs.build import EXPERTS
from seatrial.probes.bridge.session import Session, unwrapped

EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.+)$")


def run(rank: Rank) -> None:
    """Export twice and look at names and places."""
    session = rank.session()
    chunks = session.build()
    live = {value.untyped_storage().data_ptr() for chunk in chunks for value in unwrapped(chunk).parameters()}
    first, second = (_streamed(session, chunks, live) for _ in range(2))
    names = [name for name, _ in first]
    tasks = [list(_targets(task)) for task in session.bridge.get_conversion_tasks(chunks) if task is not None]
    config = rank.config()
    stored = weights.on_disk(rank.directory)
    heads = {**weights.copies(stored, weights.tied(config)), **({"lm_head.weight": ""} if weights.tied(config) else {})}
    other = [a for (a, _), (b, _) in zip(first, second, strict=False) if a != b]
    count = next((found for name in EXPERTS["num_moe_experts"] if isinstance(found := getattr(config, name, None), int)), None)
    rank.write(
        "order",
        names=len(names),
        stored=len(stored),
        missing=weights.listed(name for name in stored if name not in names and name not in heads),
        unknown=weights.listed(name for name in dict.fromkeys(names) if name not in stored and name not in heads),
        twice=weights.listed(name for name, times in Counter(names).items() if times > 1),
        second=len(second),
        moved=weights.listed(other),
        out_of_order=weights.listed(_out_of_order(names, tasks)),
        stacks=sum(len(targets) > 1 for targets in tasks),
        split=weights.listed(_split(names, tasks)),
        experts=count,
        **_experts(names, count),
        aliases=weights.listed(name for name, shared in first if shared),
        stale=weights.listed(_stale(session, chunks)),
    )


def _streamed(session: Session, chunks: list[Any], live: set[int]) -> list[tuple[str, bool]]:
    """Names as they come, and whether each shares memory with a parameter."""
    stream = session.bridge.export_hf_weights(chunks, cpu=False, show_progress=False)
    return [(name, value.untyped_storage().data_ptr() in live) for name, value in stream]


def _stale(session: Session, chunks: list[Any]) -> list[str]:
    """Names whose export stays the same when every weight changes. The model is of no use afterwards."""
    import torch

    before = {name: fingerprint.tensor_hash(value) for name, value in session.stream(chunks)}
    with torch.no_grad():
        for chunk in chunks:
            for value in unwrapped(chunk).state_dict().values():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.add_(1)
    return [name for name, value in session.stream(chunks) if before.get(name) == fingerprint.tensor_hash(value)]


def _targets(task: Any) -> Sequence[str]:
    names = task.mapping.hf_param
    return [names] if isinstance(names, str) else list(names.values())


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
    return {"expert_layers": len(held), "expert_tensors": len(held) * len(kinds) * (count or 0), "expert_lacking": weights.listed(lacking)}
