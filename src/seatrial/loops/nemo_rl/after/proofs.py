"""What a finished run proves beside its metrics' thresholds: pure functions from the files of a level directory.

- Of every training phase: the configuration in force, steps by the log and by the metrics, the script's own dump against
  the event files; of every run in it: tokens in the loss, no masked outliers, a gradient and a learning rate.
- What only one level claims is in `level_proofs`.
- What is missing is a missed proof, never an absent one: a run whose configuration cannot be read back may have fallen
  back to anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.files import read_as, read_table
from seatrial.loops.claims import ABSENT, lookup
from seatrial.loops.facts import Facts, read_facts
from seatrial.loops.lines import lines
from seatrial.loops.nemo_rl.after import level_proofs
from seatrial.loops.nemo_rl.after.claims import in_force
from seatrial.loops.nemo_rl.after.console import completed_steps
from seatrial.loops.nemo_rl.after.converted import converted
from seatrial.loops.nemo_rl.after.dump import read_configs
from seatrial.loops.nemo_rl.after.results import ONLY, RESULTS, dumps
from seatrial.loops.nemo_rl.after.steps import agreed, every_step, finite, moved, of_run, steps_differ, trained_once, two_computations
from seatrial.loops.nemo_rl.after.training import runs, supervised
from seatrial.loops.nemo_rl.runs.assertions import FACTS, own_checks, unexpanded
from seatrial.loops.nemo_rl.runs.calls import CHECKPOINTS, SAVING
from seatrial.loops.proof import proof
from seatrial.loops.workers import trained_with
from seatrial.model.errors import UserError
from seatrial.model.guarded import parse_count
from seatrial.model.knowledge import Level
from seatrial.model.record import CheckResult
from seatrial.model.series import Metrics, Series
from seatrial.model.verdict import Boundary

IMPORTS = "imports"
RESUME = "resume"
PEFT = "policy.megatron_cfg.peft.enabled"
THRESHOLD = "grpo.seq_logprob_error_threshold"
LEAST_ERROR = 0.999
"""The mean of exp(|difference|) is 1 at least; less by more than rounding means that tokens were left out."""
TOTAL = re.compile(r"\bTotal parameters: +([\d,]*\d)")
TRAINABLE = re.compile(r"\bTrainable parameters: +([\d,]*\d)")
SAVED = re.compile(r"\bSaving checkpoint for step (\d+)\.\.\.")
DIAMOND = {"baseline": "baseline.json", "dtensor": "dtensor_2step.json", "mcore": "mcore_2step.json"}
"""Dumps of the resume comparison: the folder of the run, and the last dump of it."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One training phase of a level."""

    name: str
    directory: Path
    """Of the level."""
    metrics: Metrics
    claims: Mapping[str, Any]
    asserted: tuple[str, ...] = ()
    """What script and level assert of the metrics."""

    @property
    def printed(self) -> list[dict[str, Any] | None]:
        """The configurations that it printed."""
        return read_configs(self.log) if self.log.is_file() else []

    @property
    def log(self) -> Path:
        """What its processes wrote."""
        return self.directory / self.name / "run.log"

    @property
    def runs(self) -> list[str]:
        """The prefixes of its runs."""
        prefix = "" if self.name == ONLY else f"{self.name}/"
        return [run for run in runs(self.metrics) if run.startswith(prefix)]


def proofs(level: Level, directory: Path, metrics: Metrics) -> tuple[CheckResult, ...]:
    """All proofs of a level."""
    facts = read_facts(directory / FACTS)
    claims = {str(row["phase"]): row["values"] for row in facts.of("claims")}
    made = [proof("facts are whole", False, str(item), Boundary.METRICS) for item in facts.damage]
    absent = sorted(_phases(directory) - set(claims))
    if absent or not claims:
        made.append(proof("what the level claims was recorded", False, f"no facts of {', '.join(absent) or 'any run'}", Boundary.CONFIG))
    asserted = tuple(check.expr for check in (*level.checks, *own_checks(level, directory)))
    for name, values in claims.items():
        phase = Trained(name, directory, metrics, values, asserted)
        made += [*_of_phase(phase), *level_proofs.of_level(level.name, name, directory, metrics, values)]
    return (*made, trained_with(directory / "imports.jsonl"), *_expanded(facts))


