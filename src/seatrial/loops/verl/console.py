"""Metrics from the records that verl prints on its console: `step:3 - key:value - key:value`.

- A record may share its line with a progress bar or the prefix of a Ray process, and a step may have several records
  (training, then validation), so it is looked for anywhere in a line.
- `nan`, `inf` and their numpy forms are kept as what they are. A record that cannot be read to its end is damage; so is
  one that the end of the file cuts off.
- verl logs training metrics and metrics of validation under one step: only the former show that a step was trained.
- Lines come in any order: the progress bar can be full before the last record is printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from seatrial.loops.lines import lines
from seatrial.loops.verl.signals import SIGNALS
from seatrial.model.guarded import parse_float, parse_step, parse_whole
from seatrial.model.series import Damage, Metrics, Overlap, Series

REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
RECORD = re.compile(r"\bstep:(-?\d+) - (?=\S)")
_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?|\.[0-9]+|nan|NaN|inf|Infinity)|True|False|None|null"
TRAINED = re.compile(r"(?:^|.*/)(?:training/global_step|actor/(?:pg_)?loss|critic/vf_loss|train/loss)$")
"""Metrics that only a training step writes."""
WORDS = {"True": "1", "False": "0", "None": "nan", "null": "nan"}
NUMBERS = re.compile(rf"(?:[^/]+/)*?(?:{'|'.join(SIGNALS.every)})$")
"""Metrics of which True and False are damage."""
ITEM = re.compile(rf"(?P<key>\S.*):(?:np\.\w+\((?P<wrapped>{_NUMBER})\)|(?P<plain>{_NUMBER}))")
"""A key may hold colons, so the value stands after the last one."""
PLANS = {
    "trainer": re.compile(r"\bTotal training steps: ([0-9]{1,18})\b"),
    "bar": re.compile(r"\bTraining Progress: +\d+%\|[^|]*\| \d+/([0-9]{1,18}) \["),
    "schedule": re.compile(r"\bTotal steps: ([0-9]{1,18}), num_warmup_steps"),
}
"""How many steps were planned. The schedules of learning rates are the only word of supervised runs on their length."""


def read_console(log: Path) -> Metrics:
    """Collect the records."""
    points: dict[str, dict[int, float]] = {}
    twice: dict[str, set[int]] = {}
    again: dict[str, set[int]] = {}
    latest: dict[str, int] = {}
    damage: list[Damage] = []
    words: dict[str, Damage] = {}
    end = last = 0
    for number, _, text in lines(log):
        end = number
        for step, body in _records(text) if "step:" in text else ():
            last = number
            if step is None:
                damage.append(Damage(str(log), f"line {number}", 1, "a record of metrics whose step is no step"))
                continue
            values, logic, torn = _values(body)
            for key in logic:
                words.setdefault(key, Damage(str(log), f"line {number}", 1, f"the value of {key!r} is not a number"))
            if torn is not None:
                damage.append(Damage(str(log), f"line {number}", 1, f"not a record of metrics: {torn[:80]!r}"))
            for tag, value in values.items():
                if step <= latest.get(tag, step - 1):
                    again.setdefault(tag, set()).add(step)
                latest[tag] = step
                if points.setdefault(tag, {}).get(step, value) != value:
                    twice.setdefault(tag, set()).add(step)
                points[tag][step] = value
    if last and last == end and not damage:  # no line feed after it: the last number may be half of one
        damage.append(Damage(str(log), f"line {end}", 1, "the log ends inside a record of metrics"))
    series = {tag: Series(tag, tuple(sorted(table)), tuple(table[s] for s in sorted(table))) for tag, table in points.items()}
    overlaps = tuple(Overlap(tag, tuple(sorted(steps))) for tag, steps in sorted(twice.items()))
    restarts = tuple(Overlap(tag, tuple(sorted(steps))) for tag, steps in sorted(again.items()))
    sources = (str(log),) if series else ()
    return Metrics(series=series, damage=tuple(damage), words=words, overlaps=overlaps, sources=sources, restarts=restarts)


def _records(text: str) -> Iterator[tuple[int | None, str]]:
    """Step and items of the records in a line, None for a step that is none. What a model wrote about some `step:1 - ` is
    prose, not a record."""
    found = list(RECORD.finditer(text))
    for index, match in enumerate(found):
        body = text[match.end() : found[index + 1].start() if index + 1 < len(found) else None]
        first = body.split(" - ")[0].rstrip()
        if ":" in first[1:-1] or " " not in first:
            yield parse_step(match[1]), REPEATED.sub("", body).strip()


def _values(body: str) -> tuple[dict[str, float], list[str], str | None]:
    """The items of a record up to the first that cannot be read, the keys of metrics that are true or false, and that one."""
    values: dict[str, float] = {}
    logic: list[str] = []
    for item in body.split(" - "):
        match = ITEM.fullmatch(item.strip())
        if match is None:
            return values, logic, item
        key, text = match["key"], match["wrapped"] or match["plain"]
        if text in ("True", "False") and NUMBERS.match(key):
            logic.append(key)
            continue
        if key.endswith("/lr") and text == "0.000":
            continue  # older versions print three digits, and learning rates are smaller than that
        values[key] = parse_float(WORDS.get(text, text))
    return values, logic, None


def steps_reached(metrics: Metrics) -> int | None:
    """The least last step of all training runs in these metrics; None where no training step is shown."""
    runs: dict[str, int] = {}
    for tag, series in metrics.series.items():
        if TRAINED.match(tag) and series.steps:
            run = "/".join(tag.split("/")[:-2])
            runs[run] = max(runs.get(run, 0), series.steps[-1])
    return min(runs.values(), default=None)


def skipped_steps(metrics: Metrics) -> str | None:
    """Training steps that nothing shows between the first and the last one: verl logs every step."""
    for tag, series in metrics.series.items():
        if TRAINED.match(tag) and series.steps:
            missing = next((before + 1 for before, after in pairwise(series.steps) if after - before > 1), None)
            if missing is not None:
                return f"{tag} was not logged at step {missing}, so nothing shows that this step was trained"
    return None


def steps_planned(paths: tuple[Path, ...]) -> int | None:
    """How many steps the run was to take, by the words of the logs among `paths`; the surest words count."""
    said: dict[str, int] = {}
    for path in paths:
        if not path.is_file() or path.suffix not in (".log", ".txt", ".out", ""):
            continue
        for _, _, text in lines(path):
            for name, pattern in PLANS.items() if "Total " in text or "Training Progress" in text else ():
                for match in pattern.finditer(text):
                    said[name] = max(said.get(name, 0), parse_whole(match[1]))
    return next((said[name] for name in PLANS if name in said), None)
