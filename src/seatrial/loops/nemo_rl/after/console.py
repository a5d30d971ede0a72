"""Metrics from what NeMo-RL prints of each step: the source of last resort when there are no event files.

- `Step i/N` is printed when a step begins, its results and `Total step time` when it has ended: only the latter counts.
- The step number on the console starts anew with each epoch; `train_data_stepN.jsonl` has the one of the event files.
- Results are read inside their own block only: what a model wrote into a sample is no metric.
- `nan` and `inf` are kept as what they are. A last line without its line feed may be cut: that is damage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from seatrial.loops.claims import lookup
from seatrial.loops.lines import lines
from seatrial.loops.nemo_rl.after.dump import read_configs
from seatrial.model.guarded import parse_float, parse_whole
from seatrial.model.series import Damage, Metrics, Overlap, Series

EPOCH = re.compile(r"={25} Epoch ([0-9]{1,18})/\d+ ={25}$")
STEP = re.compile(r"={25} Step ([0-9]{1,18})/([0-9]{1,18}) ={25}$")
DATA = re.compile(r"Logged data to \S*train_data_step([0-9]{1,18})\.jsonl$")
VALIDATION = re.compile(r"▶ Starting validation at step ([0-9]{1,18})\.\.\.$")
BLOCK = re.compile(r"(?:📊|⏱️) +(Training|Validation|Timing)\b.*:$")
ENDED = re.compile(r"  • Total step time: [\d.]+s$")
_NUMBER = r"(-?(?:[0-9]+(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?|nan|inf))"
RESULT = re.compile(rf" {{2,4}}• ([^:]+): {_NUMBER}(?: steps| tokens|s|s \([\d.]+%\))?$")
ROW = re.compile(r" {2,4}• \S")
TRAINING = {
    "Loss": "train/loss",
    "Draft Loss": "train/draft_loss",
    "Generation KL Error": "train/gen_kl_error",
    "Avg Reward": "train/reward",
    "Avg Total Reward": "train/reward",
    "Avg Filtered Reward": "train/filtered_reward",
    "Mean Generation Length": "train/mean_gen_tokens_per_sample",
    "Buffer Size": "train/buffer_size",
    "Avg Trajectory Age": "train/avg_trajectory_age",
}
VALIDATED = {
    "Accuracy": "validation/accuracy",
    "Validation loss": "validation/val_loss",
    "Average response length": "validation/avg_length",
}
TIMES = re.compile(r"[a-z][\w/]*$")
"""The names of timed parts are those of their metrics."""
PLANS = tuple(f"{algorithm}.max_num_steps" for algorithm in ("grpo", "sft", "dpo", "rm", "distillation"))
RUN = re.compile(r"((?:[\w.-]+/)*?)(?:train|timing|validation|performance|ray)/")
"""What stands before the names that each run writes."""


@dataclass(slots=True)
class _Reader:
    """Where in a log the reader is."""

    step: int = 0
    before: int = 0
    """Steps of earlier epochs."""
    validated: int = 0
    block: str = ""
    process: str = ""
    points: dict[str, dict[int, float]] = field(default_factory=dict)
    twice: dict[str, set[int]] = field(default_factory=dict)
    again: dict[str, set[int]] = field(default_factory=dict)
    latest: dict[str, int] = field(default_factory=dict)

    def feed(self, process: str, text: str) -> bool:
        """Take the next line; whether it was a row of results."""
        ruled = "=====" in text
        if ruled and (match := STEP.search(text)):
            self.step, self.process, self.block = self.before + parse_whole(match[1]), process, ""
        elif match := EPOCH.search(text):
            self.before = self.step if parse_whole(match[1]) > 1 else 0
        elif process != self.process:
            return False  # other processes write into the block
        elif match := DATA.match(text):
            self.step = parse_whole(match[1])
        elif match := VALIDATION.match(text):
            self.validated = parse_whole(match[1])
        elif match := BLOCK.match(text.strip()):
            self.block = match[1] if match[1] != "Timing" else self.block
        elif self.block and (match := RESULT.match(text)):
            self._add(match[1], parse_float(match[2]))
            return True
        elif text.strip() and not ROW.match(text):
            self.block = ""
        return False

    def _add(self, name: str, value: float) -> None:
        tag = VALIDATED.get(name) if self.block == "Validation" else TRAINING.get(name)
        if tag is None and self.block == "Training":
            tag = f"timing/train/{'total_step_time' if name == 'Total step time' else name}" if _timed(name) else None
        if tag is None:
            return
        step = self.validated if self.block == "Validation" else self.step
        if step <= self.latest.get(tag, step - 1):
            self.again.setdefault(tag, set()).add(step)
        self.latest[tag] = step
        table = self.points.setdefault(tag, {})
        if step in table and table[step] != value:
            self.twice.setdefault(tag, set()).add(step)
        table[step] = value


def _timed(name: str) -> bool:
    return name == "Total step time" or TIMES.match(name) is not None


def read_console(log: Path) -> Metrics:
    """Collect the results that were printed."""
    reader = _Reader()
    end = last = 0
    for number, process, text in lines(log):
        end = number
        if reader.feed(process, text):
            last = number
    damage = (Damage(str(log), f"line {end}", 1, "the log ends inside the results of a step"),) if last and last == end else ()
    series = {tag: Series(tag, tuple(sorted(table)), tuple(table[s] for s in sorted(table))) for tag, table in reader.points.items()}
    overlaps = tuple(Overlap(tag, tuple(sorted(steps))) for tag, steps in sorted(reader.twice.items()))
    restarts = tuple(Overlap(tag, tuple(sorted(steps))) for tag, steps in sorted(reader.again.items()))
    return Metrics(series=series, damage=damage, overlaps=overlaps, sources=(str(log),) if series else (), restarts=restarts)


def completed_steps(log: Path) -> int:
    """Steps whose end was printed."""
    return sum(ENDED.match(text) is not None for _, _, text in lines(log))


def steps_reached(metrics: Metrics) -> int | None:
    """The least last step of all runs in these metrics; None where no training step is shown. A run that wrote metrics and
    no loss took no step."""
    runs: dict[str, int] = {}
    for tag, series in metrics.series.items():
        if match := RUN.match(tag):
            trained = series.steps[-1] if series.steps and tag == f"{match[1]}train/loss" else 0
            runs[match[1]] = max(runs.get(match[1], 0), trained)
    return min(runs.values()) if any(runs.values()) else None


def steps_planned(paths: tuple[Path, ...]) -> int | None:
    """How many steps the run was to take: by its configuration, else by its own count, which is that of one epoch."""
    logs = [path for path in paths if path.is_file() and (".log" in path.name or path.suffix in (".txt", ".out", ""))]
    return max((n for log in logs for n in _configured(log)), default=None) or max((n for log in logs for n in _counted(log)), default=None)


def _configured(log: Path) -> Iterator[int]:
    for config in read_configs(log):
        for key in PLANS:
            steps = lookup(config or {}, key)
            if type(steps) is int and steps > 0:
                yield steps


def _counted(log: Path) -> Iterator[int]:
    for _, _, text in lines(log):
        if match := STEP.search(text):
            yield parse_whole(match[2])
