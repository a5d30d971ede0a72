"""Trainer's metrics: reads them from the console, says what each means, compares two runs, and tells when they prove nothing.

Only causes outside the trained code make a run vacuous.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from seatrial.checks import probe_facts
from seatrial.checks.training_run import DEAD_RATE
from seatrial.core.errors import UserError
from seatrial.core.files import read_json
from seatrial.core.guarded import BadValue, as_float, parse_float, parse_literal, parse_whole
from seatrial.core.loop import Vacuity
from seatrial.core.records import CheckResult
from seatrial.core.series import Damage, Metrics, Overlap
from seatrial.core.specs import Bound, Signals
from seatrial.core.verdict import Boundary
from seatrial.loops.console_lines import as_series, read_lines

ROW = re.compile(r"""\{['"](loss|reward|num_tokens|train_runtime|eval_\w+)['"]: [^{}]*\}?""")
"""A row, or the beginning of a torn one."""
STEP = re.compile(r"(?:\bSTEP|seatrial: step) ([0-9]{1,18})\b(?: of ([0-9]{1,18})\b)?")
BAR = re.compile(r"\s*\d+%\|[^|]*\|\s*([0-9]{1,18})/([0-9]{1,18}) \[")
"""Trainer's progress bar has no title; those of loading, saving and mapping have one."""
BARE = re.compile(r"(?<=: )(?:[-+]?(?:nan(?:\(\w*\))?|inf|NaN|Infinity|1\.#\w+)|null|true|false)(?=[,}])")
NUMPY = re.compile(r"(?:np|numpy)\.(?:float|u?int)\d+\(([^()]*)\)|(?:tensor|array)\(\[?([^()\[\],]*)\]?(?:, (?:device|dtype)=[^()]*)?\)")
LOGGED = re.compile(r"(?:eval_)?(?:loss|grad_norm|learning_rate|rewards?(?:/.+)?|reward_std|frac_reward_zero_std|kl|entropy)")
"""Metrics of which text is damage. Another key may hold text: a user's own."""
ROUNDED = 0.0005
"""Half of the last digit of Trainer's steps per second."""
COUNTED = ("epoch", "num_tokens")
"""Of one run they only grow."""
MOST_BY_EPOCHS = 500
Values = dict[str, float]


@dataclass(slots=True)
class _Row:
    kind: str
    values: Values
    step: int | None
    """As announced, or as found later."""
    texts: tuple[str, ...] = ()
    """Keys whose value is text, true or false."""
    line: int = 0


@dataclass(slots=True)
class _Console:
    rows: list[_Row] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    announced: int | None = None
    planned: int | None = None
    bar: int | None = None
    """The last position of Trainer's progress bar: the untitled one before the first row, and those with its total."""


def read_console(log: Path) -> Metrics:
    """Collect the rows; one that cannot be read is damage, not silence."""
    found = _read(log)
    if len(found.rows) > 3 and found.rows[::2] == found.rows[1::2]:  # two callbacks print every row
        found.rows = found.rows[::2]
    again = _again(found.rows)
    estimated = found.announced is None and not _spread(found)
    points: dict[str, dict[int, float]] = {}
    step = 0
    for row in found.rows:
        step = step + (row.kind == "train") if row.step is None else row.step
        for key, value in row.values.items():
            tag = f"eval/{key.removeprefix('eval_')}" if row.kind == "eval" else f"train/{key}"
            points.setdefault(tag, {})[step] = value
    numeric = {key for row in found.rows for key in row.values}
    for row in found.rows:
        found.damage += [
            Damage(str(log), f"line {row.line}", 1, f"the value of {key!r} is not a number") for key in row.texts if key in numeric
        ]
    series = as_series(points)
    closing = next((row.values for row in reversed(found.rows) if row.kind == "end"), {})
    return Metrics(
        series=series,
        damage=tuple(found.damage),
        sources=(str(log),) if series else (),
        restarts=(Overlap("train/loss", again),) if again else (),
        estimated=estimated,
        steps_taken=_taken(closing, sum(row.kind == "train" for row in found.rows)),
    )


_NOTICED = _Row("train", {}, None)
_FLAT = re.compile(r"\{(?:'[\w/.@()-]++': (?:'[\w.+-]++'|[\d.e+-]++)(?:, |(?=\}$)))++\}")
_PAIR = re.compile(r"'([^']+)': (?:'([^']+)'|([^',}]+))")
_PLAIN = re.compile(r"[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")
"""Nearly every row: names and decimal numbers, which need no parser of Python."""


def _again(rows: Sequence[_Row]) -> tuple[int, ...]:
    """Places, by the number of the row or by its step, at which another run begins: a second closing row, or a row of training after one;
    a step that was announced before; epochs or tokens that fall. A log has them in the order in which they were made."""
    found: list[int] = []
    before: Values = {}
    latest, ended = 0, False
    for number, row in enumerate(rows, 1):
        back = ended and row.kind in ("train", "end")
        if row.kind == "train":
            back = back or row.values == before or (row.step is not None and row.step <= latest)
            back = back or any(row.values[key] < before[key] * 0.999 for key in COUNTED if key in row.values and key in before)
            latest, before = row.step or latest, row.values
        ended = row.kind == "end" or (ended and row.kind == "eval")
        found += [row.step or number] if back else []
    return tuple(sorted(set(found)))


def _read(log: Path, *, numbers: bool = True) -> _Console:
    """What a log shows; without `numbers` its rows are not read, only noticed."""
    found = _Console()
    fresh = False
    bar = None
    for number, _, text in read_lines(log):
        if ("STEP" in text or "seatrial: step" in text) and (said := STEP.search(text)):
            found.announced, fresh = parse_whole(said[1]), True
            found.planned = parse_whole(said[2]) if said[2] else found.planned
        bar = (BAR.match(text) if "%|" in text else None) or bar
        if "{" in text and (shown := ROW.search(text)):
            found.rows.append(_row(log, number, shown, found, fresh) if numbers else _NOTICED)
            fresh = False
        if bar and found.rows and found.planned in (None, parse_whole(bar[2])):
            found.bar, found.planned = parse_whole(bar[1]), parse_whole(bar[2])
    return found


def _row(log: Path, number: int, shown: re.Match[str], found: _Console, fresh: bool) -> _Row:
    """The row that a line shows, with the step that was announced for it."""
    texts: tuple[str, ...] = ()
    kind = "end" if shown[1] == "train_runtime" else "eval" if shown[1].startswith("eval_") else "train"
    values: Values = {}
    try:
        values, texts = _values(shown[0])
    except BadValue as error:
        found.damage.append(Damage(str(log), f"line {number}", 1, f"not a row of metrics: {error}"))
    return _Row(kind, values, found.announced if fresh or kind == "end" else None, texts, number)


def _values(text: str) -> tuple[Values, tuple[str, ...]]:
    """The numbers of a row, and the keys of what is text; raises BadValue where a metric of training is no number."""
    if _FLAT.fullmatch(text):
        pairs = [(key, told or bare) for key, told, bare in _PAIR.findall(text)]
        if all(_PLAIN.fullmatch(told) for _, told in pairs) and len(dict(pairs)) == len(pairs):
            return {key: parse_float(told) for key, told in pairs}, ()
    plain = BARE.sub(lambda word: repr(word[0].replace("null", "nan")), NUMPY.sub(lambda call: (call[1] or call[2] or "").strip(), text))
    row: Any = parse_literal(plain)
    if not isinstance(row, dict):
        raise BadValue("not a dict")
    values: Values = {}
    texts: list[str] = []
    for key, value in row.items():
        try:
            values[str(key)] = _number(value)
        except BadValue:
            if LOGGED.fullmatch(str(key)):
                raise
            texts.append(str(key))
    return values, tuple(texts)


def _number(value: object) -> float:
    if value is None or value in ("None", "null"):
        return float("nan")
    if isinstance(value, bool):
        raise BadValue(f"not a number: {value}")
    return parse_float(value) if isinstance(value, str) else as_float(value)


def _spread(found: _Console) -> bool:
    """Find the steps of rows that nothing announced; whether they are sure."""
    logged = [row for row in found.rows if row.kind == "train"]
    closing = next((row for row in reversed(found.rows) if row.kind == "end"), None)
    taken = _taken(closing.values, len(logged)) if closing else None
    end = found.bar or _end_by_epochs([*logged, *([closing] if closing else [])], taken) or taken
    if end is None:
        return False
    if closing is not None:
        closing.step = end
    if closing is not None and (steps := _by_epochs([row.values.get("epoch") for row in logged], closing.values.get("epoch"), end)):
        for row, step in zip(logged, steps, strict=True):
            row.step = step
        return True
    before = max(0, end - taken) if taken else 0
    distance = max(1, (end - before) // max(1, len(logged)))
    for index, row in enumerate(logged, 1):
        row.step = min(end, before + index * distance)
    return False


def _by_epochs(epochs: Sequence[float | None], last: float | None, end: int) -> list[int]:
    """The steps of rows by how far each had come; none where the four digits of an epoch do not tell."""
    if not last or end > MOST_BY_EPOCHS:
        return []
    shares = [epoch / last * end for epoch in epochs if epoch]
    if not all(map(math.isfinite, shares)):
        return []
    steps = [round(share) for share in shares]
    sure = len(steps) == len(epochs) and all(abs(share - step) < 0.25 for share, step in zip(shares, steps, strict=True))
    return steps if sure and steps and steps[-1] <= end and all(b > a for a, b in pairwise(steps)) else []


def _taken(closing: Values, rows: int) -> int | None:
    """How many steps the run took, from its time and speed; None where the rounded speed does not tell."""
    seconds, speed = closing.get("train_runtime", 0.0), closing.get("train_steps_per_second", 0.0)
    if not (0 < seconds < 1e12 and 0 < speed < 1e6):  # 1e999 is infinite
        return None
    if seconds * ROUNDED < 0.5:
        return round(seconds * speed)
    # A long run: the distance of two rows is a whole number, too.
    return rows * round(seconds * speed / rows) if rows and seconds * ROUNDED < 0.5 * rows else None


def _end_by_epochs(rows: Iterable[_Row], taken: int | None) -> int | None:
    """The last step of a run that may have been resumed: epochs count from its very start."""
    epochs = [row.values["epoch"] for row in rows if row.values.get("epoch")]
    if taken is None or len(epochs) < 3 or epochs[-2] <= epochs[0]:
        return None
    logged = epochs[:-1]
    per_step = (logged[-1] - logged[0]) / (len(logged) - 1) / max(1, taken // len(logged))
    end = epochs[-1] / per_step
    unsure = end * epochs[-1] * 1e-3 / (logged[-1] - logged[0])  # epochs have four digits
    return round(end) if unsure < 0.5 and end > taken else None


def steps_reached(metrics: Metrics) -> int | None:
    """The least last step of all training runs. The row that closes a run counts, since losses may be logged less often."""
    runs: dict[str, int] = {}
    for tag, series in metrics.series.items():
        run, _, name = tag.rpartition("/")
        if name in ("loss", "train_runtime") and not is_evaluation(run) and series.steps:
            runs[run] = max(runs.get(run, 0), series.steps[-1])
    return min(runs.values(), default=metrics.last_step())


def steps_planned(paths: tuple[Path, ...]) -> int | None:
    """The largest max_steps of the trainer_state.json files among or below `paths`; else what a log among them says."""
    files = [file for path in paths for file in (path.rglob("trainer_state.json") if path.is_dir() else [path])]
    planned = _stated(files, "max_steps")
    logs = [file for file in files if not planned and file.suffix in (".log", ".txt", ".out", "")]
    return max([*planned, *(said for log in logs if (said := _read(log, numbers=False).planned) is not None)], default=None)


def log_interval(paths: tuple[Path, ...]) -> int | None:
    """logging_steps of the trainer_state.json files among or below `paths`."""
    files = [file for path in paths for file in (path.rglob("trainer_state.json") if path.is_dir() else [path])]
    return max((steps for steps in _stated(files, "logging_steps") if steps > 0), default=None)


def _stated(files: Iterable[Path], key: str) -> list[int]:
    found = []
    for file in files:
        if file.name == "trainer_state.json":
            try:
                state = read_json(file)
            except UserError:
                continue  # the metrics reader reports a torn file; here it only says nothing about the plan
            if isinstance(state, dict) and type(state.get(key)) is int:
                found.append(state[key])
    return found


SIGNALS = Signals(
    loss=("train/loss",),
    grad_norm=("train/grad_norm",),
    rate=("train/learning_rate",),
    reward=("train/reward",),
    deviations=("train/reward_std",),
    ties=("train/frac_reward_zero_std",),
    lengths=("train/completions/(?:mean|max)_length",),
    entropy=("train/entropy",),
    moving=("train/kl",),
    counters=("train/epoch", "train/num_tokens"),
    shares=("train/clip_ratio(?:/.+)?", "train/completions/clipped_ratio", "train/mean_token_accuracy"),
    not_negative=("train/kl", "train/num_tokens", "train/completions/.*length", r"train/rewards/.+/std", "train/step_time"),
    ordered=(
        ("train/completions/min_length", "train/completions/mean_length"),
        ("train/completions/mean_length", "train/completions/max_length"),
        ("train/completions/min_terminated_length", "train/completions/max_terminated_length"),
    ),
    bounds=(
        # A policy's loss is near 0; sums over a sequence are larger. Norms are those before clipping: spikes of 30 times are common.
        Bound("(?:train/(?:train_|eval_)?|eval/(?:.+_)?)loss", low=-1e6, high=1e6, floor=50, growth=100),
        Bound("train/grad_norm", high=1e6, floor=100, growth=300),
        Bound("train/learning_rate", high=10),
        # Per token: 20 nats are a probability of 2e-9.
        Bound("train/kl", high=1e4, floor=20, growth=100),
        # The logarithm of a vocabulary of 500 million.
        Bound("train/entropy", high=1e4, floor=20, growth=20),
        Bound("train/reward(?:s/.+/mean|s/.+/std|_std)?", low=-1e9, high=1e9, floor=1e4, growth=1e3),
        Bound("train/sampling/sampling_logp_difference/mean", high=1.0),
    ),
    control="control/",
)


TIMES = ("time", "runtime", "per_second")
"""Parts of names of metrics that measure the clock, and so differ between equal runs."""
COMPARED = ("loss", "reward", "reward_std", "grad_norm", "completions/mean_length")
"""Metrics that do not depend on how rows are spread over micro-batches and ranks."""
RELATIVE = 1e-4
ABSOLUTE = 1e-5
"""Two ranks add gradients in another order than one. Measured on six steps: at most 2e-7 relative."""


def is_clock(name: str) -> bool:
    return any(word in name.rpartition("/")[2] for word in TIMES)


def same_trajectory(metrics: Metrics, left: str, right: str, after: int | None) -> CheckResult:
    """Every metric of both runs is the same number at every step after `after`."""
    return probe_facts.same_trajectory(metrics, left, right, after, is_clock)


def within_tolerance(metrics: Metrics, left: str, right: str) -> CheckResult:
    """The compared metrics of both runs agree at every step within the tolerance."""
    largest, where, problems = 0.0, "", []
    steps: set[int] = set()
    for name in COMPARED:
        one, two = metrics.series.get(f"{left}train/{name}"), metrics.series.get(f"{right}train/{name}")
        if not one or not two or one.steps != two.steps:
            problems.append(f"{name}: not the same steps in both runs")
            continue
        for step, a, b in zip(one.steps, one.values, two.values, strict=True):
            steps.add(step)
            gap = abs(a - b) / (ABSOLUTE + RELATIVE * abs(a))
            if not math.isfinite(gap) or gap > 1:
                problems.append(f"{name} at step {step}: {a:.6g} against {b:.6g}")
            if gap > largest:
                largest, where = gap, f" ({name}, step {step})"
    return CheckResult(
        name="trajectory of two ranks against one",
        kind="proof",
        passed=bool(steps) and not problems,
        value=f"{100 * largest:.2g} % of the tolerance{where}",
        threshold=f"|difference| <= {ABSOLUTE} + {RELATIVE} x |value|",
        steps=tuple(sorted(steps)),
        message="; ".join(problems[:3]),
        boundary=Boundary.DDP,
    )


SUPERVISED = frozenset({"mean_token_accuracy", "margins", "margin"})
"""What trainers log that learn from given text or pairs (SFT, DPO, reward models): there are no groups of completions to differ."""


def is_evaluation(run: str) -> bool:
    """Whether a run's metrics come from evaluation: they say nothing about training."""
    return run.rpartition("/")[2] in ("eval", "test")


def vacuous(metrics: Metrics) -> Vacuity | None:
    for tag, series in sorted(metrics.series.items(), key=lambda item: (not item[0].endswith("learning_rate"), item[0])):
        run, _, name = tag.rpartition("/")
        where = "" if run in ("train", "") else f" in {run}"
        if not series.values or is_evaluation(run):
            continue
        if name == "frac_reward_zero_std" and min(series.values) >= 1:
            return Vacuity(f"vacuous: every group of completions earned the same reward at every step{where}, so all advantages are zero")
        if name == "reward_std" and max(series.values) == 0:
            return Vacuity(f"vacuous: the reward never varied{where}, so all advantages are zero")
        if name == "learning_rate" and "control" not in run and max(map(abs, series.values)) <= DEAD_RATE:
            reason = f"vacuous: the learning rate was 0 at every step{where}, so no weight could change"
            return Vacuity(reason, Boundary.OPTIMIZER)
    return None


def unseen(metrics: Metrics) -> str | None:
    names = {tag.rpartition("/")[2] for tag in metrics.series}
    if "grad_norm" not in names:
        return "no gradient norm was logged, so nothing shows that anything was trained"
    supervised = names & SUPERVISED and "reward" not in names and not any("completions/" in tag for tag in metrics.series)
    if not supervised and not names & {"reward_std", "frac_reward_zero_std"}:
        return "no spread of rewards was logged, so nothing shows that there was something to learn"
    return None
