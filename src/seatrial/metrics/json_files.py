"""Metrics in JSON: rows per step (JSONL or a list), the metrics.json schema, and a trainer's state.

- A row is `{"step": 3, "data": {"loss": 0.5}}` or flat, `{"step": 3, "loss": 0.5}`.
- metrics.json is `{tag: {"step": value}}`; values at the top level are scalars without steps.
- unit_results.json of a test session gives `<test key>/<metric>` with one point at step 0, as the history names them.
- trainer_state.json gives its `log_history`, with the tags that the same trainer writes to TensorBoard.
- Each reader returns None when the file holds no metrics. A line that is torn, is no JSON or has no step, a value
  that is no number where others of its tag are, and a key that occurs twice are `Damage` with their place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from seatrial.core.files import number_to_json, read_rows, read_text
from seatrial.core.guarded import BadValue, as_float, parse_json
from seatrial.core.series import Damage, Metrics, Scalar
from seatrial.metrics.readings import FileReading, number, step_number

_STEP_KEY = re.compile(r"-?[0-9]{1,18}")


def read_jsonl(path: Path) -> FileReading | None:
    """Rows per step, one on each line. A file called metrics.jsonl holds metrics even if none can be read."""
    rows = _Rows(str(path))
    for index, line, whole in read_rows(path):
        if not line.strip():
            continue
        try:
            rows.add(f"line {index}", *_load(line))
        except BadValue as error:
            # What is written completely ends with a newline.
            rows.damaged(f"line {index}", _not_json(error) if whole else "the last line is torn")
    return rows.reading() if rows.metrics_seen or path.name == "metrics.jsonl" else None


def read_json_metrics(path: Path) -> FileReading | None:
    """The metrics.json schema, a list of rows, or a trainer's state, told apart by content."""
    try:
        value, twice = _load(read_text(path))
    except BadValue as error:
        if path.name not in ("metrics.json", "trainer_state.json"):
            return None
        what = f"{_not_json(error)}: torn, or still being written" if error.where else _not_json(error)
        return FileReading(damage=[Damage(str(path), error.where or "the whole file", 0, what)])
    duplicates = [Damage(str(path), f"key {key!r}", 1, "the key occurs twice") for key in twice]
    reading = _reading(str(path), value)
    if reading is not None:
        reading.damage.extend(duplicates)
    return reading


def _not_json(error: BadValue) -> str:
    """What is wrong with a text; of bad syntax the place says enough."""
    return "not valid JSON" if error.where else f"not valid JSON: {error.what}"


def _reading(path: str, data: Any) -> FileReading | None:
    if isinstance(data, dict):
        if {"metrics", "start_time", "exit_status"} <= data.keys():
            return _session(path, data)
        history = data.get("log_history")
        if not isinstance(history, list):
            return _tables(path, data)
        reading, reached = _trainer_state(path, history), data.get("global_step")
        last = max((max(points.steps) for points in reading.points.values() if points.steps), default=0)
        if isinstance(reached, int) and last > reached:
            reading.damage.append(Damage(path, "global_step", 1, f"says {reached}, but step {last} was logged"))
        return reading
    if not isinstance(data, list):
        return None
    rows = _Rows(path)
    for index, row in enumerate(data, start=1):
        rows.add(f"row {index}", row)
    return rows.reading() if rows.metrics_seen else None


def _load(text: str) -> tuple[Any, list[str]]:
    """Parsed JSON, and the keys that stand twice in one of its objects."""
    twice: list[str] = []
    return parse_json(text, twice=twice.append), twice


