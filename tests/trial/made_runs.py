"""Healthy runs as rows and logs that a test can falsify: of three loops and of a functional script.

- `trl`: the real run `grpo_full`: its header, its rows, its closing lines; rows are printed as Trainer prints them.
- `ppo` and `sft`: real runs of verl; the records in their logs are printed anew from the rows. `grpo`: the rows of a real run of verl on an
  H200 without those of its critic, in a log made of verl's own lines.
- `nemo`: **made**: the lines are those that NeMo-RL prints (`loops/nemo_logs.py`), the numbers are invented.
"""

from __future__ import annotations

import copy
import gzip
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seatrial.loops import get_loop
from seatrial.trial.files_judge import FileVerdict, judge_files
from tests.loops.nemo_logs import grpo_log
from tests.loops.verl_logs import MILESTONES, RUNNER
from tests.metrics import writer

DATA = Path(__file__).parents[1] / "data"
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run: rows by step, and its log in lines. A `None` in `log` is the place of the printed rows."""

    loop: str
    rows: list[Row]
    """As they are written to files."""
    printed: list[Row]
    """As they are printed."""
    head: tuple[str, ...]
    tail: tuple[str, ...]
    extra: dict[str, str] = field(default_factory=dict)
    """More files beside the metrics."""
    state: Row = field(default_factory=dict)
    """What a trainer's state says beside its rows."""
    files: bool = True
    form: str = ""
    """`events` or `table` (metrics.json) instead of what the loop writes."""
    level: int | None = None
    steps: int | None = None

    def log(self) -> str:
        shown = [line for row in self.printed for line in PRINTERS[self.loop](row)]
        return "\n".join([*self.head, *shown, *self.tail]) + "\n"

    def judge(self, place: Path) -> FileVerdict:
        (place / "run.log").write_text(self.log(), encoding="utf-8")
        metrics = write_rows(self, place) if self.files else ()
        loop = get_loop(self.loop)
        return judge_files(loop, place / "run.log", metrics, loop.levels()[self.level] if self.level is not None else None, self.steps)


def write_rows(run: Run, place: Path) -> tuple[Path, ...]:
    """The metrics as the loop writes them, or in another form."""
    if run.form:
        file = _events(run, place) if run.form == "events" else _table(run, place)
    elif run.loop == "trl":
        history = [{key.removeprefix("train/"): value for key, value in row.items()} for row in run.rows]
        file = place / "trainer_state.json"
        file.write_text(json.dumps({**run.state, "log_history": history}))
    elif run.loop == "verl":
        file = place / "metrics.jsonl"
        rows = [{"step": row["step"], "data": {key: value for key, value in row.items() if key != "step"}} for row in run.rows]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file = place / "metrics.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in run.rows))
    for name, text in run.extra.items():
        (place / name).write_text(text)
    return (file,)


def _tagged(run: Run) -> Iterator[tuple[int, str, Any]]:
    for row in run.rows:
        for key, value in row.items():
            if key != "step":
                yield row["step"], f"train/{key}" if run.loop == "trl" else key, value


def _events(run: Run, place: Path) -> Path:
    file = place / "events.out.tfevents.1794706888.host0.1"
    values = (writer.event(step, writer.simple(tag, value)) for step, tag, value in _tagged(run))
    file.write_bytes(writer.version() + b"".join(values))
    return file


def _table(run: Run, place: Path) -> Path:
    table: dict[str, Row] = {}
    for step, tag, value in _tagged(run):
        table.setdefault(tag, {})[str(step)] = value
    file = place / "metrics.json"
    file.write_text(json.dumps(table))
    return file


def _print_trl(row: Row) -> Iterator[str]:
    if "train_runtime" not in row and "eval_loss" not in row:
        yield f"STEP {row['step']} 1.5"
    yield repr({key: value if isinstance(value, str) or value is None else f"{value:.4g}" for key, value in row.items() if key != "step"})


def _print_verl(row: Row) -> Iterator[str]:
    items = [f"{key}:{value}" for key, value in row.items() if key != "step"]
    yield f"{RUNNER}step:{row['step']} - {' - '.join(items)}"


def _print_nothing(row: Row) -> Iterator[str]:
    yield from row.get("lines", ())


PRINTERS: dict[str, Callable[[Row], Iterator[str]]] = {"trl": _print_trl, "verl": _print_verl, "nemo-rl": _print_nothing}


