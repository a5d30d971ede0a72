"""Judges of the rungs that train: optimizer, checkpoint, lora, policy.

Limits scale with what was measured beside them (how far weights moved, how large logits are), never with the value under test, and every
judge asks that its control would have been seen. A number that is missing or not finite misses its check.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from seatrial.checks.bridge_rungs import (
    DTYPES,
    RungJudgement,
    check,
    count_of,
    first_of,
    judge_gradients,
    length_of,
    none_of,
    number_of,
    only_fact,
    shown,
)
from seatrial.checks.probe_facts import Row
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
NOT_SHOWN = (
    "dropout is off: random states are not part of the checkpoint",
    "one rank: nothing was sharded, so offsets and replica ids were not exercised",
)
"""By the rung checkpoint."""
PARTS = {"linear_qkv.weight": 3, "linear_qkv.bias": 3, "linear_fc1.weight": 2, "linear_fc1.bias": 2}
"""Exported tensors that one parameter of Megatron feeds: q, k and v; gate and up. Others feed one."""
KEPT = ("weight", "main", "exp_avg", "exp_avg_sq", "step", *rungs_training.SETTINGS)


def judge_optimizer(rows: Sequence[Row], _device: str) -> RungJudgement:
    references = _by_step([row for row in rows if row.get("fact") == "reference"])
    steps = range(1, rungs_training.OPTIMIZER_STEPS + 1)
    limits = {step: UPDATE_SHARE * (number_of(references[step].get("moved")) or 0.0) for step in steps}
    away = [references[step].get("control") for step in steps]
    seen = all(0 < SEEN * limits[step] < (number_of(references[step].get("control")) or 0.0) for step in steps)
    name = "the reference moves, and differs without one rank's half"
    checks = [check(name, seen, away, f"> {SEEN:g} limits", "", Boundary.DDP)]
    worst = 0.0
    for kind, boundary in (("ddp", Boundary.DDP), ("distributed", Boundary.OPTIMIZER)):
        found = _by_step([row for row in rows if row.get("fact") == "step" and row.get("kind") == kind])
        apart = found[0].get("difference")
        begun = number_of(apart) == 0 and count_of(found[0], "ranks") > 1
        checks.append(check(f"{kind}: starts with the reference's weights, on several ranks", begun, apart, "0", "", boundary))
        for step in steps:
            row, reference = found[step], references[step]
            difference, norm, loss = number_of(row.get("difference")), reference.get("norm"), reference.get("loss")
            worst = max(worst, math.inf if difference is None else difference)
            near = difference is not None and difference <= limits[step]
            norms = row["norms"] if isinstance(row.get("norms"), list) else []
            same = len(norms) > 1 and all(_close(each, norm) for each in norms)
            wrong = "" if same else f"gradient norm {norms} instead of {norm}"
            limit, furthest = f"<= {limits[step]:.2g}", f"furthest: {row.get('worst')}"
            checks += [
                check(f"{kind}: weights after step {step}", near, row.get("difference"), limit, furthest, boundary),
                check(f"{kind}: gradient norm of step {step}", same, norms, f"{norm} on every rank", wrong, boundary),
                check(f"{kind}: loss of step {step}", _close(row.get("loss"), loss), row.get("loss"), str(loss), "", boundary),
            ]
    return RungJudgement(tuple(checks), f"{worst:.1e}")


def judge_checkpoint(rows: Sequence[Row], _device: str) -> RungJudgement:
    checks: list[CheckResult] = []
    figures = []
    at = Boundary.CHECKPOINT
    for dtype in DTYPES:
        saved, spoiled, loaded, resumed = (only_fact(rows, fact, dtype) for fact in ("saved", "spoiled", "loaded", "resumed"))
        kinds = saved["kinds"] if isinstance(saved.get("kinds"), dict) else {}
        parameters, moved, tensors = count_of(saved, "weights"), count_of(saved, "moved"), count_of(loaded, "tensors")
        full = parameters > 0 and all(kinds.get(kind) == parameters for kind in KEPT) and loaded.get("kinds") == kinds
        again, plain = resumed.get("resumed"), resumed.get("uninterrupted")
        same = plain == again and _numbers(again) >= 2 * count_of(resumed, "steps") > 0
        stored = f"{dtype}: weights, main weights, moments, steps and settings are there"
        going = f"{dtype}: losses and norms after the resume are the uninterrupted run's"
        checks += [
            check(f"{dtype}: training moves weights before the checkpoint", moved > 0, f"{moved} of {parameters}", "> 0", "", at),
            check(stored, full, kinds, "one per parameter", "", at),
            none_of(f"{dtype}: no weight and no setting was right before the load", spoiled, "equal", parameters > 0, at),
            none_of(f"{dtype}: after the load everything is bit-equal", loaded, "unequal", tensors > 0, at),
            check(going, same, again, str(plain), "", at),
            none_of(f"{dtype}: after the resume everything is bit-equal", resumed, "unequal", count_of(resumed, "moved") > 0, at),
        ]
        figures.append(f"{tensors - (length_of(loaded.get('unequal')) or 0)}/{count_of(saved, 'tensors')}")
    return RungJudgement(tuple(checks), figures[0], NOT_SHOWN)


def judge_lora(rows: Sequence[Row], device: str) -> RungJudgement:
    """Adapters: where they are, what trains, what both exports compute."""
    trained, merged, adapter, outputs, total = (only_fact(rows, fact) for fact in ("trained", "merged", "adapter", "outputs", "sum"))
    at = Boundary.PEFT
    checks: list[CheckResult] = []
    for targets in rungs_training.PLACEMENTS:
        row = only_fact([row for row in rows if row.get("targets") == targets], "placed")
        here, both = count_of(row, "asked") > 0, count_of(row, "trainable") >= 2 * count_of(row, "found") > 0
        to = f"to {', '.join(targets)}: "
        checks += [
            none_of(f"{to}every module asked for has an adapter", row, "without", here, at),
            none_of(f"{to}no other module has one", row, "beside", here, at),
            none_of(f"{to}only adapters can train", row, "base_trains", both, at),
        ]
    finite, exported = _numbers([trained.get("losses"), trained.get("norms")]) >= 2, count_of(adapter, "tensors") > 0
    below = "the merged export changes the tensors below adapters and no others"
    checks += [
        none_of("every adapter trains, both halves", trained, "unmoved", count_of(trained, "adapters") > 0, at),
        check("losses and norms are numbers", finite, trained.get("losses"), "finite", "", at),
        none_of("the base keeps every bit", trained, "base_moved", count_of(trained, "base") > 0, at),
        none_of("the export without adapters is the base", merged, "unmerged", count_of(merged, "tensors") > 0, at),
        none_of(below, merged, "wrong", count_of(merged, "changed") > 0, at),
        none_of("PEFT finds every adapter in the adapter export", adapter, "missing", exported, at),
        none_of("PEFT knows every name of the adapter export", adapter, "unexpected", exported, at),
        none_of("PEFT has the values of the adapter export", adapter, "unequal", exported, at),
        *_computed(outputs, total, device),
    ]
    packed = count_of(adapter, "packed")
    notes = [f"{packed} names of expert adapters are PEFT's own packing: judged by the logits"] if packed else []
    if bare := length_of(adapter.get("bare")):
        notes.append(f"PEFT itself leaves the modules of {bare} adapter tensors bare: they were added to the base and judged by the logits")
    merge = number_of(outputs.get("merged"))
    return RungJudgement(tuple(checks), "" if merge is None else f"{merge:.1e}", tuple(notes))


def _computed(outputs: Row, total: Row, device: str) -> list[CheckResult]:
    scale, floor, effect = (number_of(outputs.get(key)) for key in ("scale", "floor", "effect"))
    limit = LOGITS * max(1.0, scale or 0.0)
    if device != "cpu" and floor is not None and floor <= FLOOR_CAP * max(1.0, scale or 0.0):
        limit = max(limit, FLOORS * floor)
    seen, most = effect is not None and effect > SEEN * limit, f"<= {limit:.2g}"
    merged, adapter, apart = number_of(outputs.get("merged")), number_of(outputs.get("adapter")), number_of(total.get("apart"))
    summed = apart is not None and apart <= limit and count_of(total, "compared") > 0
    asked = (
        ("untrained adapters change nothing", number_of(outputs.get("start")) == 0, outputs.get("start"), "0", ""),
        ("trained adapters change the logits", seen, outputs.get("effect"), f"> {SEEN * limit:.2g}", ""),
        ("the merged export computes what Megatron computes", merged is not None and merged <= limit, outputs.get("merged"), most, ""),
        ("the adapter export computes what Megatron computes", adapter is not None and adapter <= limit, outputs.get("adapter"), most, ""),
        (
            *("the merged export is base plus scaled adapter, tensor by tensor", summed, total.get("apart"), most),
            f"furthest: {total.get('worst')}",
        ),
    )
    return [check(name, passed, value, threshold, text, Boundary.PEFT) for name, passed, value, threshold, text in asked]


def judge_policy(rows: Sequence[Row], device: str) -> RungJudgement:
    """After every step transformers finds Megatron's log-probabilities in the export."""
    steps = _by_step([row for row in rows if row.get("fact") == "step"])
    floor = number_of(steps[0].get("largest"))
    limit = 1 + PROBABILITY
    if device != "cpu" and floor is not None and floor <= 1 + FLOOR_CAP:
        limit = max(limit, 1 + FLOORS * (floor - 1))
    checks = judge_gradients(only_fact(rows, "gradients"))
    worst = 0.0
    for step in range(rungs_training.POLICY_STEPS + 1):
        row = steps[step]
        largest, mean = number_of(row.get("largest")), number_of(row.get("mean"))
        worst = max(worst, math.inf if largest is None else largest - 1)
        near = largest is not None and mean is not None and 1 <= mean <= largest <= limit
        near = near and row.get("finite") is True and count_of(row, "count") > 0
        text = "" if near else f"unchanged in the export: {', '.join(shown(row.get('unchanged')))}"
        checks.append(check(f"step {step}: largest exp|dlogp|", near, row.get("largest"), f"<= {limit:.6g}", text))
        checks += _stepped(step, row, limit) if step else []
    return RungJudgement(tuple(checks), f"{worst:.1e}")