class _Rows:
    """Collects rows per step."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.metrics_seen = False
        self._reading = FileReading()
        self._texts: dict[str, list[str]] = {}
        self._nested: list[tuple[str, str]] = []

    def damaged(self, where: str, what: str) -> None:
        self._reading.damage.append(Damage(self.path, where, 1, what))

    def add(self, where: str, row: Any, twice: Sequence[str] = ()) -> None:
        """One row, with the keys that stand twice in it."""
        if not isinstance(row, dict):
            self.damaged(where, "not an object")
            return
        for key in twice:
            self.damaged(where, f"the key {key!r} occurs twice")
        step = step_number(row.get("step"))
        if step is None:
            self.damaged(where, "no step" if "step" not in row else f"the step {repr(row['step'])[:80]} is not a whole number")
            return
        values = {key: value for key, value in row.items() if key != "step"}
        data = values.get("data")
        if isinstance(data, dict):
            values = {**{key: value for key, value in values.items() if key != "data"}, **data}
            self.metrics_seen = True
        elif values and all(isinstance(value, bool) or number(value) is not None for value in values.values()):
            self.metrics_seen = True  # a row with text among its values may as well be a rollout
        self.take(where, step, values.items())

    def take(self, where: str, step: int, values: Iterable[tuple[str, object]]) -> None:
        """The values of one row."""
        for tag, value in values:
            converted = number(value)
            if isinstance(value, dict | list) and _holds_no_number(value):
                self._nested.append((where, tag))
            if converted is None:
                self._texts.setdefault(tag, []).append(where)
            else:
                self._reading.add(tag, step, converted)

    def reading(self) -> FileReading:
        """Everything read. Text is no metric, unless its tag has numbers elsewhere: then a value was lost."""
        for tag, places in self._texts.items():
            damage = Damage(self.path, places[0], len(places), f"the value of {tag!r} is not a number")
            if tag in self._reading.points:
                self._reading.damage.append(damage)
            else:
                self._reading.words[tag] = damage
        nested = [Damage(self.path, where, 1, f"a value inside {tag!r} is not finite") for where, tag in self._nested]
        self._reading.damage += nested if self._reading.points else []
        return self._reading


def _holds_no_number(value: Any) -> bool:
    """Whether a number inside a list or an object is NaN or infinite. What was read is not nested deeply."""
    if isinstance(value, dict | list):
        return any(map(_holds_no_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and not math.isfinite(value)


def _trainer_state(path: str, history: list[Any]) -> FileReading:
    rows = _Rows(path)
    for index, row in enumerate(history, start=1):
        where = f"log_history row {index}"
        step = step_number(row.get("step")) if isinstance(row, dict) else None
        if step is None:
            rows.damaged(where, "no step")
            continue
        rows.take(where, step, ((_trainer_tag(key), value) for key, value in row.items() if key != "step"))
    return rows.reading()


def _trainer_tag(key: str) -> str:
    """The tag under which the trainer logs this key to TensorBoard."""
    for split in ("eval", "test"):
        if key.startswith(f"{split}_"):
            return f"{split}/{key.removeprefix(f'{split}_')}"
    return f"train/{key}"


def _session(path: str, data: dict[str, Any]) -> FileReading:
    """The results of a test session: its metrics, and coverage where it is a number; what is text is no series. The rest are scalars."""
    coverage = data["coverage"] if isinstance(data.get("coverage"), int | float) else None
    rest = {key: value for key, value in data.items() if key != "metrics" and (key != "coverage" or coverage is None)}
    reading = _tables(path, {key: value for key, value in rest.items() if not isinstance(value, dict)}) or FileReading()
    if coverage is not None:
        reading.add("coverage", 0, as_float(coverage))
    tests = data["metrics"] if isinstance(data["metrics"], dict) else {"": data["metrics"]}
    for test, table in tests.items():
        if not isinstance(table, dict):
            reading.damage.append(Damage(path, f"metrics[{test!r}]" if test else "metrics", 1, "is no table of metrics"))
            continue
        for name, value in table.items():
            converted = number(value)
            if converted is not None:
                reading.add(f"{test}/{name}", 0, converted)
    return reading


def _tables(path: str, data: dict[str, Any]) -> FileReading | None:
    """The metrics.json schema. Objects without a single step, and lists, are something else and no metrics."""
    reading = FileReading()
    for tag, table in data.items():
        if isinstance(table, dict):
            if not table or any(_STEP_KEY.fullmatch(step) for step in table):
                _table(path, tag, table, reading)
        elif not isinstance(table, list):
            converted = number(table)
            # null stays null and numbers stay as they are; only the marked strings become numbers again.
            reading.scalars[tag] = converted if isinstance(table, str) and converted is not None else table
    return reading if reading.points or reading.scalars or reading.damage else None


def _table(path: str, tag: str, table: dict[str, Any], reading: FileReading) -> None:
    """One series of the metrics.json schema; an empty one is kept as such."""
    reading.series(tag)
    for step, value in table.items():
        converted = number(value)
        if not _STEP_KEY.fullmatch(step):
            reading.damage.append(Damage(path, f"{tag}[{step!r}]", 1, "the step is not a whole number"))
        elif converted is None:
            reading.damage.append(Damage(path, f"{tag}[{step!r}]", 1, f"the value {repr(value)[:80]} is not a number"))
        else:
            reading.add(tag, int(step), converted)


def to_metrics_json(metrics: Metrics) -> dict[str, Scalar | dict[str, float | str]]:
    """Series by step, and scalars at the top level."""
    content: dict[str, Scalar | dict[str, float | str]] = {
        tag: {str(step): number_to_json(value) for step, value in zip(series.steps, series.values, strict=True)}
        for tag, series in metrics.series.items()
    }
    for tag, scalar in metrics.scalars.items():
        content[tag] = number_to_json(scalar) if isinstance(scalar, float) else scalar
    return dict(sorted(content.items()))
