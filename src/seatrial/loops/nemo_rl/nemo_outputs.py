"""What a NeMo-RL run left: metrics and configuration on its console, event files, dumps and token logs.

- The step number on the console starts anew with each epoch; the data file of a step has the true one.
- `Final config:` is read as a literal, never evaluated.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial.checks import probe_facts as generic
from seatrial.checks.probe_facts import ABSENT, lookup
from seatrial.core.errors import UserError
from seatrial.core.files import read_error
from seatrial.core.guarded import open_file, parse_float, parse_json, parse_whole
from seatrial.core.records import CheckResult
from seatrial.core.series import Damage, Metrics, TokenRow
from seatrial.loops.console_lines import ConsoleLine, Points, bracket_depth, lines_of, parse_dict, read_blocks, read_lines

TITLE = re.compile(r"Final config:\s*$")
OPENING = re.compile(r"\{['}]|[A-Z]\w*\(")
SEARCHED = 50
"""Rows below the title in which the block must begin: what was written to the other stream may come before it."""
NAMES = {"nan": math.nan, "inf": math.inf}


def read_configs(log: Path) -> list[dict[str, Any] | None]:
    """Every configuration that was printed, in order; None stands for one that is torn."""
    return [_block(rows[1:], rows[0][1]) for _, rows in read_blocks(log, TITLE)]


def _block(rows: list[ConsoleLine], process: str) -> dict[str, Any] | None:
    """The block that begins in the first rows, as one process wrote it."""
    parts, depth = list[str](), 0
    for index, text in lines_of(process, rows):
        if not (text.startswith(" ") if parts else OPENING.match(text)):  # all but the first line are indented
            if TITLE.match(text) or (not parts and index >= SEARCHED):
                return None
            continue
        parts.append(text)
        depth += bracket_depth(text)
        if depth <= 0:
            return parse_dict(parts, _value)
    return None


def _value(node: ast.expr) -> Any:
    """A literal; the call of a class is the dictionary of its fields, or the one value that it wraps."""
    match node:
        case ast.Dict(keys=keys, values=values):
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Call(func=ast.Name() | ast.Attribute(value=ast.Name()), args=[], keywords=fields):
            return {field.arg: _value(field.value) for field in fields if field.arg}
        case ast.Call(func=ast.Name() | ast.Attribute(value=ast.Name()), args=[wrapped], keywords=[]):
            return _value(wrapped)
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.Constant(value=value):
            return value
    raise ValueError(f"not a literal: {ast.dump(node)[:80]}")


EPOCH = re.compile(r"={25} Epoch ([0-9]{1,18})/\d+ ={25}$")
STEP_LINE = re.compile(r"={25} Step ([0-9]{1,18})/([0-9]{1,18}) ={25}$")
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
    step: int = 0
    before: int = 0
    """Steps of earlier epochs."""
    validated: int = 0
    block: str = ""
    process: str = ""
    points: Points = field(default_factory=Points)

    def feed(self, process: str, text: str) -> bool:
        """Take the next line; whether it was a row of results."""
        ruled = "=====" in text
        if ruled and (match := STEP_LINE.search(text)):
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
        if tag is not None:
            self.points.add(tag, self.validated if self.block == "Validation" else self.step, value)


def _timed(name: str) -> bool:
    return name == "Total step time" or TIMES.match(name) is not None


def read_console(log: Path) -> Metrics:
    reader = _Reader()
    end = last = 0
    for number, process, text in read_lines(log):
        end = number
        if reader.feed(process, text):
            last = number
    cut = last and last == end
    return reader.points.metrics(log, [Damage(str(log), f"line {end}", 1, "the log ends inside the results of a step")] if cut else [])


def completed_steps(log: Path) -> int:
    return sum(ENDED.match(text) is not None for _, _, text in read_lines(log))


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
    for _, _, text in read_lines(log):
        if match := STEP_LINE.search(text):
            yield parse_whole(match[2])


MEGATRON = "policy.megatron_cfg.enabled"
DTENSOR = "policy.dtensor_cfg.enabled"


def in_force(phase: str, claims: Mapping[str, Any], log: Path) -> CheckResult:
    """The configuration that the run printed is the one that the level claims."""
    return generic.check_claims(phase, claims, read_configs(log) if log.is_file() else [])


def other_run(log: Path) -> str | None:
    printed = read_configs(log) if log.is_file() else []
    if not printed or None in printed:
        return "the log shows no whole `Final config:`, so nothing says that Megatron trained"
    for config in printed:
        megatron, dtensor = (generic.lookup(config or {}, key) for key in (MEGATRON, DTENSOR))
        if megatron is not True or dtensor is True:
            return f"dtensor was used instead of Megatron ({MEGATRON}={megatron}, {DTENSOR}={dtensor})"
    return None


RESULTS = "results"
DUMP = "metrics.json"
ONLY = "run"
"""The phase of a level with one training phase: its metrics carry no prefix."""


def run_folders(directory: Path) -> Iterator[tuple[str, Path]]:
    """Prefix and log directory of every run of a level."""
    for place in sorted(directory.glob(f"*/{RESULTS}")):
        phase = "" if place.parent.name == ONLY else f"{place.parent.name}/"
        for logs in sorted(path for path in place.rglob("logs") if path.is_dir()):
            case = "".join(f"{part}/" for part in logs.parent.relative_to(place).parts)
            named = sorted(path for path in logs.iterdir() if path.is_dir() and not path.name.startswith("exp_"))
            yield from ((f"{phase}{case}{path.name}/", path) for path in named)
            if not named:
                yield f"{phase}{case}", logs


def metric_files(directory: Path) -> Mapping[str, tuple[Path, ...]]:
    """The event files of each run, by prefix; the dump of the script where a run has none."""
    made: dict[str, tuple[Path, ...]] = {}
    for prefix, logs in run_folders(directory):
        events = tuple(sorted(path for path in logs.rglob("*tfevents*") if path.is_file()))
        dump = logs.parent / DUMP
        if events or dump.is_file():
            made[prefix] = events or (dump,)
    return made


def dumps(directory: Path) -> dict[str, Path]:
    """The script's own dump of each run, by prefix, where there is one."""
    return {prefix: logs.parent / DUMP for prefix, logs in run_folders(directory) if (logs.parent / DUMP).is_file()}


