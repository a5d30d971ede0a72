"""Judges of the rungs that train: optimizer, checkpoint, lora, policy.

Limits scale with what was measured beside them (how far weights moved, how large logits are), never with the value under test, and every
judge asks that its control would have been seen. A number that is missing or not finite misses its check.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.checks import bridge_rungs
from seatrial.checks.bridge_rungs import RungJudgement, judge_gradients
from seatrial.checks.probe_facts import Row, proof
from seatrial.core.records import CheckResult
from seatrial.core.verdict import Boundary
from seatrial.instruments.bridge import rungs_training

UPDATE_SHARE = 5e-3
"""Weights may be this share of the update away from the reference: measured 1.5e-4, a decay that is forgotten on norms 0.1."""
RELATIVE = 1e-4
"""Of gradient norms and losses; measured 2e-7."""
LOGITS = 1e-5
"""Logits per unit of the largest one; measured 1e-6."""
FLOORS = 8.0
"""How many floors, measured on the base model, a difference may be on a GPU."""
FLOOR_CAP = 1e-2
"""A floor above this is a defect itself and excuses nothing."""
PROBABILITY = 1e-4
"""exp|difference of log-probabilities| - 1 on a CPU; measured 3e-6."""
SEEN = 10.0
"""A control counts when it is this many limits away."""
SHOWN = 3
KINDS = ("ddp", "distributed")
DTYPES = ("float32", "bfloat16")
NOT_SHOWN = (
    "dropout is off: random states are not part of the checkpoint",
    "one rank: nothing was sharded, so offsets and replica ids were not exercised",
)
"""By the rung checkpoint."""
PARTS = {"linear_qkv.weight": 3, "linear_qkv.bias": 3, "linear_fc1.weight": 2, "linear_fc1.bias": 2}
"""Exported tensors that one parameter of Megatron feeds: q, k and v; gate and up. Others feed one."""
KEPT = ("weight", "main", "exp_avg", "exp_avg_sq", "step", *rungs_training.SETTINGS)


def judge_optimizer(rows: Sequence[Row], _device: str) -> RungJudgement:
    """Both optimizers of Megatron under DDP step like the reference."""
    references = _by_step([row for row in rows if row.get("fact") == "reference"])
    steps = range(1, rungs_training.OPTIMIZER_STEPS + 1)
    limits = {step: UPDATE_SHARE * (bridge_rungs.number_of(references[step].get("moved")) or 0.0) for step in steps}
    shown = all(0 < SEEN * limits[step] < (bridge_rungs.number_of(references[step].get("control")) or 0.0) for step in steps)
    away = [references[step].get("control") for step in steps]
    checks = [_check("the reference moves, and differs without one rank's half", shown, away, Boundary.DDP, f"> {SEEN:g} limits")]
    worst = 0.0
    for kind, boundary in zip(KINDS, (Boundary.DDP, Boundary.OPTIMIZER), strict=True):
        found = _by_step([row for row in rows if row.get("fact") == "step" and row.get("kind") == kind])
        start = found[0]
        begun = bridge_rungs.number_of(start.get("difference")) == 0 and bridge_rungs.count_of(start, "ranks") > 1
        checks.append(
            _check(f"{kind}: starts with the reference's weights, on several ranks", begun, start.get("difference"), boundary, "0")
        )
        for step in steps:
            row, reference = found[step], references[step]
            difference = bridge_rungs.number_of(row.get("difference"))
            worst = max(worst, math.inf if difference is None else difference)
            near = difference is not None and difference <= limits[step]
            text = f"furthest: {row.get('worst')}"
            checks.append(
                _check(f"{kind}: weights after step {step}", near, row.get("difference"), boundary, f"<= {limits[step]:.2g}", text)
            )
            norms = row.get("norms") if isinstance(row.get("norms"), list) else []
            same = len(norms or []) > 1 and all(_close(norm, reference.get("norm")) for norm in norms or [])
            text = "" if same else f"gradient norm {norms} instead of {reference.get('norm')}"
            checks.append(
                _check(f"{kind}: gradient norm of step {step}", same, norms, boundary, f"{reference.get('norm')} on every rank", text)
            )
            same = _close(row.get("loss"), reference.get("loss"))
            checks.append(_check(f"{kind}: loss of step {step}", same, row.get("loss"), boundary, str(reference.get("loss"))))
    return RungJudgement(tuple(checks), f"{worst:.1e}")


def judge_checkpoint(rows: Sequence[Row], _device: str) -> RungJudgement:
    """What is loaded is what was saved, and a resumed run is the uninterrupted one."""
    checks: list[CheckResult] = []
    figures = []
    for dtype in DTYPES:
        saved, spoiled, loaded, resumed = (bridge_rungs.only_fact(rows, fact, dtype) for fact in ("saved", "spoiled", "loaded", "resumed"))
        kinds = saved.get("kinds") if isinstance(saved.get("kinds"), dict) else {}
        parameters = bridge_rungs.count_of(saved, "weights")
        full = parameters > 0 and all((kinds or {}).get(kind) == parameters for kind in KEPT) and loaded.get("kinds") == kinds
        moved = bridge_rungs.count_of(saved, "moved")
        same = (
            resumed.get("uninterrupted") == resumed.get("resumed")
            and _numbers(resumed.get("resumed")) >= 2 * bridge_rungs.count_of(resumed, "steps") > 0
        )
        gone_on = bridge_rungs.count_of(resumed, "moved")
        of = f"{dtype}: "
        asked = [
            (f"{of}training moves weights before the checkpoint", moved > 0, f"{moved} of {parameters}", "> 0", ""),
            (f"{of}weights, main weights, moments, steps and settings are there", full, kinds, "one per parameter", ""),
            (f"{of}no weight and no setting was right before the load", *_none(spoiled, "equal", parameters > 0)),
            (f"{of}after the load everything is bit-equal", *_none(loaded, "unequal", bridge_rungs.count_of(loaded, "tensors") > 0)),
            (
                f"{of}losses and norms after the resume are the uninterrupted run's",
                same,
                resumed.get("resumed"),
                resumed.get("uninterrupted"),
                "",
            ),
            (f"{of}after the resume everything is bit-equal", *_none(resumed, "unequal", gone_on > 0)),
        ]
        checks += [_check(name, passed, value, Boundary.CHECKPOINT, str(limit), text) for name, passed, value, limit, text in asked]
        equal = bridge_rungs.count_of(loaded, "tensors") - (bridge_rungs.length_of(loaded.get("unequal")) or 0)
        figures.append(f"{equal}/{bridge_rungs.count_of(saved, 'tensors')}")
    return RungJudgement(tuple(checks), figures[0], NOT_SHOWN)


def judge_lora(rows: Sequence[Row], device: str) -> RungJudgement:
    """Adapters: where they are, what trains, what both exports compute."""
    trained, merged, adapter, outputs, total = (
        bridge_rungs.only_fact(rows, fact) for fact in ("trained", "merged", "adapter", "outputs", "sum")
    )
    asked: list[tuple[str, bool, object, object, str]] = []
    for targets in rungs_training.PLACEMENTS:
        row = bridge_rungs.only_fact([row for row in rows if row.get("targets") == targets], "placed")
        here = bridge_rungs.count_of(row, "asked") > 0
        to = f"to {', '.join(targets)}: "
        asked += [
            (f"{to}every module asked for has an adapter", *_none(row, "without", here)),
            (f"{to}no other module has one", *_none(row, "beside", here)),
            (
                f"{to}only adapters can train",
                *_none(row, "base_trains", bridge_rungs.count_of(row, "trainable") >= 2 * bridge_rungs.count_of(row, "found") > 0),
            ),
        ]
    asked += [
        ("every adapter trains, both halves", *_none(trained, "unmoved", bridge_rungs.count_of(trained, "adapters") > 0)),
        ("losses and norms are numbers", _numbers([trained.get("losses"), trained.get("norms")]) >= 2, trained.get("losses"), "finite", ""),
        ("the base keeps every bit", *_none(trained, "base_moved", bridge_rungs.count_of(trained, "base") > 0)),
        ("the export without adapters is the base", *_none(merged, "unmerged", bridge_rungs.count_of(merged, "tensors") > 0)),
        (
            "the merged export changes the tensors below adapters and no others",
            *_none(merged, "wrong", bridge_rungs.count_of(merged, "changed") > 0),
        ),
        ("PEFT finds every adapter in the adapter export", *_none(adapter, "missing", bridge_rungs.count_of(adapter, "tensors") > 0)),
        ("PEFT knows every name of the adapter export", *_none(adapter, "unexpected", bridge_rungs.count_of(adapter, "tensors") > 0)),
        ("PEFT has the values of the adapter export", *_none(adapter, "unequal", bridge_rungs.count_of(adapter, "tensors") > 0)),
        *_computed(outputs, total, device),
    ]
    checks = tuple(_check(name, passed, value, Boundary.PEFT, str(limit), text) for name, passed, value, limit, text in asked)
    packed = bridge_rungs.count_of(adapter, "packed")
    notes = [f"{packed} names of expert adapters are PEFT's own packing: judged by the logits"] if packed else []
    if bare := bridge_rungs.length_of(adapter.get("bare")):
        notes.append(f"PEFT itself leaves the modules of {bare} adapter tensors bare: they were added to the base and judged by the logits")
    merge = bridge_rungs.number_of(outputs.get("merged"))
    return RungJudgement(checks, "" if merge is None else f"{merge:.1e}", tuple(notes))


def _computed(outputs: Row, total: Row, device: str) -> list[tuple[str, bool, object, object, str]]:
    scale, floor, effect = (bridge_rungs.number_of(outputs.get(key)) for key in ("scale", "floor", "effect"))
    limit = LOGITS * max(1.0, scale or 0.0)
    if device != "cpu" and floor is not None and floor <= FLOOR_CAP * max(1.0, scale or 0.0):
        limit = max(limit, FLOORS * floor)
    start, apart = bridge_rungs.number_of(outputs.get("start")), bridge_rungs.number_of(total.get("apart"))
    found: list[tuple[str, bool, object, object, str]] = [
        ("untrained adapters change nothing", start == 0, outputs.get("start"), "0", ""),
        (
            "trained adapters change the logits",
            effect is not None and effect > SEEN * limit,
            outputs.get("effect"),
            f"> {SEEN * limit:.2g}",
            "",
        ),
    ]
    for key in ("merged", "adapter"):
        value = bridge_rungs.number_of(outputs.get(key))
        name = f"the {key} export computes what Megatron computes"
        found.append((name, value is not None and value <= limit, outputs.get(key), f"<= {limit:.2g}", ""))
    summed = apart is not None and apart <= limit and bridge_rungs.count_of(total, "compared") > 0
    name = "the merged export is base plus scaled adapter, tensor by tensor"
    return [*found, (name, summed, total.get("apart"), f"<= {limit:.2g}", f"furthest: {total.get('worst')}")]


def judge_policy(rows: Sequence[Row], device: str) -> RungJudgement:
    """After every step transformers finds Megatron's log-probabilities in the export."""
    steps = _by_step([row for row in rows if row.get("fact") == "step"])
    floor = bridge_rungs.number_of(steps[0].get("largest"))
    limit = 1 + PROBABILITY
    if device != "cpu" and floor is not None and floor <= 1 + FLOOR_CAP:
        limit = max(limit, 1 + FLOORS * (floor - 1))
    checks = judge_gradients(bridge_rungs.only_fact(rows, "gradients"))
    worst = 0.0
    for step in range(rungs_training.POLICY_STEPS + 1):
        row = steps[step]
        largest, mean, stale = (bridge_rungs.number_of(row.get(key)) for key in ("largest", "mean", "stale"))
        worst = max(worst, math.inf if largest is None else largest - 1)
        near = (
            largest is not None
            and mean is not None
            and 1 <= mean <= largest <= limit
            and row.get("finite") is True
            and bridge_rungs.count_of(row, "count") > 0
        )
        text = f"unchanged in the export: {', '.join(_first(row, 'unchanged'))}" if not near else ""
        checks.append(_check(f"step {step}: largest exp|dlogp|", near, row.get("largest"), Boundary.PROVIDER, f"<= {limit:.6g}", text))
        if step != 0:
            checks += _stepped(step, row, limit, stale)
    return RungJudgement(tuple(checks), f"{worst:.1e}")