def _phases(directory: Path) -> set[str]:
    """The training phases that were run."""
    try:
        stored = read_as(directory / "phases.json", list[dict[str, Any]])
    except UserError:
        return set()
    return {str(entry.get("name")) for entry in stored} - {IMPORTS}


def _expanded(facts: Facts) -> Iterator[CheckResult]:
    """The script's own assertions were read as they would be run."""
    for row in facts.of("assertions"):
        left = unexpanded(row["expressions"])
        name = f"assertions of {Path(row['script']).name} were read"
        yield proof(
            name,
            not left,
            f"{len(row['expressions']) - len(left)} of {len(row['expressions'])}",
            Boundary.METRICS,
            "all",
            "; ".join(left[:2]),
        )


def _of_phase(phase: Trained) -> Iterator[CheckResult]:
    yield in_force(phase.name, phase.claims, phase.log)
    yield converted(phase.name, phase.directory, phase.log)
    if not phase.runs:
        yield proof(f"the run left metrics ({phase.name})", False, "none", Boundary.METRICS, "", "no event file shows a training step")
        return
    yield steps_agree(phase)
    yield from dumps_agree(phase)
    if phase.claims.get(PEFT) is True:
        yield adapters(phase)
    if phase.claims.get(SAVING) is True:
        yield saved(phase)
    printed = phase.printed
    if phase.name != RESUME:  # which trains five times for three runs; what each of them was is a proof of its own
        yield trained_once(phase.name, printed, phase.runs)
        yield finite(phase.name, (text for _, _, text in lines(phase.log)) if phase.log.is_file() else (), printed)
    for run in phase.runs:
        yield every_step(run, phase.metrics, printed)
        yield steps_differ(run, phase.metrics)
        yield moved(run, phase.metrics)
        if not supervised(phase.metrics, run):
            yield from _compared(run, phase, printed)


def _compared(run: str, phase: Trained, printed: list[dict[str, Any] | None]) -> Iterator[CheckResult]:
    """What a comparison of generator and trainer is worth."""
    yield tokens_counted(run, phase.metrics)
    yield unmasked(run, phase, printed)
    made = (two_computations(run, phase.metrics, printed), agreed(run, phase.metrics, phase.asserted))
    yield from (check for check in made if check)


def steps_agree(phase: Trained) -> CheckResult:
    """As many steps ended by the log as have a loss in the metrics."""
    ended = completed_steps(phase.log) if phase.log.is_file() else 0
    logged = sum(len(series) for run in phase.runs if (series := phase.metrics.series.get(f"{run}train/loss")))
    value = f"{ended} steps ended by the log, {logged} have a loss"
    return proof(f"log and metrics show the same steps ({phase.name})", ended == logged > 0, value, Boundary.METRICS, "equal")


def dumps_agree(phase: Trained) -> Iterator[CheckResult]:
    """The metrics that the script asserted are those of the event files, point by point."""
    place = phase.directory / phase.name
    found = {run: path for run, path in dumps(phase.directory).items() if path.is_relative_to(place)}
    found |= {f"{phase.name}/{run}/": place / RESULTS / name for run, name in DIAMOND.items() if (place / RESULTS / name).is_file()}
    events = any("tfevents" in source and Path(source).is_relative_to(place) for source in phase.metrics.sources)
    for run in phase.runs:
        name = f"metrics.json agrees with the event files{of_run(run)}"
        if not events:
            yield proof(name, False, "no event files", Boundary.METRICS, "", "the script's own dump alone cannot be compared with anything")
        elif run not in found:
            lost = (
                "metrics lost by a teardown crash or an early exit: the script ended before it dumped them; those here were "
                "recovered from the event files"
            )
            yield proof(name, False, "no dump", Boundary.METRICS, "", lost)
        else:
            yield _agrees(name, run, found[run], phase.metrics)


def _agrees(name: str, run: str, path: Path, metrics: Metrics) -> CheckResult:
    try:
        stored = read_table(path)
    except UserError as error:
        return proof(name, False, "cannot be read", Boundary.METRICS, "", error.message)
    ours = {tag.removeprefix(run): series for tag, series in metrics.series.items() if tag.startswith(run)}
    wrong = [text for tag in sorted({*ours, *stored}) if (text := _difference(tag, ours.get(tag), stored.get(tag)))]
    points = sum(len(series) for series in ours.values())
    return proof(
        name, bool(ours) and not wrong, f"{len(ours)} series, {points} points", Boundary.METRICS, "all equal", "; ".join(wrong[:3])
    )


