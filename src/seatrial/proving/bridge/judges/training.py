"""Judges of the rungs that train: optimizer, checkpoint, lora, policy.

Limits scale with what was measured beside them (how far weights moved, how large logits are), never with the value under test, and every
judge asks that its control would have been seen. A number that is missing or not finite misses its check.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.loops.facts import Row
from seatrial.loops.proof import proof
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary
from seatrial.probes.bridge.rungs import checkpoint, lora, optimizer, policy
from seatrial.proving.bridge.judgement import Judgement
from seatrial.proving.bridge.judges.gradients import judge_gradients

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
KEPT = ("weight", "main", "exp_avg", "exp_avg_sq", "step", *checkpoint.SETTINGS)


def judge_optimizer(rows: Sequence[Row], _device: str) -> Judgement:
    """Both optimizers of Megatron under DDP step like the reference."""
    references = _by_step([row for row in rows if row.get("fact") == "reference"])
    steps = range(1, optimizer.STEPS + 1)
    limits = {step: UPDATE_SHARE * (_number(references[step], "moved") or 0.0) for step in steps}
    shown = all(0 < SEEN * limits[step] < (_number(references[step], "control") or 0.0) for step in steps)
    away = [references[step].get("control") for step in steps]
    checks = [_check("the reference moves, and differs without one rank's half", shown, away, Boundary.DDP, f"> {SEEN:g} limits")]
    worst = 0.0
    for kind, boundary in zip(KINDS, (Boundary.DDP, Boundary.OPTIMIZER), strict=True):
        found = _by_step([row for row in rows if row.get("fact") == "step" and row.get("kind") == kind])
        start = found[0]
        begun = _number(start, "difference") == 0 and _count(start, "ranks") > 1
        checks.append(
            _check(f"{kind}: starts with the reference's weights, on several ranks", begun, start.get("difference"), boundary, "0")
        )
        for step in steps:
            row, reference = found[step], references[step]
            difference = _number(row, "difference")
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
    return Judgement(tuple(checks), f"{worst:.1e}")


def judge_checkpoint(rows: Sequence[Row], _device: str) -> Judgement:
    """What is loaded is what was saved, and a resumed run is the uninterrupted one."""
    checks: list[CheckResult] = []
    figures = []
    for dtype in DTYPES:
        saved, spoiled, loaded, resumed = (_only(rows, fact, dtype) for fact in ("saved", "spoiled", "loaded", "resumed"))
        kinds = saved.get("kinds") if isinstance(saved.get("kinds"), dict) else {}
        parameters = _count(saved, "weights")
        full = parameters > 0 and all((kinds or {}).get(kind) == parameters for kind in KEPT) and loaded.get("kinds") == kinds
        moved = _count(saved, "moved")
        same = (
            resumed.get("uninterrupted") == resumed.get("resumed") and _numbers(resumed.get("resumed")) >= 2 * _count(resumed, "steps") > 0
        )
        gone_on = _count(resumed, "moved")
        of = f"{dtype}: "
        asked = [
            (f"{of}training moves weights before the checkpoint", moved > 0, f"{moved} of {parameters}", "> 0", ""),
            (f"{of}weights, main weights, moments, steps and settings are there", full, kinds, "one per parameter", ""),
            (f"{of}no weight and no setting was right before the load", *_none(spoiled, "equal", parameters > 0)),
            (f"{of}after the load everything is bit-equal", *_none(loaded, "unequal", _count(loaded, "tensors") > 0)),
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
        figures.append(f"{_count(loaded, 'tensors') - (_length(loaded, 'unequal') or 0)}/{_count(saved, 'tensors')}")
    return Judgement(tuple(checks), figures[0], ("dropout is off: random states are not part of the checkpoint",))


def judge_lora(rows: Sequence[Row], device: str) -> Judgement:
    """Adapters: where they are, what trains, what both exports compute."""
    trained, merged, adapter, outputs, total = (_only(rows, fact) for fact in ("trained", "merged", "adapter", "outputs", "sum"))
    asked: list[tuple[str, bool, object, object, str]] = []
    for targets in lora.PLACEMENTS:
        row = _only([row for row in rows if row.get("targets") == targets], "placed")
        here = _count(row, "asked") > 0
        to = f"to {', '.join(targets)}: "
        asked += [
            (f"{to}every module asked for has an adapter", *_none(row, "without", here)),
            (f"{to}no other module has one", *_none(row, "beside", here)),
            (f"{to}only adapters can train", *_none(row, "base_trains", _count(row, "trainable") >= 2 * _count(row, "found") > 0)),
        ]
    asked += [
        ("every adapter trains, both halves", *_none(trained, "unmoved", _count(trained, "adapters") > 0)),
        ("losses and norms are numbers", _numbers([trained.get("losses"), trained.get("norms")]) >= 2, trained.get("losses"), "finite", ""),
        ("the base keeps every bit", *_none(trained, "base_moved", _count(trained, "base") > 0)),
        ("the export without adapters is the base", *_none(merged, "unmerged", _count(merged, "tensors") > 0)),
        ("the merged export changes the tensors below adapters and no others", *_none(merged, "wrong", _count(merged, "changed") > 0)),
        ("PEFT finds every adapter in the adapter export", *_none(adapter, "missing", _count(adapter, "tensors") > 0)),
        ("PEFT knows every name of the adapter export", *_none(adapter, "unexpected", _count(adapter, "tensors") > 0)),
        ("PEFT has the values of the adapter export", *_none(adapter, "unequal", _count(adapter, "tensors") > 0)),
        *_computed(outputs, total, device),
    ]
    checks = tuple(_check(name, passed, value, Boundary.PEFT, str(limit), text) for name, passed, value, limit, text in asked)
    packed = _count(adapter, "packed")
    notes = [f"{packed} names of expert adapters are PEFT's own packing: judged by the logits"] if packed else []
    if bare := _length(adapter, "bare"):
        notes.append(f"PEFT itself leaves the modules of {bare} adapter tensors bare: they were added to the base and judged by the logits")
    merge = _number(outputs, "merged")
    return Judgement(checks, "" if merge is None else f"{merge:.1e}", tuple(notes))


def _computed(outputs: Row, total: Row, device: str) -> list[tuple[str, bool, object, object, str]]:
    """The checks of what adapters and exports compute."""
    scale, floor, effect = (_number(outputs, key) for key in ("scale", "floor", "effect"))
    limit = LOGITS * max(1.0, scale or 0.0)
    if device != "cpu" and floor is not None and floor <= FLOOR_CAP * max(1.0, scale or 0.0):
        limit = max(limit, FLOORS * floor)
    start, apart = _number(outputs, "start"), _number(total, "apart")
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
        value = _number(outputs, key)
        name = f"the {key} export computes what Megatron computes"
        found.append((name, value is not None and value <= limit, outputs.get(key), f"<= {limit:.2g}", ""))
    summed = apart is not None and apart <= limit and _count(total, "compared") > 0
    name = "the merged export is base plus scaled adapter, tensor by tensor"
    return [*found, (name, summed, total.get("apart"), f"<= {limit:.2g}", f"furthest: {total.get('worst')}")]


def judge_policy(rows: Sequence[Row], device: str) -> Judgement:
    """After every step transformers finds Megatron's log-probabilities in the export."""
    steps = _by_step([row for row in rows if row.get("fact") == "step"])
    floor = _number(steps[0], "largest")
    limit = 1 + PROBABILITY
    if device != "cpu" and floor is not None and floor <= 1 + FLOOR_CAP:
        limit = max(limit, 1 + FLOORS * (floor - 1))
    checks = judge_gradients(_only(rows, "gradients"))
    worst = 0.0
    for step in range(policy.STEPS + 1):
        row = steps[step]
        largest, mean, stale = (_number(row, key) for key in ("largest", "mean", "stale"))
        worst = max(worst, math.inf if largest is None else largest - 1)
        near = (
            largest is not None
            and mean is not None
            and 1 <= mean <= largest <= limit
            and row.get("finite") is True
            and _count(row, "count") > 0
        )
        text = f"unchanged in the export: {', '.join(_first(row, 'unchanged'))}" if not near else ""
        checks.append(_check(f"step {step}: largest exp|dlogp|", near, row.get("largest"), Boundary.PROVIDER, f"<= {limit:.6g}", text))
        if step != 0:
            checks += _stepped(step, row, limit, stale)
    return Judgement(tuple(checks), f"{worst:.1e}")