def _stepped(step: int, row: Row, limit: float, stale: float | None) -> list[CheckResult]:
    """That a step was one, that the export went along, and that a stale export would have been seen."""
    still, kept = bridge_rungs.length_of(row.get("unmoved")), bridge_rungs.length_of(row.get("unchanged"))
    moved = (
        still is not None
        and still < bridge_rungs.count_of(row, "parameters")
        and (bridge_rungs.number_of(row.get("norm")) or 0.0) > 0
        and bridge_rungs.number_of(row.get("loss")) is not None
    )
    fed = 0 if still is None else _fed(row, still)
    along = still is not None and kept is not None and kept < bridge_rungs.count_of(row, "tensors") and kept <= fed
    needed = 1 + SEEN * (limit - 1)
    asked = (
        (f"step {step}: the optimizer moved weights", moved, f"loss {row.get('loss')}, norm {row.get('norm')}", "> 0", ""),
        (f"step {step}: the export moved with them", along, f"{kept} unchanged", f"<= {fed}", ", ".join(_first(row, "unchanged"))),
        (f"step {step}: stale weights would be seen", stale is not None and stale > needed, row.get("stale"), f"> {needed:.6g}", ""),
    )
    return [_check(name, passed, value, Boundary.PROVIDER, limit, text) for name, passed, value, limit, text in asked]


