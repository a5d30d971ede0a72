"""Metrics from the rows that Trainer prints on the console: one dict per logged step.

The console does not print the step. A `step k of n` line of the driver or a `STEP k` line before a row says it;
otherwise rows are counted, and the speed that Trainer prints at the end tells how many steps lie between two rows.
Values are rounded by Trainer to four digits, so this is the reader of last resort.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from seatrial.files import read_text
from seatrial.model.series import Damage, Metrics, Series

SPEED = re.compile(r"'train_runtime': '?([0-9.e+-]+).*'train_steps_per_second': '?([0-9.e+-]+)")
ROW = re.compile(r"\{'(?:loss|reward|num_tokens)': .*\}")
STEP = re.compile(r"(?:\bSTEP|seatrial: step) (\d+)\b")


def _number(value: object) -> float:
    """A printed value as a number; raises ValueError when it is none."""
    if isinstance(value, (int, float, str)):
        return float(value)
    raise ValueError(f"not a number: {value!r}")


def read_console(log: Path) -> Metrics:
    """Collect the rows; one that cannot be read is damage, not silence."""
    points: dict[str, dict[int, float]] = {}
    damage: list[Damage] = []
    step = stride = 0
    announced: int | None = None
    for number, line in enumerate(read_text(log).split("\n"), 1):
        said = STEP.search(line)
        if said:
            announced = int(said[1])
        speed = SPEED.search(line)
        if speed and step and announced is None:
            stride = max(1, round(float(speed[1]) * float(speed[2]) / step))
        found = ROW.search(line)
        if not found:
            continue
        step = announced if announced is not None and announced > step else step + 1
        try:
            row = ast.literal_eval(found[0])
            for key, value in row.items():
                points.setdefault(f"train/{key}", {})[step] = _number(value)
        except (ValueError, SyntaxError, AttributeError) as error:
            damage.append(Damage(str(log), f"line {number}", 1, f"not a row of metrics: {error}"))
    series = {tag: Series(tag, tuple(s * (stride or 1) for s in values), tuple(values.values())) for tag, values in points.items()}
    return Metrics(series=series, damage=tuple(damage), sources=(str(log),) if series else ())


def steps_planned(paths: tuple[Path, ...]) -> int | None:
    """The largest max_steps of the trainer_state.json files among or below `paths`."""
    files = [file for path in paths for file in (path.rglob("trainer_state.json") if path.is_dir() else [path])]
    planned = []
    for file in files:
        if file.name == "trainer_state.json":
            try:
                planned.append(int(json.loads(read_text(file))["max_steps"]))
            except (ValueError, KeyError, TypeError):
                continue  # the metrics reader reports a torn file; here it only says nothing about the plan
    return max(planned, default=None)