def _stepped(step: int, row: Row, limit: float) -> list[CheckResult]:
    still, kept, stale = length_of(row.get("unmoved")), length_of(row.get("unchanged")), number_of(row.get("stale"))
    moved = still is not None and still < count_of(row, "parameters")
    moved = moved and (number_of(row.get("norm")) or 0.0) > 0 and number_of(row.get("loss")) is not None
    fed = 0 if still is None else _fed(row, still)
    along = still is not None and kept is not None and kept < count_of(row, "tensors") and kept <= fed
    needed, names = 1 + SEEN * (limit - 1), ", ".join(shown(row.get("unchanged")))
    return [
        check(f"step {step}: the optimizer moved weights", moved, f"loss {row.get('loss')}, norm {row.get('norm')}", "> 0"),
        check(f"step {step}: the export moved with them", along, f"{kept} unchanged", f"<= {fed}", names),
        check(f"step {step}: stale weights would be seen", stale is not None and stale > needed, row.get("stale"), f"> {needed:.6g}"),
    ]


def _fed(row: Row, still: int) -> int:
    """How many exported tensors the parameters that did not move can feed; those that are counted but not named, the most."""
    names = first_of(row.get("unmoved"))
    fed = (next((count for part, count in PARTS.items() if part in str(name)), 1) for name in names)
    return sum(fed) + (still - len(names)) * max(PARTS.values())


def _by_step(rows: Sequence[Row]) -> defaultdict[object, Row]:
    """The fact of each step; an empty one where there is none or more than one, which every check then misses."""
    made: defaultdict[object, Row] = defaultdict(dict)
    for row in rows:
        made[row.get("step")] = {} if row.get("step") in made else row
    return made


def _numbers(value: object) -> int:
    """How many finite numbers nested lists hold; none if anything else is among them."""
    if not isinstance(value, list):
        return int(number_of(value) is not None)
    inner = [_numbers(item) for item in value]
    return sum(inner) if all(inner) else 0


def _close(value: object, reference: object) -> bool:
    left, right = number_of(value), number_of(reference)
    return left is not None and right is not None and abs(left - right) <= RELATIVE * max(abs(right), 0.1)