def _stepped(step: int, row: Row, limit: float, stale: float | None) -> list[CheckResult]:
    """That a step was one, that the export went along, and that a stale export would have been seen."""
    still, kept = _length(row, "unmoved"), _length(row, "unchanged")
    moved = (
        still is not None and still < _count(row, "parameters") and (_number(row, "norm") or 0.0) > 0 and _number(row, "loss") is not None
    )
    along = still is not None and kept is not None and kept < _count(row, "tensors") and (kept == 0 or still > 0)
    needed = 1 + SEEN * (limit - 1)
    asked = (
        (f"step {step}: the optimizer moved weights", moved, f"loss {row.get('loss')}, norm {row.get('norm')}", "> 0", ""),
        (f"step {step}: the export moved with them", along, f"{kept} unchanged", "0", ", ".join(_first(row, "unchanged"))),
        (f"step {step}: stale weights would be seen", stale is not None and stale > needed, row.get("stale"), f"> {needed:.6g}", ""),
    )
    return [_check(name, passed, value, Boundary.PROVIDER, limit, text) for name, passed, value, limit, text in asked]


def _check(name: str, passed: bool, value: object, boundary: Boundary, threshold: str, message: str = "") -> CheckResult:
    return proof(name, passed, "no facts" if value is None else value, boundary, threshold, message)


