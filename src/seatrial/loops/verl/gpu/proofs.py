"""What a finished run proves beside its metrics: the configuration in force, a resume that was one, a score that rose.

Pure functions from the files of a level directory. What is missing is a missed proof, never an absent one: a run whose
configuration cannot be read back may have fallen back to anything.
"""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path

from seatrial.files import read_text
from seatrial.loops.facts import read_facts
from seatrial.loops.lines import lines
from seatrial.loops.proof import proof
from seatrial.loops.verl.claims import in_force
from seatrial.loops.verl.console import skipped_steps
from seatrial.loops.workers import trained_with
from seatrial.model.guarded import as_float, parse_count, parse_json
from seatrial.model.knowledge import Level
from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics
from seatrial.model.verdict import Boundary

RESUMING = re.compile(r"Resuming from (\S+), setting global step to (\d+)")
ADAPTER = re.compile(r"\bAdapter parameters: +([\d,]*\d)")
SCRATCH = "Training from scratch"
TRACKER = "latest_checkpointed_iteration.txt"
PHASES = {"save-resume": ("save", "resume")}
"""Calls of a level that has more than the one called `run`."""
LEAST_PROMPTS = 30
LEAST_T = 2.33
"""One-sided, 1 %, for as many prompts as are required."""


def proofs(level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
    """All proofs of a level on GPUs."""
    facts = read_facts(directory / "imports" / "facts.jsonl")
    claims = {str(row["phase"]): row["values"] for row in facts.of("claims")}
    made = [proof("facts are whole", False, str(item), Boundary.METRICS) for item in facts.damage]
    absent = sorted(set(PHASES.get(level.name, ("run",))) - set(claims))
    if absent:
        made.append(proof("what the level claims was recorded", False, f"no facts of {', '.join(absent)}", Boundary.CONFIG))
    for phase, values in claims.items():
        made.append(in_force(phase, values, directory / phase / "run.log"))
        if any(key.endswith("model.lora.rank") for key in values):
            made.append(adapters(phase, directory / phase / "run.log"))
    made += [trained_with(directory / "imports.jsonl"), every_step(metrics)]
    if level.name == "save-resume":
        made += resumed(directory, metrics)
    if level.name == "learning":
        made.append(validation_rose(directory / "run" / "validation"))
    return tuple(made)


def adapters(phase: str, log: Path) -> CheckResult:
    """The engine counted trainable parameters of an adapter. A rank in the configuration wraps nothing by itself, and
    Megatron-Bridge keeps silent where no module matches."""
    counts = [parse_count(match[1]) for _, _, text in lines(log) if (match := ADAPTER.search(text))] if log.is_file() else []
    value = ", ".join(f"{count:,}" for count in counts) or "no line says so"
    return proof(f"adapters were built ({phase})", min(counts, default=0) > 0, value, Boundary.PEFT, "> 0 parameters")


def every_step(metrics: Metrics) -> CheckResult:
    """No step is missing between the first and the last."""
    skipped = skipped_steps(metrics)
    return proof("every step was logged", skipped is None, "no" if skipped else "yes", Boundary.METRICS, "", skipped or "")


def resumed(directory: Path, metrics: Metrics) -> list[CheckResult]:
    """The second process began where the first one saved, and saved again."""
    place, log = directory / "save" / "checkpoints", directory / "resume" / "run.log"
    said = [text for _, _, text in lines(log)] if log.is_file() else []
    found = [match for text in said if (match := RESUMING.search(text))]
    right = bool(found) and all(Path(match[1]) == place / "global_step_1" and match[2] == "1" for match in found)
    scratch = any(SCRATCH in text for text in said)
    series = metrics.series.get("resume/training/global_step")
    tracker = read_text(place / TRACKER).strip() if (place / TRACKER).is_file() else "absent"
    return [
        proof("resumed from the checkpoint of this level", right and not scratch, _where(found, scratch), Boundary.CHECKPOINT, "step 1"),
        proof(
            "the resumed run trains step 2 only",
            series is not None and series.steps == (2,),
            f"steps {list(series.steps) if series else []}",
            Boundary.CHECKPOINT,
            "[2]",
        ),
        proof("the last checkpoint is that of step 2", tracker == "2", tracker, Boundary.CHECKPOINT, "2"),
        *(complete(place / f"global_step_{step}") for step in (1, 2)),
    ]


def _where(found: list[re.Match[str]], scratch: bool) -> str:
    if scratch:
        return "trained from scratch"
    return f"{found[-1][1]}, step {found[-1][2]}" if found else "no line says so"


def complete(folder: Path) -> CheckResult:
    """A checkpoint has an actor, a critic and the position in the data."""
    parts = {name: any((folder / name).rglob("*")) for name in ("actor", "critic")} | {"data.pt": (folder / "data.pt").is_file()}
    absent = [name for name, there in parts.items() if not there]
    name = f"checkpoint {folder.name} is complete"
    return proof(name, not absent, f"{len(parts) - len(absent)} of {len(parts)} parts", Boundary.CHECKPOINT, "all", ", ".join(absent))


def validation_rose(folder: Path) -> CheckResult:
    """Scores of the same validation prompts, before the first step and after the last."""
    name = "validation scores rose from the start to the end"
    steps = sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    if len(steps) < 2 or steps[0] != 0:
        return proof(name, False, f"validated at steps {steps}", Boundary.METRICS, "at step 0 and at the end")
    first, last = (_scores(folder / f"{step}.jsonl") for step in (steps[0], steps[-1]))
    if first is None or last is None or first.keys() != last.keys() or len(first) < LEAST_PROMPTS:
        message = f"the same {LEAST_PROMPTS} prompts or more must be scored both times"
        return proof(name, False, f"{len(first or ())} and {len(last or ())} prompts", Boundary.METRICS, "", message)
    gains = [last[prompt] - first[prompt] for prompt in first]
    mean, spread = statistics.fmean(gains), statistics.stdev(gains)
    t = mean / (spread / math.sqrt(len(gains))) if spread else 0.0
    value = f"{statistics.fmean(first.values()):.4g} to {statistics.fmean(last.values()):.4g}, t = {t:.2f} over {len(gains)} prompts"
    return proof(name, mean > 0 and t >= LEAST_T, value, Boundary.METRICS, f"t >= {LEAST_T}")


def _scores(path: Path) -> dict[str, float] | None:
    """The mean score of each prompt; None when a row is not whole or a score is not a finite number."""
    found: dict[str, list[float]] = {}
    for row in read_text(path).split("\n"):
        if not row:
            continue
        try:
            entry = parse_json(row)
            found.setdefault(str(entry["input"]), []).append(as_float(entry["score"]))
        except (ValueError, KeyError, TypeError):
            return None
    means = {prompt: statistics.fmean(scores) for prompt, scores in found.items()}
    return means if all(math.isfinite(mean) for mean in means.values()) else None