def _difference(tag: str, ours: Series | None, stored: Any) -> str | None:
    """How one series of the dump differs from the event files."""
    points = {str(step): value for step, value in zip(ours.steps, ours.values, strict=True)} if ours else {}
    table = stored if isinstance(stored, dict) else {}
    if set(points) != set(table):
        return f"{tag}: {len(table)} points dumped, {len(points)} in the event files"
    other = [step for step, value in points.items() if not (value == table[step] or (math.isnan(value) and table[step] != table[step]))]
    return f"{tag}: other values at step {', '.join(other[:3])}" if other else None


def tokens_counted(run: str, metrics: Metrics) -> CheckResult:
    """No step in which every token was masked: its errors would look perfect."""
    series = metrics.series.get(f"{run}train/token_mult_prob_error")
    low = [step for step, value in zip(series.steps, series.values, strict=True) if not value >= LEAST_ERROR] if series else []
    value = f"least {min(series.values):.6g}" if series and series.values else "not logged"
    message = f"below 1 at step {', '.join(map(str, low[:5]))}: everything was masked" if low else ""
    return proof(
        f"tokens counted at every step{of_run(run)}", bool(series) and not low, value, Boundary.ROLLOUT, f">= {LEAST_ERROR}", message
    )


def unmasked(run: str, phase: Trained, printed: list[dict[str, Any] | None]) -> CheckResult:
    """No sequence was left out because generator and trainer disagreed on it: the mean error of the rest says little."""
    name, bound = f"no sequence was masked for its error{of_run(run)}", "0 %"
    series = phase.metrics.series.get(f"{run}train/num_masked_seqs_by_logprob_error")
    if series is None:
        off = bool(printed) and all(lookup(config or {"grpo": None}, THRESHOLD) in (None, ABSENT) for config in printed)
        return proof(name, off and None not in printed, "masking is off" if off else "not logged", Boundary.ROLLOUT, bound)
    valid = phase.metrics.series.get(f"{run}train/global_valid_seqs")
    step, count = max(zip(series.steps, series.values, strict=True), key=lambda point: point[1], default=(0, 0.0))
    kept = (valid.get(step) if valid else None) or 0.0
    share = count / (count + kept) if count else 0.0
    value = f"{share:.3g} of the sequences at step {step}" if count else f"none at {len(series)} steps"
    return proof(
        name,
        bool(series.values) and not any(series.values),
        value,
        Boundary.ROLLOUT,
        bound,
        "masking hides outlier sequences" if count else "",
    )


def adapters(phase: Trained) -> CheckResult:
    """Bridge counted trainable parameters, and fewer than all: `peft.enabled` wraps nothing where no module matches."""
    texts = [text for _, _, text in lines(phase.log)] if phase.log.is_file() else []
    some, every = ([parse_count(match[1]) for text in texts if (match := pattern.search(text))] for pattern in (TRAINABLE, TOTAL))
    right = min(some, default=0) > 0 and max(some) < max(every, default=0)
    value = ", ".join(f"{count:,}" for count in some) or "no line says so"
    return proof(f"trainable parameters of adapters ({phase.name})", right, value, Boundary.PEFT, "> 0, and not all")


def saved(phase: Trained) -> CheckResult:
    """A checkpoint was begun by the log, its writing was timed to the end, and it lies where it belongs under its final name."""
    texts = (text for _, _, text in lines(phase.log)) if phase.log.is_file() else iter(())
    steps = sorted({parse_count(match[1]) for text in texts if (match := SAVED.search(text))})
    timed = [series for run in phase.runs if (series := phase.metrics.series.get(f"{run}timing/train/checkpointing"))]
    done = any(value > 0 for series in timed for value in series.values)
    place = phase.directory / phase.name / CHECKPOINTS
    last = place / f"step_{steps[-1] if steps else 0}"  # earlier ones may be removed
    there = any(path.is_file() for path in last.rglob("*"))
    message = "" if there else f"{last} holds no file"
    return proof(
        f"a checkpoint was saved ({phase.name})",
        bool(steps) and done and there,
        f"steps {steps}" if steps else "no line says so",
        Boundary.CHECKPOINT,
        "",
        message if done else "its writing was not timed",
    )