def _fed(row: Row, still: int) -> int:
    """How many exported tensors the parameters that did not move can feed; those that are counted but not named, the most."""
    names = bridge_rungs.first_of(row.get("unmoved"))
    fed = (next((count for part, count in PARTS.items() if part in str(name)), 1) for name in names)
    return sum(fed) + (still - len(names)) * max(PARTS.values())


def _check(name: str, passed: bool, value: object, boundary: Boundary, threshold: str, message: str = "") -> CheckResult:
    return proof(name, passed, "no facts" if value is None else value, boundary, threshold, message)


def _by_step(rows: Sequence[Row]) -> defaultdict[object, Row]:
    """The fact of each step; an empty one where there is none or more than one, which every check then misses."""
    made: defaultdict[object, Row] = defaultdict(dict)
    for row in rows:
        made[row.get("step")] = {} if row.get("step") in made else row
    return made


def _numbers(value: object) -> int:
    """How many finite numbers nested lists hold; none if anything else is among them."""
    if not isinstance(value, list):
        return int(bridge_rungs.number_of(value) is not None)
    inner = [_numbers(item) for item in value]
    return sum(inner) if all(inner) else 0


def _close(value: object, reference: object) -> bool:
    left, right = bridge_rungs.number_of(value), bridge_rungs.number_of(reference)
    return left is not None and right is not None and abs(left - right) <= RELATIVE * max(abs(right), 0.1)


def _first(row: Mapping[str, Any], key: str) -> list[str]:
    return [str(name) for name in bridge_rungs.first_of(row.get(key))[:SHOWN]]


def _none(row: Mapping[str, Any], key: str, ok: bool) -> tuple[bool, object, str, str]:
    """That a list of a fact is there and empty, of something: passed, value, threshold, names."""
    count = bridge_rungs.length_of(row.get(key))
    return ok and count == 0, count if ok else "of nothing", "0", ", ".join(_first(row, key))
