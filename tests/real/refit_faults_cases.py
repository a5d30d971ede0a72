"""Cases of test_refit_faults.py: known refit bugs, each injected where the real one was, caught and named; and what other checks see.

Run as a script it writes the table, with what the checks of `refit_peers` see: `… OUT.json`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from seatrial.instruments.bits import fingerprint
from seatrial.instruments.refit import map_learner, tensor_coverage
from seatrial.instruments.refit.agreement import Ledger
from seatrial.instruments.refit.map_learner import bits
from seatrial.instruments.refit.payload_header import RefitRefused
from seatrial.instruments.refit.weight_transfer import Consumer, Producer
from tests.real import fused
from tests.real.fused import Rank, Shape, Weights
from tests.real.plain import quantized, unconsumed
from tests.real.refit_fault_kinds import KINDS
from tests.real.refit_peers import Scene, SelfCompare, seen

BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"
Q0, O0 = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"
Send = Callable[[Weights], list[tuple[str, torch.Tensor]]]


def refit(
    kind: type[Rank], shape: Shape | None = None, send: Send | None = None, truth: Weights | None = None, steps: int = 1,
    right: type[Rank] = Rank, exported: Callable[[Weights], Weights] = dict,
) -> Scene:  # fmt: skip
    """Load, learn, compare the base, arm the fault, refit `steps` times, and look with every instrument."""
    shape = shape or Shape()
    first = fused.policy(shape)
    ranks, clean = fused.engine(shape, kind), fused.engine(shape, right)
    start = exported(first)
    for rank in ranks + clean:
        rank.load_weights((first | start).items())  # from the checkpoint, which has everything
    maps = [map_learner.learn(rank, rank.load_weights, start) for rank in ranks]
    said = [f"before the first refit {line}" for line in wrong(ranks, maps, start)]
    watches = [tensor_coverage.LoaderWatch(rank, each) for rank, each in zip(ranks, maps, strict=True)]
    states = [fingerprint.tensors(first.items())]
    current, export = first, start
    for rank in ranks:
        rank.armed = True
    mismatches = 0
    for step in range(steps):
        current = truth if truth is not None else fused.trained(current, step)
        states.append(fingerprint.tensors(current.items()))
        export = exported(current)
        given = send(export) if send else list(export.items())
        for rank, watch in zip(ranks, watches, strict=True):
            with SelfCompare(ranks) as writes:
                rank.load_weights(given)
            mismatches += writes.mismatches
            watch.look()
        for rank in clean:
            rank.load_weights(export.items())
    said += wrong(ranks, maps, export)
    said += [f"{name} changes and is not exported" for name in tensor_coverage.unexported(states, export)]
    said += [f"{name}: {count} elements are consumed by no rank" for name, count in unconsumed(maps).items() if "mtp" not in name]
    for rank, each, watch in zip(ranks, maps, watches, strict=True):
        said += [f"{name}: {reason}" for name, reason in tensor_coverage.misplaced(each).items()]
        found = tensor_coverage.classify(rank, each, watch.touched, watch.moved)
        said += [f"{name}: no exported element reaches this parameter" for name in found.idle]
        said += [f"{name}: its padding ({part.elements} elements) changed" for name, part in found.padding.items() if not part.constant]
        said += [f"{name}: {how}, and nothing explains it" for name, how in found.moved.items()]
        said += transformed(rank, export)
    return Scene(ranks, clean, current, said, mismatches)


def wrong(ranks: list[Rank], maps: list[map_learner.Map], export: Weights) -> list[str]:
    """What the comparison through the maps says."""
    found = [(rank.rank, name, bad) for rank, each in zip(ranks, maps, strict=True) for name, bad in each.compare(rank, export).items()]
    return [f"rank {rank}: {name}: {bad.count} of {bad.total} elements are wrong, the first is {bad.first}" for rank, name, bad in found]


def transformed(rank: Rank, export: Weights) -> list[str]:
    """What the map refuses, against the export transformed as the engine does it: fp8 with scales, and A."""
    expected: Weights = {}
    for name, value in rank.named_parameters():
        if value.dtype == torch.float8_e4m3fn:
            expected[name], expected[f"{name}_scale"] = fused.quantise(rank.shard(export[name], 1))
        elif name.endswith(".ssm.A"):
            expected[name] = -torch.exp(export[f"{name}_log"].float())
    return [f"{name}: {bad.count} of {bad.total} transformed elements are wrong" for name, bad in quantized(rank, expected).items()]


def refused(call: Callable[[], object]) -> list[str]:
    """The refusal of a transport."""
    try:
        call()
    except RefitRefused as error:
        return [str(error)]
    return []


def transport_scene(replay: bool) -> Scene:
    """A difference payload that is applied twice, or to another base; the naive consumer adds it up, ours refuses."""
    shape = Shape()
    first = fused.policy(shape)
    second, right, held = fused.trained(first, 0), fused.engine(shape), {name: value.clone() for name, value in first.items()}
    producer = Producer(first)
    producer.prepare(first, "full")
    producer.commit(producer.root, 1)
    if not replay:
        held[Q0][3] *= 1.01
    consumer = Consumer({name: value.clone() for name, value in held.items()}, 1)
    data = producer.prepare(second, "sparse", "difference")
    assert isinstance(data, bytes)
    if replay:
        consumer.apply(data)
    said = refused(lambda: consumer.apply(data))
    moved = {name: bits(second[name].reshape(-1)) - bits(first[name].reshape(-1)) for name in first}
    for _ in range(2 if replay else 1):
        for name, value in held.items():
            bits(value.reshape(-1)).add_(moved[name])
    ranks = fused.engine(shape)
    with SelfCompare(ranks) as writes:
        for rank in ranks:
            rank.load_weights(held.items())
    for rank in right:
        rank.load_weights(second.items())
    return Scene(ranks, right, second, said, writes.mismatches)


def root(ranks: list[Rank]) -> str:
    """Of all ranks of a replica."""
    return fingerprint.tree({f"{rank.rank}.{name}": value for rank in ranks for name, value in fingerprint.model(rank).items()}).root


def stale_replica(lying: bool = False) -> Scene:
    """Replica b restarts from the first weights and is routed before it was refitted; `lying`: it says that it has them."""
    scene, shape = refit(Rank), Shape()
    stale, old = fused.engine(shape), fused.policy(shape)
    for rank in stale:
        rank.load_weights(old.items())
    ledger, new = Ledger(), root(scene.ranks)
    for replica in "ab":
        ledger.report(replica, 1, new, f"{replica}-1")
    ledger.report("b", 1 if lying else 0, root(stale), "b-2")
    for index in range(8):
        ledger.dispatch(f"s{index}", 1)
    return Scene(stale, scene.right, scene.truth, scene.said + ledger.problems(), scene.mismatches, [scene.ranks])


def reused_buffer(export: Weights) -> list[tuple[str, torch.Tensor]]:
    """verl #7139: views of one receive buffer per kind of weight, overwritten by the next layer before they are read."""
    buffers: Weights = {}
    made = []
    for name, value in export.items():
        if ".mlp." in name and "experts" not in name and name.endswith("_proj.weight"):
            buffer = buffers.setdefault(name.split(".mlp.")[1], torch.empty_like(value))
            buffer.copy_(value)
            value = buffer
        made.append((name, value))
    return made


