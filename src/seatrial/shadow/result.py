"""What the shadow found: one entry per stage, the first divergence, and every knob."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STAGES = (
    *("weights", "data", "sampling", "length", "reward", "value", "advantage", "reference", "logprob", "ratio", "kl", "mask", "loss"),
    *("gradient", "clip", "schedule", "update", "logging"),
)
"""In the order in which a step passes through them; the first that diverges is the answer."""


class Diverged(Exception):
    """A stage whose recorded value is not the recomputed one."""

    def __init__(self, stage: str, what: str, expected: Any, found: Any, **where: Any) -> None:
        super().__init__(f"{stage}: {what}")
        self.stage, self.what, self.expected, self.found, self.where = stage, what, expected, found, where


@dataclass
class Stage:
    """How one stage stands after a whole run."""

    stage: str
    compared: int = 0
    """Values compared."""
    worst: float = 0.0
    """Largest deviation, as a share of what is allowed."""
    unproven: str = ""
    """Why it could not be recomputed."""
    notes: list[str] = field(default_factory=list)


def shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else f"{value:.6g}"
    if hasattr(value, "tolist"):
        return shown(value.tolist())
    if isinstance(value, (list, tuple)):
        text = ", ".join(shown(item) for item in list(value)[:12])
        return f"[{text}{', …' if len(value) > 12 else ''}]"
    return str(value)


@dataclass
class Findings:
    """All stages of a run."""

    stages: dict[str, Stage] = field(default_factory=lambda: {name: Stage(name) for name in STAGES})
    divergence: dict[str, Any] | None = None
    knobs: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0

    def count(self, stage: str, values: int, worst: float = 0.0) -> None:
        """Note so many values as compared and met."""
        entry = self.stages[stage]
        entry.compared += values
        entry.worst = max(entry.worst, worst)

    def diverge(self, found: Diverged, step: int) -> None:
        """Keep the divergence of the earliest step and, within it, of the earliest stage."""
        where = {"step": step, **found.where}
        entry = {"stage": found.stage, "what": found.what, "expected": shown(found.expected), "found": shown(found.found), **where}
        old = self.divergence
        if old is None or (entry["step"], STAGES.index(entry["stage"])) < (old["step"], STAGES.index(old["stage"])):
            self.divergence = entry

    def to_json(self) -> dict[str, Any]:
        """For shadow.json."""
        return {
            "schema_version": 1,
            "steps": self.steps,
            "stages": [asdict(entry) for entry in self.stages.values()],
            "divergence": self.divergence,
            "knobs": self.knobs,
        }


def write_findings(target: Path, recompute: Callable[[], dict[str, Any]]) -> None:
    """Write what a recomputation finds; whatever goes wrong in it is written, too: then the run was not recomputed."""
    try:
        made = recompute()
    except Exception as error:  # noqa: BLE001 - a defect of ours is never the change's
        made = {"schema_version": 1, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(made, indent=1, allow_nan=False, default=str), encoding="utf-8")
    temporary.replace(target)