def _by_step(rows: Sequence[Row]) -> defaultdict[object, Row]:
    """The fact of each step; an empty one where there is none or more than one, which every check then misses."""
    made: defaultdict[object, Row] = defaultdict(dict)
    for row in rows:
        made[row.get("step")] = {} if row.get("step") in made else row
    return made


def _only(rows: Sequence[Row], fact: str, dtype: str | None = None) -> Row:
    """The only such fact; an empty one when there is none or more than one, which every check then misses."""
    found = [row for row in rows if row.get("fact") == fact and dtype in (None, row.get("dtype"))]
    return found[0] if len(found) == 1 else {}


def _number(row: Mapping[str, Any], key: str) -> float | None:
    """A finite number, or None."""
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def _count(row: Mapping[str, Any], key: str) -> int:
    value = row.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _numbers(value: object) -> int:
    """How many finite numbers nested lists hold; none if anything else is among them."""
    if not isinstance(value, list):
        return int(_number({"": value}, "") is not None)
    inner = [_numbers(item) for item in value]
    return sum(inner) if all(inner) else 0


def _close(value: object, reference: object) -> bool:
    left, right = _number({"": value}, ""), _number({"": reference}, "")
    return left is not None and right is not None and abs(left - right) <= RELATIVE * max(abs(right), 0.1)


def _length(row: Mapping[str, Any], key: str) -> int | None:
    """How many a list of a fact has; None when it is no such list."""
    found = row.get(key)
    count, first = (found.get("count"), found.get("first")) if isinstance(found, dict) else (None, None)
    return count if isinstance(count, int) and not isinstance(count, bool) and isinstance(first, list) and count >= len(first) else None


def _first(row: Mapping[str, Any], key: str) -> list[str]:
    found = row.get(key)
    return [str(name) for name in found.get("first", [])[:SHOWN]] if isinstance(found, dict) else []


def _none(row: Mapping[str, Any], key: str, ok: bool) -> tuple[bool, object, str, str]:
    """That a list of a fact is there and empty, of something: passed, value, threshold, names."""
    count = _length(row, key)
    return ok and count == 0, count if ok else "of nothing", "0", ", ".join(_first(row, key))