def raw_pointer(export: Weights) -> list[tuple[str, torch.Tensor]]:
    """verl #6919, NeMo-RL #2418: the exported view is transposed, and its bytes are sent in the order of the storage."""
    stored = export[O0].t().contiguous()
    assert torch.equal(stored.t(), export[O0])
    return list((export | {O0: stored.reshape(-1).reshape(export[O0].shape)}).items())


def additive() -> Scene:
    """A consumer that adds bf16 differences, over 20 small steps."""
    first = fused.policy(Shape())
    sent = {"base": first, "held": {name: value.clone() for name, value in first.items()}}

    def send(export: Weights) -> list[tuple[str, torch.Tensor]]:
        sent["held"] = {name: value + (export[name] - sent["base"][name]) for name, value in sent["held"].items()}
        sent["base"] = export
        return list(sent["held"].items())

    return refit(Rank, send=send, steps=20)


def not_a_number() -> Scene:
    truth = fused.trained(fused.policy(Shape()), 0)
    truth[Q0][3, 4] = float("nan")
    return refit(KINDS["nan-mask"], truth=truth)


def tied_twice(export: Weights) -> Weights:
    """Both tied names, over one memory."""
    return export | {"lm_head.weight": export["model.embed_tokens.weight"]}


@dataclass(frozen=True)
class Fault:
    """What is injected, where the real one was, and the name that our message must hold."""

    where: str
    named: str
    run: Callable[[], Scene]
    about: str = ""
    """What every message must match, if not the name: a right tensor must not be accused."""


def kind(name: str, **arguments: Any) -> Callable[[], Scene]:
    return lambda: refit(KINDS[name], **arguments)