def token_files(directory: Path) -> Iterator[tuple[str, Path]]:
    for prefix, logs in run_folders(directory):
        for path in sorted(logs.rglob("train_data_step*.jsonl")):
            yield prefix, path


TOKEN_FILE = re.compile(r"train_data_step([0-9]+)\.jsonl")
SETTINGS = ("temperature", "top_p", "top_k", "max_new_tokens")
LISTS = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")


def tokens(directory: Path) -> Iterator[TokenRow]:
    configs: dict[str, Mapping[str, Any]] = {}
    found = sorted(token_files(directory), key=lambda item: (item[0], _step(item[1])))
    for prefix, path in found:
        run = prefix.rstrip("/") or ONLY
        phase = run.split("/")[0] if (directory / run.split("/")[0]).is_dir() else ONLY
        if phase not in configs:
            configs[phase] = _config(directory / phase / "run.log")
        yield from _rows(path, run, configs[phase])


def _step(path: Path) -> int:
    match = TOKEN_FILE.fullmatch(path.name)
    return int(match[1]) if match else 0


def _config(log: Path) -> Mapping[str, Any]:
    printed = read_configs(log) if log.is_file() else []
    return (printed[-1] if printed else None) or {}


def _rows(path: Path, run: str, config: Mapping[str, Any]) -> Iterator[TokenRow]:
    known = {name: lookup(config, f"policy.generation.{name}") for name in SETTINGS}
    settings = tuple((name, str(value)) for name, value in known.items() if value != ABSENT)
    for number, line in enumerate(_lines(path), 1):
        if not line:
            continue
        try:
            entry = parse_json(line)
            yield _row(entry, f"{path.name}:{number}", run, _step(path), number - 1, settings, known["max_new_tokens"])
        except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(
                f"{path}:{number}: not a sequence of a training step: {what}", "the log is torn: run the level again"
            ) from error


def _lines(path: Path) -> Iterator[str]:
    """One after another: a step of a real run may hold a hundred megabytes."""
    try:
        with open_file(path) as stream:
            for line in stream:
                yield line.decode("utf-8", "replace").rstrip("\n")
    except OSError as error:
        raise read_error(path, error) from error


def _row(
    entry: Mapping[str, Any], source: str, run: str, step: int, row: int, settings: tuple[tuple[str, str], ...], limit: Any
) -> TokenRow:
    length = int(_one(entry["input_lengths"]))
    lists = {name: _list(entry[name]) for name in LISTS}
    sizes = {name: len(values) for name, values in lists.items()}
    if len(set(sizes.values())) > 1 or not 0 < length <= sizes["token_ids"]:
        raise ValueError(f"input_lengths is {length}, and the lists have {sizes}")
    mask = tuple(bool(value) for value in lists["token_loss_mask"][:length])
    reward = entry.get("rewards")
    return TokenRow(
        source=source,
        run=run,
        step=step,
        row=row,
        prompt=_identity(lists["token_ids"][: mask.index(True) if any(mask) else length]),
        generation=tuple(map(float, lists["generation_logprobs"][:length])),
        training=tuple(map(float, lists["prev_logprobs"][:length])),
        mask=mask,
        masked_out=not _one(entry["sample_loss_mask"]),
        length=length,
        reward=float(_one(reward)) if reward is not None else None,
        truncated=sum(mask) >= limit if type(limit) is int else None,
        settings=settings,
    )


def _identity(ids: list[Any]) -> str:
    """Short, and the same for the same token ids."""
    digest = hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:12]
    return f"{digest} ({len(ids)} tokens)"


def _one(value: Any) -> Any:
    """The value of a batch of one."""
    return value[0] if isinstance(value, list) else value


def _list(value: Any) -> list[Any]:
    """The list of a batch of one."""
    found = value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value
    if not isinstance(found, list):
        raise TypeError(f"{type(found).__name__} instead of a list")
    return found
