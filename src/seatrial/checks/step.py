"""From the shadow's findings to checks: one per stage, and limitations from the table of knobs.

A stage that diverges is a missed check with stage, step, row, token or tensor as fields; the stages after it follow from it and are
not listed. A shadow that could not recompute the run is a missed check of the boundary config: nothing was shown, for or against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.core.files import read_text
from seatrial.core.guarded import parse_json
from seatrial.core.records import CheckResult, replace
from seatrial.core.verdict import Boundary

FILE = "shadow.json"
RECORD = "record.jsonl"
BOUNDARIES = {
    "weights": Boundary.PROVIDER,
    "data": Boundary.DATA,
    "sampling": Boundary.ROLLOUT,
    "length": Boundary.ROLLOUT,
    "reward": Boundary.REWARD,
    "advantage": Boundary.REWARD,
    "value": Boundary.PROVIDER,
    "reference": Boundary.PROVIDER,
    "logprob": Boundary.PROVIDER,
    "logging": Boundary.METRICS,
}
"""Of the stages; the others belong to the optimizer."""
ADAPTED = ("weights", "logprob", "sampling", "gradient", "update")
"""Stages that a run with adapters blames on them."""
STATES = ("proven", "beside the step", "neutral", "not exercised", "not proven")
"""How a setting stands, the best first."""
WHERE = ("model", "row", "position", "token", "tensor")


def step_checks(
    directory: Path, run: str, steps: int | None, lora: bool = False, ranks: bool = False, brief: bool = False
) -> list[CheckResult]:
    """The checks of one recorded run; `directory` holds its shadow.json, `steps` is how many it was to take. `brief` makes one check of all
    stages that were met."""
    found = read_shadow(directory / FILE)
    where = f" ({run})" if run not in ("", "run") else ""
    if isinstance(found, str):
        return [_check(f"the step is recomputed{where}", False, Boundary.CONFIG, run, message=found)]
    made: list[CheckResult] = []
    divergence = found["divergence"]
    for stage in found["stages"]:
        name = stage["stage"]
        if divergence is not None and name == divergence["stage"]:
            return [*made, _diverged(divergence, run, where, boundary(name, lora, ranks))]
        if stage["unproven"] or not stage["compared"]:
            continue
        value = f"{stage['compared']} compared, at most {100 * stage['worst']:.2g} % of the tolerance"
        made.append(_check(f"step proof: {name}{where}", True, boundary(name, lora, ranks), run, stage=name, value=value))
    if brief:
        made = [
            _check(
                f"step proof{where}", True, Boundary.OPTIMIZER, run, value=f"{len(made)} stages: {', '.join(check.stage for check in made)}"
            )
        ]
    whole = steps is None or found["steps"] == steps
    value = f"{found['steps']} steps"
    made.append(_check(f"every step was recomputed{where}", whole, Boundary.METRICS, run, value=value, threshold=f"{steps} steps"))
    return made


def boundary(stage: str, lora: bool, ranks: bool) -> Boundary:
    """Where a divergence of a stage points to; of several ranks, a wrong gradient points to how they exchange it."""
    if ranks and stage in ("gradient", "loss", "clip"):
        return Boundary.DDP
    return Boundary.PEFT if lora and stage in ADAPTED else BOUNDARIES.get(stage, Boundary.OPTIMIZER)


def _diverged(found: Mapping[str, Any], run: str, where: str, kind: Boundary) -> CheckResult:
    place = ", ".join(f"{key} {found[key]}" for key in WHERE if found.get(key) is not None)
    message = f"step {found['step']}{', ' + place if place else ''}: {found['what']}: expected {found['expected']}, found {found['found']}"
    name = f"step proof: {found['stage']}{where}"
    made = _check(name, False, kind, run, stage=found["stage"], value=found["found"], threshold=found["expected"], message=message)
    return replace(made, step=int(found["step"]), tensor=str(found.get("tensor") or ""))


def _check(name: str, passed: bool, kind: Boundary, run: str, **fields: Any) -> CheckResult:
    return CheckResult(name=name, kind="proof", passed=passed, boundary=kind, run=run, **fields)


def read_shadow(path: Path) -> dict[str, Any] | str:
    if not path.is_file():
        return f"{path.name} is missing: the run was not recomputed"
    try:
        found = parse_json(read_text(path))
        if "error" in found:
            return f"the shadow could not recompute the run: {found['error']}"
        _require_shape(found)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{path.name} is damaged: {error}"
    return dict(found)


def _require_shape(found: dict[str, Any]) -> None:
    """Raise for what no shadow writes. A divergence at a stage that is not listed would else be passed over."""
    stages, knobs, divergence = found["stages"], found.get("knobs", []), found["divergence"]
    if not isinstance(stages, list) or not all(_has(stage, stage=str, compared=int, worst=(int, float), unproven=str) for stage in stages):
        raise ValueError("stages are not as written")
    if type(found["steps"]) is not int:
        raise ValueError("steps is no whole number")
    if divergence is not None:
        if not _has(divergence, stage=str, what=str, step=int, expected=(int, float, str), found=(int, float, str)):
            raise ValueError("the divergence is not as written")
        if divergence["stage"] not in {stage["stage"] for stage in stages}:
            raise ValueError(f"the divergence is at {divergence['stage']!r}, which is no stage")
    if not isinstance(knobs, list) or not all(_has(row, knob=str, stage=str) and row["status"] in STATES for row in knobs):
        raise ValueError("knobs are not as written")


def _has(row: Any, **kinds: type | tuple[type, ...]) -> bool:
    """Whether a row has these fields; True is no number."""
    return isinstance(row, dict) and all(isinstance(row[key], kind) and not isinstance(row[key], bool) for key, kind in kinds.items())


def level_limitations(directory: Path) -> tuple[str, ...]:
    """Those of all recorded runs of a level, without earlier attempts."""
    return limitations(sorted(path.parent for path in directory.rglob(FILE) if "attempts" not in path.parts))


def limitations(directories: Sequence[Path]) -> tuple[str, ...]:
    """What the recorded runs of a level did not exercise, from their tables of knobs: proven in one of them is proven."""
    best: dict[str, str] = {}
    unproven: dict[str, str] = {}
    unproven_knobs: set[str] = set()
    for directory in directories:
        found = read_shadow(directory / FILE)
        if isinstance(found, str):
            continue
        for row in found.get("knobs", ()):
            old = best.get(row["knob"], STATES[-1])
            best[row["knob"]] = min(old, row["status"], key=STATES.index)
            unproven_knobs |= {row["knob"]} if not row["stage"] and row["status"] == "not proven" else set()
        unproven |= {stage["stage"]: stage["unproven"] for stage in found["stages"] if stage["unproven"]}
    made = [f"the stage {stage} is not proven: {reason}" for stage, reason in unproven.items()]
    idle = [name for name, status in best.items() if status in ("neutral", "not exercised")]
    given = sorted(name for name in unproven_knobs if best[name] == "not proven")
    if given:
        made.append(f"given settings that no stage proves: {', '.join(given)}")
    if idle:
        made.append(f"settings without an effect in this run, and so not proven: {', '.join(idle)}")
    return tuple(made)