FAULTS = {
    "swapped q and k": Fault("loader: slots of qkv (facts 1b)", "model.layers.0.self_attn.qkv_proj.weight", kind("swap-qk"), "qkv_proj"),
    "gate and up halves swapped": Fault(
        "second load into the kernel layout (vLLM #42821)",
        "mlp.gate_proj.weight",
        kind("kernel-layout", right=KINDS["kernel-layout-right"]),
        "gate_proj|up_proj",
    ),
    "skipped tensor": Fault("loader skips a name silently (facts 1b)", "model.layers.1.self_attn.k_proj.weight", kind("skip")),
    "wrong base": Fault("delta onto other weights (facts 1b)", Q0, lambda: transport_scene(False)),
    "stale tied head": Fault(
        "engine's own copy of the head (vLLM-CPU defect A, vLLM #56689)",
        "lm_head.weight",
        kind("stale-head", shape=Shape(tied=True)),
        "lm_head",
    ),
    "v over k": Fault(
        "loader: slot of v (facts 5.2)",
        "model.layers.0.self_attn.k_proj.weight",
        kind("v-over-k"),
        "k_proj.weight: 1024 elements are consumed",
    ),
    "layer shifted by one": Fault(
        "transport: reused receive buffer (verl #7139)",
        "model.layers.0.mlp.down_proj.weight",
        lambda: refit(Rank, send=reused_buffer),
        "layers.0.mlp",
    ),
    "non-contiguous view sent raw": Fault("transport: raw pointer (verl #6919, NeMo-RL #2418)", O0, lambda: refit(Rank, send=raw_pointer)),
    "additive bf16 delta": Fault(
        "transport: sparse_indices (facts 1a), 20 steps", "model.embed_tokens.weight", additive, "elements are wrong"
    ),
    "XOR applied twice": Fault(
        "both tied names into one storage (facts 1b)", "model.embed_tokens.weight", kind("xor", shape=Shape(tied=True), exported=tied_twice)
    ),
    "NaN dropped": Fault("NaN-masked overwrite (facts 1b, verl)", Q0, not_a_number),
    "unsynced buffer": Fault(
        "export of parameters only (verl #5801)",
        BIAS,
        lambda: refit(Rank, exported=lambda w: {name: value for name, value in w.items() if name != BIAS}),
    ),
    "replayed payload": Fault("transport: payload applied again (facts 1a vii)", "version 2", lambda: transport_scene(True)),
    "stale replica": Fault("restarted engine routed before its refit (facts 7, group of NeMo-RL #398)", "replica b", stale_replica),
    "stale replica that claims the new version": Fault(
        "wrong version stamp (facts 7, group of NeMo-RL #398)", "replica b holds root", lambda: stale_replica(True)
    ),
    "fp8 scale missing": Fault(
        "loader leaves the old scale (facts 7, group of vLLM #45835)",
        "down_proj.weight_scale",
        kind("no-scale", shape=Shape(fp8=True)),
        "weight_scale",
    ),
    "transformed weight left stale": Fault(
        "derived state not refreshed (NeMo-RL #3739 class)", "model.layers.0.ssm.A", kind("stale-a"), "ssm.A"
    ),
    "padded rows overwritten": Fault("padding written anew (facts 7, group of vLLM #48312)", "model.embed_tokens.weight", kind("padding")),
    "expert pair swapped": Fault(
        "loader: places of experts (no known report)",
        "model.layers.2.mlp.experts.w13_weight",
        kind("swap-experts"),
        "layers.2.mlp.experts.w",
    ),
}


@cache
def judged(name: str) -> dict[str, Any]:
    """One row: the fault must be caught, and its message must name it."""
    fault = FAULTS[name]
    scene = fault.run()
    naming = [line for line in scene.said if fault.named in line]
    assert naming, f"{name}: {fault.named} is not named in {scene.said}"
    astray = [line for line in scene.said if not re.search(fault.about or re.escape(fault.named), line)]
    assert not astray, f"{name}: also said {astray}"
    return {"fault": name, "injected": fault.where, "said": naming[0], "messages": len(scene.said), **seen(scene)}


def case_the_clean_stand_in_is_silent() -> None:
    for shape in (Shape(), Shape(tied=True), Shape(fp8=True), Shape(dtype=torch.float32)):
        scene = refit(Rank, shape, steps=3)
        assert scene.said == [], scene.said
        others = seen(scene)
        assert not any(others[check] for check in ("byte sum", "norm", "XOR", "self-comparison", "error >= 1.05")), others


def case_a_right_kernel_layout_is_explained_by_its_slots() -> None:
    rank, weights = KINDS["kernel-layout-right"](Shape(), 0), fused.policy(Shape())
    rank.load_weights(weights.items())
    each = map_learner.learn(rank, rank.load_weights, weights)
    assert len(tensor_coverage.misplaced(each)) == 3  # nobody said that these kernels read up before gate
    swapped = {name: slots[::-1] if name in ("gate_up_proj", "w13_weight") else slots for name, slots in tensor_coverage.FUSED.items()}
    assert tensor_coverage.misplaced(each, swapped) == {}


def case_no_other_check_sees_everything() -> None:
    rows = [judged(name) for name in FAULTS]
    for check in ("byte sum", "norm", "XOR", "self-comparison", "error >= 1.05"):
        assert not all(row[check] for row in rows), f"{check} sees everything: the faults are too coarse to tell checks apart"


def _case(name: str) -> Callable[[], None]:
    def run() -> None:
        judged(name)

    return run


globals().update({f"case_{re.sub('[^a-z0-9]+', '_', name.lower())}": _case(name) for name in FAULTS})


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps([judged(name) for name in FAULTS], indent=1))
