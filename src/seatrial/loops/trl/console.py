"""Metrics from the rows that Trainer prints on the console: one dict per logged step.

The console does not print the step; rows are counted from 1 (or from the step after which a resumed run goes on
when a `step k of n` line of the driver or a `STEP k` line stands before the row). Values are rounded by Trainer to
four digits, so this is the reader of last resort.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from seatrial.files import read_text
from seatrial.model.series import Damage, Metrics, Series

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
    step = 0
    announced: int | None = None
    for number, line in enumerate(read_text(log).split("\n"), 1):
        said = STEP.search(line)
        if said:
            announced = int(said[1])
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
    series = {tag: Series(tag, tuple(values), tuple(values.values())) for tag, values in points.items()}
    return Metrics(series=series, damage=tuple(damage), sources=(str(log),) if series else ())