def trl() -> Run:
    state = json.loads((DATA / "trl/grpo_full/trainer_state.json").read_text())
    lines = (DATA / "trl/grpo_full/console.log").read_bytes().decode().split("\n")
    history = state.pop("log_history")
    rows = [_first(row, "loss", "grad_norm") if "loss" in row else _first(row, "train_runtime") for row in history]
    return Run("trl", rows, copy.deepcopy(rows), tuple(lines[:3]), tuple(line for line in lines[46:] if line), state=state)


def _first(row: Row, *keys: str) -> Row:
    """Trainer prints these first."""
    return {**{key: row[key] for key in keys}, **{key: value for key, value in row.items() if key not in keys}}


def _verl_rows(name: str) -> list[Row]:
    text = gzip.decompress((DATA / f"verl/{name}.jsonl.gz").read_bytes()).decode()
    return [{"step": row["step"], **row["data"]} for row in map(json.loads, text.splitlines())]


def ppo() -> Run:
    lines = gzip.decompress((DATA / "triage/ppo_gae_3step.log.gz").read_bytes()).decode().split("\n")
    rows = _verl_rows("ppo_gae_3step")
    places = [number for number, line in enumerate(lines) if re.search(r"\bstep:\d+ - ", line)]
    other = [line for number, line in enumerate(lines) if number < places[-1] and number not in places]
    # What the runner says; without the dump of the configuration and the workers' lines, which take most of the time of a verdict.
    head = [line for number, line in enumerate(other) if number < 30 or (number >= 950 and "(TaskRunner" in line)]
    return Run("verl", rows, copy.deepcopy(rows), tuple(head), tuple(line for line in lines[places[-1] + 1 :] if line))


def sft() -> Run:
    lines = (DATA / "triage/sft_4step.log").read_bytes().decode().split("\n")
    rows = _verl_rows("sft_fsdp2_4step")
    places = [number for number, line in enumerate(lines) if re.search(r"\bstep:\d+ - ", line)]
    head = [line for number, line in enumerate(lines) if number < places[0]]
    return Run("verl", rows, copy.deepcopy(rows), tuple(head), tuple(line for line in lines[places[-1] + 1 :] if line))


def grpo() -> Run:
    critic = re.compile(r"critic/(?:vf_|vpred|grad_norm|lr$|loss$|values|perf)")
    rows = [{key: value for key, value in row.items() if not critic.match(key)} for row in _verl_rows("h200/fresh_adapters")]
    head = [text.replace("0/2 ", "0/20 ") for name, text in MILESTONES.items() if name != "first step"]
    done = f"{RUNNER}Training Progress: 100%|██████████| 20/20 [08:42<00:00, 26.16s/it]"
    return Run("verl", rows, copy.deepcopy(rows), tuple(head), (f"{RUNNER}'Final validation metrics: None'", done, "rc=0"))


NEMO_STEPS = 6


def nemo() -> Run:
    rows = []
    for step in range(1, NEMO_STEPS + 1):
        wave = ((step * 7) % 5 - 2) / 10
        rows.append(
            {
                "step": step,
                "train/loss": round(0.01 * wave + 0.001 * step, 6),
                "train/reward": 0.2 + 0.05 * step + wave / 20,
                "train/grad_norm": 0.8 + wave,
                "train/lr": 5e-06,
                "train/advantages/max": 1.5 + wave,
                "train/advantages/min": -1.5 + wave / 3,
                "train/token_mult_prob_error": 1.01 + wave / 100,
                "train/gen_kl_error": 0.0005 + wave / 1e4,
                "train/approx_entropy": 0.9 - 0.01 * step,
                "train/probs_ratio_clamped_min": 0.95,
                "train/probs_ratio_clamped_max": 1.05,
                "train/num_masked_seqs_by_logprob_error": 0.0,
                "train/global_valid_toks": 800.0 + 10 * step,
                "train/mean_gen_tokens_per_sample": 200.0 + step,
                "timing/train/total_step_time": 12.34,
            }
        )
    return replace(with_nemo_log(Run("nemo-rl", rows, [], (), ())), steps=NEMO_STEPS)


def with_nemo_log(run: Run) -> Run:
    """With a log that prints the run's own rows."""
    named = {"loss": "train/loss", "kl": "train/gen_kl_error", "reward": "train/reward", "length": "train/mean_gen_tokens_per_sample"}
    values = {name: [float(row.get(tag, 0)) for row in run.rows] for name, tag in named.items()}
    text = grpo_log(NEMO_STEPS, NEMO_STEPS, values=values, overrides=(f"grpo.max_num_steps={NEMO_STEPS}",))
    return replace(run, head=tuple(text.rstrip("\n").split("\n")), printed=[])


HEALTHY: dict[str, Callable[[], Run]] = {"trl": trl, "ppo": ppo, "sft": sft, "grpo": grpo, "nemo": nemo}
