"""A fuzzer over every parser of outside data, in process. A longer run: `python -m tests.fuzz --inputs 20000 --seed 7`.

- Inputs are made from a grammar (rows, logs, tables with odd numbers, depths and text) or by mutating real files of tests/data.
- Allowed ends: a verdict or an error with its fix (exit codes 0, 1, 2, 77, 99). Anything else is a finding: another exception, exit
  code 3, or more than 10 s.
- Input `i` of seed `s` is always the same. A finding is printed with both, and its files are kept for `--only`.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from seatrial.core.errors import BlockedError, UserError
from seatrial.core.guarded import BadValue
from seatrial.core.loop import Loop
from seatrial.core.series import Metrics, Series
from seatrial.core.verdict import Boundary
from seatrial.loops import get_loop
from seatrial.runtime.environments import Environments
from tests.cli.command import Answer, inside
from tests.fuzz_mutate import changed, rows_changed, written
from tests.fuzz_parsers import PARSERS
from tests.fuzz_worlds import WORLDS, World, damage, fake_loop

DATA = Path(__file__).parent / "data"
LIMIT_S = 10
ALLOWED = (0, 1, 2, 77, 99)
LOOPS = ("trl", "verl", "nemo-rl")

NUMBERS = (
    *("0", "-0", "1", "-1", "0.5", "1e999", "-1e999", "1e-999", "NaN", "nan", "inf", "-inf", "Infinity", "null", "None", "true", "True"),
    *("9" * 19, "9" * 310, "9" * 5000, "-" + "9" * 25, "1" + "0" * 308, "1_000", "0x10", "1e400", "1.2.3", "e", "-", "+1", ".", "١٢"),
    *("np.float32(nan)", "np.float64(1e999)", "2147483648", "9223372036854775808", "18446744073709551616", "-9223372036854775809"),
)
TEXTS = (
    *("", "a", "\\ud800", "\\ud83d\\ude00", "\\u0000", "\\", '"', "'", "{", "}", "[", "]", ":", "step", "é", "\u2028", "\x1b[31m", "\r"),
    *("%s", "{}", "$(x)", "../..", "\\x", "😀", "a" * 5000, "nan", "__proto__", "\t", "\x00", "\x7f", "1970-01-01", "9999-99-99"),
)
_TEXT_JUNK = (
    *(
        "[" * 3000,
        "]" * 300,
        '{"a":' * 3000,
        "-" * 3000,
        "(" * 300,
        "{'a': " * 300,
        "\ufeff",
        "\r",
        "\r\n",
        "\n",
        "\n\n\n",
        "\x1b[",
        "\x1b]0;",
    ),
    *(
        '{"step": 1, "loss": 0.5}',
        "{'loss': " + "-" * 3000 + "1}",
        "{[1]: 2}",
        "{'loss': [1], 'reward': {}}",
        '"a":1,"a":2',
        ",,",
        "=",
        " = [",
    ),
    *("step:1 - actor/loss:nan", "step:99999999999999999999 - a:1", "Traceback (most recent call last):", "ValueError: x", "a.b.c."),
    *("stage FAIL socketError: bar", "FAILED x", "FAIL: ", "E   assert 1", "PASS x", "rc=99999999999999999999", "exit code 139"),
    *("(pid=1, ip=x) ", "[rank0]: ", " - ", ": "),
)
JUNK = (
    *(text.encode("utf-8", "surrogatepass") for text in (*NUMBERS, *TEXTS, *_TEXT_JUNK)),
    *(b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00" * 8, b"\xfe\xff", b"\x08\x96\x01"),
)
CONFIG = b"""[run]
loop = "trl"
levels = "0,1"
minutes = 5.5
[profiles.a]
partition = "gpu"
nodes = 2
[profiles.a.containers]
x = "y"
[history]
store = "h.db"
"""
JOBS = b"""[[jobs]]
name = "c"
array = 3
parallel = 2
[[jobs.components]]
name = "client"
role = "client"
command = ["a", "{index}"]
gpus = 4
ready = { path = "/h", deadline_s = 18 }
"""
SCRIPT = b"""set -e
uv run a.py grpo.max_num_steps=3 logger.log_dir=$LOG_DIR
uv run tests/json_dump_tb_logs.py $LOG_DIR --output_path $JSON_METRICS
uv run tests/check_metrics.py $JSON_METRICS 'max(data["train/loss"]) < 1.05'
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that did not end as it may."""

    index: int
    target: str
    what: str
    files: Path | None = None


class HangError(BaseException):
    """An input took too long; no handler of an Exception may swallow it."""


def number(rng: random.Random) -> str:
    """A number, mostly a usual one."""
    return f"{rng.uniform(-2, 2):.4f}" if rng.random() < 0.7 else rng.choice(NUMBERS)


def text(rng: random.Random) -> str:
    """A name or a text."""
    return (
        rng.choice(("train/loss", "train/reward", "loss", "grad_norm", "step", "data", "name", "fact", "kind"))
        if rng.random() < 0.6
        else rng.choice(TEXTS)
    )


def some_json(rng: random.Random, depth: int = 3) -> str:
    """JSON, or nearly."""
    kind = rng.random()
    if depth == 0 or kind < 0.5:
        return number(rng) if kind < 0.35 else f'"{text(rng)}"'
    inner = [some_json(rng, depth - 1) for _ in range(rng.randrange(5))]
    if kind < 0.65:
        return f"[{', '.join(inner)}]"
    return "{" + ", ".join(f'"{text(rng)}": {one}' for one in inner) + "}"


def rows(rng: random.Random) -> str:
    """Metrics as JSONL."""
    made = []
    for step in range(rng.randrange(1, 12)):
        at = step if rng.random() < 0.9 else number(rng)
        made.append(f'{{"step": {at}, "train/loss": {number(rng)}, "train/reward": {number(rng)}, "train/grad_norm": {number(rng)}}}')
        if rng.random() < 0.1:
            made.append(some_json(rng))
    return "\n".join(made) + ("\n" if rng.random() < 0.9 else "")


def table(rng: random.Random) -> str:
    """Metrics as metrics.json, or a trainer's state."""
    if rng.random() < 0.5:
        history = ", ".join(f'{{"step": {number(rng)}, "loss": {number(rng)}, "{text(rng)}": {some_json(rng, 1)}}}' for _ in range(5))
        return f'{{"global_step": {number(rng)}, "max_steps": {number(rng)}, "log_history": [{history}]}}'
    return "{" + ", ".join(f'"{text(rng)}": {{"1": {number(rng)}, "{number(rng)}": {some_json(rng, 1)}}}' for _ in range(4)) + "}"


def log(rng: random.Random) -> str:
    """A log with lines of all loops."""

    def n() -> str:
        return number(rng)

    shapes: tuple[Callable[[], str], ...] = (
        lambda: f"{{'loss': {n()}, 'grad_norm': {n()}, 'learning_rate': {n()}, 'reward': {n()}, 'epoch': {n()}}}",
        lambda: f"{{'train_runtime': {n()}, 'train_steps_per_second': {n()}, 'train_loss': {n()}, 'epoch': {n()}}}",
        lambda: f"{{'loss': '{n()}', '{text(rng)}': {some_json(rng, 2)}}}",
        lambda: f"step:{n()} - actor/pg_loss:{n()} - actor/grad_norm:{n()} - critic/score/mean:{n()} - training/global_step:{n()}",
        lambda: f"========================= Step {n()}/{n()} =========================",
        lambda: f"📊 Training Results:\n  • Loss: {n()}\n  • Avg Reward: {n()}\n  • Total step time: {n()}s",
        lambda: f" {n()}%|███| {n()}/{n()} [00:01<00:01]\r" * rng.randrange(1, 5),
        lambda: f"Total training steps: {n()}",
        lambda: (
            f"{{'actor_rollout_ref': {{'a': {n()}, {text(rng)!r}: {some_json(rng, 2)}}}, 'trainer': {{'total_training_steps': {n()}}}}}"
        ),
        lambda: f"Final config:\n{{'grpo': {{'max_num_steps': {n()}}},\n 'policy': {some_json(rng, 2)}}}",
        lambda: f"{rng.choice(('PASS', 'FAIL', 'stage FAIL', 'x FAIL'))} {text(rng)} {rng.choice(('', 'Error: x', 'ValueError: bar'))}",
        lambda: f'{{"tag": "{rng.choice(("initial", "stale", "after"))}", "token_mult_prob_error": {n()}}}',
        lambda: f"token_mult_prob_error x = {n()}",
        lambda: (
            f'Traceback (most recent call last):\n  File "a.py", line {n()}, in f\n    x\n{rng.choice(("Error", "a.B", "x"))}: {text(rng)}'
        ),
        lambda: f"(Worker{rng.choice(('', '[rank=0]'))} pid={n()}, ip=1.2.3.4) {text(rng)}",
        lambda: f"rc={n()}",
        lambda: f"srun: error: x exit code {n()}",
        lambda: f"STEP {n()} of {n()}",
        lambda: rng.choice(JUNK).decode("utf-8", "replace"),
    )
    return "\n".join(rng.choice(shapes)() for _ in range(rng.randrange(1, 30))) + ("\n" if rng.random() < 0.8 else "")


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Real bytes with a few changes."""
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at, end = sorted(rng.randrange(len(data) + 1) for _ in "ab")
        end = min(end, at + rng.choice((1, 4, 40, 400, 4000)))
        match rng.randrange(9):
            case 0:
                data = data[:at] + data[end:]
            case 1:
                data = data[:at] + data[at:end] * rng.choice((2, 3, 30)) + data[end:]
            case 2 | 3 | 4:
                data = data[:at] + rng.choice(JUNK) + data[at:]
            case 5:
                data = data[:at]
            case 6:
                data = data[:at] + bytes(rng.randrange(256) for _ in range(min(8, end - at))) + data[end:]
            case 7:
                data = _number_changed(rng, data, at)
            case 8:
                data = data.replace(
                    rng.choice((b'"', b"'", b"\n", b":", b",", b"]", b"}", b"=")), rng.choice((b"", b"[", b"\r", b"\x00", b'"')), 3
                )
    return data


def _number_changed(rng: random.Random, data: bytes, at: int) -> bytes:
    """The next number becomes another one."""
    first = next((i for i in range(at, min(len(data), at + 2000)) if data[i : i + 1].isdigit()), None)
    if first is None:
        return data
    last = first
    while last < len(data) and data[last : last + 1] in b"0123456789.e+-" and last - first < 40:
        last += 1
    return data[:first] + rng.choice(NUMBERS).encode() + data[last:]


class Corpus:
    """Real files, read once, and what is made once for all inputs."""

    def __init__(self) -> None:
        self.logs = [
            self._read(path) for folder in ("trl", "triage", "nemo_rl", "verl") for path in self._below(folder, (".log", ".log.gz"))
        ]
        self.events = [path.read_bytes() for path in sorted(DATA.rglob("*tfevents*"))]
        self.states = [path.read_bytes() for path in sorted(DATA.rglob("trainer_state.json"))]
        self.rollouts = (DATA / "rollouts" / "gym_rollouts.jsonl").read_bytes()
        self.campaigns = [path.read_bytes() for path in sorted((DATA / "rollouts").glob("*.toml"))]
        self.facts = b"\n".join(json.dumps(row).encode() for path in sorted((DATA / "refit").glob("*.json")) for row in _facts(path))
        self.reports = [path.read_bytes() for path in sorted((DATA / "report").rglob("junit.xml"))]
        self.store = self._store()
        self.parquet = _parquet()
        self.worlds: dict[str, World] = {}
        self._refused: dict[tuple[str, tuple[str, ...]], bool] = {}

    def world(self, name: str) -> World:
        """A directory that commands read; made when it is first wanted."""
        if name not in self.worlds:
            with tempfile.TemporaryDirectory(prefix="seatrial-fuzz-world-") as folder:
                (place := Path(folder) / "run").mkdir()
                self.worlds[name] = WORLDS[name](place)
        return self.worlds[name]

    def refused(self, name: str, command: tuple[str, ...], fuzzer: Fuzzer) -> bool:
        """Whether a command is a usage error in the undamaged world, too."""
        if (name, command) not in self._refused:
            with tempfile.TemporaryDirectory(prefix="seatrial-fuzz-world-") as folder:
                world = self.world(name)
                world.write(place := world.home or Path(folder) / "run")
                answer = fuzzer._asked(place, tuple(word.replace("{}", str(place)) for word in command))
            self._refused[name, command] = answer is not None and answer.code == 2
        return self._refused[name, command]

    def _below(self, folder: str, endings: tuple[str, ...]) -> list[Path]:
        return sorted(path for path in (DATA / folder).rglob("*") if path.name.endswith(endings))

    def _read(self, path: Path) -> bytes:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data[-20_000:]

    def _store(self) -> bytes:
        """A history with two runs."""
        with tempfile.TemporaryDirectory() as folder:
            for time_of, value in (("2025-03-24 23:34:12", 1.5), ("2025-03-25 23:34:12", 2.5)):
                (Path(folder) / "unit_results.json").write_text(session(time_of, str(value)), encoding="utf-8")
                answer = inside("history", "import", Path(folder) / "unit_results.json", "--store", Path(folder) / "h.db")
                assert answer.code == 0, answer.err
            with sqlite3.connect(Path(folder) / "h.db") as base:
                base.execute("PRAGMA journal_mode=DELETE")
            base.close()
            return (Path(folder) / "h.db").read_bytes()


def _facts(path: Path) -> list[Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, list) else list(found.get("facts", [])) if isinstance(found, dict) else []


def _parquet() -> bytes:
    """Rows as Parquet; nothing where pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return b""
    buffer = io.BytesIO()
    rows = {"prompt": ["a", "b"] * 20, "answer": ["1", "2"] * 20, "x": [{"a": 1}] * 40}
    pyarrow.parquet.write_table(pyarrow.table(rows), buffer)
    return buffer.getvalue()


def session(time_of: str, value: str) -> str:
    """A unit_results.json."""
    return (
        f'{{"exit_status": 0, "start_time": "{time_of}", "git_commit": "0123456789abcdef", "git_branch": "main", "git_dirty": false, '
        f'"gpu_types": ["H"], "coverage": 1, "metrics": {{"tests/a.py::test_a": {{"seconds": {value}}}}}, "outcomes": {{}}, "tests": {{}}}}'
    )


class Fuzzer:
    """Makes the inputs of one seed and gives them to the parsers."""

    def __init__(self, corpus: Corpus, place: Path) -> None:
        self.corpus = corpus
        self.place = place
        self.targets: tuple[Callable[[random.Random], Answer | None], ...] = (
            *(self.judge, self.judge, self.judge, self.judge, self.check, self.check, self.show, self.dump, self.events, self.history),
            *(self.store, self.config, self.jobs, self.campaign, self.replay, self.junit, self.probe, self.rollouts, self.state),
            *(self.trial, self.tokens, self.functional, self.proofs, self.rows, self.answer, self.traces, self.level),
            *((self.world,) * 12),
            *((self.parser,) * 6),
        )
        self.said: list[str] = []

    def _file(self, name: str, data: str | bytes) -> Path:
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
        return path

    def _either(self, rng: random.Random, made: str, real: list[bytes]) -> bytes:
        """Made by the grammar, a mutation of that, or of something real."""
        kind = rng.random()
        if kind < 0.35 or not real:
            return made.encode("utf-8", "surrogatepass")
        return mutated(rng, made.encode("utf-8", "surrogatepass") if kind < 0.5 else rng.choice(real))

    def _metrics(self, rng: random.Random) -> Path:
        name = rng.choice(("metrics.jsonl", "metrics.json", "trainer_state.json", "other.jsonl", "other.json"))
        made = rows(rng) if name.endswith("l") else table(rng) if rng.random() < 0.7 else some_json(rng)
        return self._file(
            name, self._either(rng, made, [rows(rng).encode("utf-8", "surrogatepass")] if name.endswith("l") else self.corpus.states)
        )

    def judge(self, rng: random.Random) -> Answer:
        """`judge` of every loop, with and without metrics."""
        words: list[str | Path] = [
            "judge",
            rng.choice(LOOPS),
            "--log",
            self._file("run.log", self._either(rng, log(rng), self.corpus.logs)),
        ]
        if rng.random() < 0.4:
            words += ["--metrics", self._metrics(rng)]
        if rng.random() < 0.3:
            words += ["--level", "0"]
        return inside(*words, *(["--json"] if rng.random() < 0.5 else []))

    def check(self, rng: random.Random) -> Answer:
        """`check` with an expression that may be none."""
        known = ('max(data["train/loss"]) < 1.05', 'data["train/reward"]["1"] > 0', 'mean(data["loss"], -2) < 1', 'len(data["a"]) == 1')
        expr = (
            rng.choice(known)
            if rng.random() < 0.7
            else mutated(rng, rng.choice(known).encode()).decode("utf-8", "replace").replace("\0", "")
        )
        return inside("check", self._metrics(rng), "--", expr)

    def show(self, rng: random.Random) -> Answer:
        """`metrics show`."""
        return inside("metrics", "show", self._metrics(rng))

    def dump(self, rng: random.Random) -> Answer:
        """`metrics dump`."""
        return inside("metrics", "dump", self._metrics(rng), "--output", self.place / "out.json")

    def events(self, rng: random.Random) -> Answer:
        """Event files."""
        path = self._file("events.out.tfevents.1.host", mutated(rng, rng.choice(self.corpus.events)))
        return inside("metrics", "show", path)

    def history(self, rng: random.Random) -> Answer:
        """`history import`."""
        bench = f'{{"benchmark": "b", "metrics": {some_json(rng, 1)}, "time": {number(rng)}, "branch": {some_json(rng, 1)}}}'
        stats = f'"benchmarks": [{{"name": "a", "stats": {{"mean": {number(rng)}, "rounds": {number(rng)}}}}}, {some_json(rng, 1)}]'
        pytest = f'{{"datetime": "2025-01-01T00:00:00", "commit_info": {some_json(rng, 1)}, "machine_info": {some_json(rng, 1)}, {stats}}}'
        whole = session(rng.choice(("2025-03-24 23:34:12", "9999-12-31 23:59:59", "0001-01-01 00:00:00", number(rng))), some_json(rng, 1))
        name, made = rng.choice((("bench.jsonl", bench), ("pytest.json", pytest), ("unit_results.json", whole), ("x.json", some_json(rng))))
        path = self._file(name, self._either(rng, made, [made.encode("utf-8", "surrogatepass")]))
        return inside("history", "import", path, "--store", self.place / "h.db")

    def store(self, rng: random.Random) -> Answer:
        """Commands over a damaged store."""
        data = self.corpus.store
        for _ in range(rng.choice((1, 3, 30))):
            at = rng.randrange(len(data))
            data = data[:at] + bytes([rng.randrange(256)]) * rng.choice((1, 4, 64)) + data[at + rng.choice((1, 4, 64)) :]
        data = rng.choice((data, data, data, data[: rng.randrange(len(data))], rng.choice(JUNK), b""))
        path = self._file("h.db", data)
        shutil.rmtree(self.place / "h.db-wal", ignore_errors=True)
        if rng.random() < 0.3:
            self._odd_cells(rng, path)
        words: tuple[str | Path, ...] = rng.choice(
            (
                *(("runs",), ("show", "*"), ("show", "*", "--points"), ("trend", "*"), ("compare", "0123456", "0123457"), ("gate",)),
                *(("export",), ("export", "--format", "csv"), ("export", "--format", "csv", "--points"), ("mark", "1", "--reason", "x")),
                *(("calibrate", "*"), ("import", self._file("unit_results.json", session("2025-03-26 23:34:12", "3.5")))),
            )
        )
        return inside("history", *words, "--store", path)

    def _odd_cells(self, rng: random.Random, path: Path) -> None:
        """A store that sqlite reads, with cells of another type."""
        path.write_bytes(self.corpus.store)
        column = rng.choice(
            ("kind", "time", "name", "commit_id", "branch", "trusted", "passed", "machine", "source", "poisoned", "project")
        )
        value = rng.choice(("'x'", "x'ff'", "1e999", "-1", "9223372036854775807", "cast(x'eda080' as text)", "''", "'a' || char(0)"))
        with sqlite3.connect(path) as base:
            base.execute(
                f"update runs set {column} = {value}" if rng.random() < 0.7 else f"update series set last = {value}, mark = {value}"
            )
        base.close()

    def config(self, rng: random.Random) -> Answer:
        """seatrial.toml."""
        made = f"[run]\nloop = {some_json(rng, 1)}\nlevels = {some_json(rng, 1)}\n[{text(rng)}]\n{text(rng)} = {some_json(rng, 2)}\n"
        path = self._file("seatrial.toml", self._either(rng, made, [CONFIG]))
        return inside("config", "show", "--config", path)

    def jobs(self, rng: random.Random) -> None:
        """jobs.toml."""
        from seatrial.cli.input_files import read_jobs

        read_jobs(
            self._file("jobs.toml", self._either(rng, f"[[jobs]]\nname = {some_json(rng, 1)}\ncomponents = [{some_json(rng)}]\n", [JOBS])),
            8,
            self.place,
        )

    def campaign(self, rng: random.Random) -> None:
        """campaign.toml."""
        from seatrial.cli.input_files import read_campaign

        made = (
            f'name = {some_json(rng, 1)}\n[[datasets]]\npath = "a.jsonl"\n[sampling]\nn = {number(rng)}\n[work]\nrepeats = {number(rng)}\n'
        )
        read_campaign(self._file("campaign.toml", self._either(rng, made, self.corpus.campaigns)), {}, [])

    def replay(self, rng: random.Random) -> None:
        """A bisect's log, git's and ours."""
        from seatrial.bisect import bisect_dir

        row = f'{{"number": {number(rng)}, "commit": "0123", "mark": "bad", "value": {number(rng)}, "{text(rng)}": {some_json(rng, 2)}}}\n'
        bisect_dir.read_runs(self._file("runs.jsonl", self._either(rng, row * 2, [row.encode("utf-8", "surrogatepass")])))

    def junit(self, rng: random.Random) -> None:
        """junit.xml of a pre-test."""
        from seatrial.evidence.redact import Redactor
        from seatrial.trial.pre_tests import cleaned_cases

        cleaned_cases(self._file("junit.xml", mutated(rng, rng.choice(self.corpus.reports))), Redactor({}))

    def probe(self, rng: random.Random) -> Answer:
        """`probe refit --facts`."""
        made = "\n".join(
            f'{{"fact": "{rng.choice(("refit", "sent", "weights", "seen", "step"))}", "{text(rng)}": {some_json(rng)}}}' for _ in range(4)
        )
        shutil.rmtree(self.place / "probe", ignore_errors=True)
        path = self._file("facts.jsonl", self._either(rng, made, [self.corpus.facts]))
        return inside("probe", "refit", "--facts", path, "--out", self.place / "probe")

    def rollouts(self, rng: random.Random) -> Answer:
        """`rollouts import`."""
        shutil.rmtree(self.place / "campaign", ignore_errors=True)
        made = f'{{"_ng_task_index": {number(rng)}, "_ng_rollout_index": {number(rng)}, "reward": {number(rng)}, "x": {some_json(rng)}}}\n'
        path = self._file("rollouts.jsonl", self._either(rng, made * 2, [self.corpus.rollouts]))
        options = ["--partial"] if rng.random() < 0.5 else []
        return inside("rollouts", "import", rng.choice(("gym", "skills")), path, "--out", self.place / "campaign", *options)

    def state(self, rng: random.Random) -> None:
        """The state of test selection."""
        from pytest_seatrial.select import selection_state

        selection_state.load_state(self._file("state.db", rng.choice((mutated(rng, self.corpus.store), rng.choice(JUNK)))), {"python": "3"})

    def trial(self, rng: random.Random) -> Answer:
        """trial.json and result.json, of `report` and `resume`."""
        from seatrial.core.files import write_json
        from tests.report.trials import TRIALS, write_run

        made = TRIALS[rng.choice(sorted(TRIALS))]()
        run = self.place / "run"
        shutil.rmtree(run, ignore_errors=True)
        write_run(run, made)
        write_json(run / "trial.json", made)
        files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".log"))
        for file in (run / "trial.json", rng.choice(files)) if rng.random() < 0.7 else (rng.choice(files),):
            data = file.read_bytes()
            file.write_bytes(data.replace(b'"toy"', b'"trl"') if rng.random() < 0.3 else mutated(rng, data.replace(b'"toy"', b'"trl"')))
        return inside("report", run)

    def tokens(self, rng: random.Random) -> None:
        """train_data_step1.jsonl, as `localize` reads it."""
        from seatrial.loops.nemo_rl.nemo_outputs import tokens

        lists = ", ".join(
            f'"{name}": [[{number(rng)}, {number(rng)}]]'
            for name in ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
        )
        row = f'{{"input_lengths": [{number(rng)}], {lists}, "sample_loss_mask": [{number(rng)}], "rewards": [{number(rng)}]}}\n'
        self._file("run/results/logs/exp_001/train_data_step1.jsonl", self._either(rng, row, [row.encode()]))
        self._file("run/run.log", log(rng))
        list(tokens(self.place))

    def functional(self, rng: random.Random) -> None:
        """The text of a functional script."""
        from seatrial.functional.plan_scripts import read_asserted

        read_asserted(
            self._file(
                "script.sh",
                self._either(rng, f"uv run check_metrics.py {text(rng)} 'min(data[{text(rng)!r}]) > {number(rng)}'\n", [SCRIPT]),
            ),
            self.place,
        )

    def proofs(self, rng: random.Random) -> None:
        """Import proofs and facts that probes leave."""
        from seatrial.checks.probe_facts import read_facts
        from seatrial.evidence.imports import read_imports

        row = f'{{"process": "worker", "package": "{text(rng)}", "method": "imported", "file": {some_json(rng, 1)}}}\n'
        path = self._file("imports.jsonl", self._either(rng, row, [row.encode("utf-8", "surrogatepass")]))
        read_facts(path)
        read_imports(path)

    def world(self, rng: random.Random) -> Answer | None:
        """A whole directory with one or two files damaged, and a command that reads it."""
        name = rng.choice(sorted(WORLDS))
        world = self.corpus.world(name)
        place = world.home or self.place / "run"
        shutil.rmtree(place, ignore_errors=True)
        files = world.write(place)
        commands = [rng.choice(world.commands) for _ in range(rng.choice((1, 1, 2)))]
        damaged = damage(rng, files)
        self.said, answer = damaged, None
        for words in commands:  # what one writes, the next reads
            self.said = [*self.said, " ".join(words)]
            answer = self._asked(place, tuple(word.replace("{}", str(place)) for word in words))
            if answer is None or answer.code not in ALLOWED:
                return answer
        if (
            answer is not None
            and len(commands) == 1
            and not named(answer, damaged, place)
            and not self.corpus.refused(name, commands[0], self)
        ):
            raise AssertionError(f"the message names no file: exit code {answer.code}: {answer.out}{answer.err}")
        return answer

    def _asked(self, place: Path, command: tuple[str, ...]) -> Answer | None:
        """The answer to a command of a world; None where it has none."""
        known: dict[str, Callable[..., None]] = {"replay": self._replay, "prepare": self._prepare, "collect": self._collected}
        if command[0] in known:
            known[command[0]](place, *command[1:])
            return None
        if command[0] == "fake":
            with fake_loop():
                return inside(*command[1:], cwd=self.place, HOME=str(place / "home"), SEATRIAL_HISTORY="off", SEATRIAL_BASE_CACHE="off")
        if command[:2] == ("functional", "judge"):
            self._judged(place, *command[2:])
            return None
        variables = {"HOME": str(place / "home"), "SEATRIAL_CACHE": str(place), "XDG_CACHE_HOME": str(self.place), "PATH": "/usr/bin:/bin"}
        blocked = BlockedError(Boundary.ENVIRONMENT, "no environment is built here", "")
        with mock.patch.object(Environments, "build", side_effect=blocked):  # of a trial that may go on
            try:
                return inside(*command, cwd=self.place, **variables)
            except HangError:
                if command[0] != "attach":  # which waits for as long as Slurm knows no end of the job
                    raise
                return None

    def _replay(self, place: Path, file: str, repo: str) -> None:
        from seatrial.bisect.git_bisect_log import read_marks

        read_marks(Path(file), place / repo)

    def _collected(self, place: Path) -> None:
        """What a collector does with a campaign that others left: take each shard, and write down what it owes."""
        from seatrial.rollouts.campaign_dir import CampaignDir
        from seatrial.rollouts.dispatcher import ShardWriter
        from seatrial.rollouts.journal.attempts import LeaseHeldError
        from seatrial.rollouts.manifest import Units, load_manifest
        from seatrial.rollouts.rollout_record import Head

        campaign = CampaignDir(place / "campaign")
        manifest = load_manifest(campaign)
        with Units(campaign, manifest) as units:
            for shard in range(min(manifest.shards, 4)):
                with suppress(LeaseHeldError):
                    book = ShardWriter.open(campaign, shard, lambda: True)
                    if book is None:
                        continue
                    for number in [*book.numbers(units)]:
                        unit = units.unit(number)
                        book.write(Head(number, unit.row.id, unit.repeat, unit.seed, "ok", reward=1.0), {"text": "x"})
                    book.close("done")

    def _judged(self, place: Path, code: str = "0") -> None:
        from seatrial.functional.judge_script import ScriptRun, judge_script
        from seatrial.functional.plan_scripts import FunctionalRequest, plan_scripts

        (place / "kept").mkdir()
        planned = plan_scripts(
            FunctionalRequest(scripts=(place / "script.sh",), checks=('max(data["train/loss"]) < 2',), metrics=place / "metrics.json")
        )
        ran = ScriptRun(directory=place / "kept", log=place / "run.log", started=0.0, ended="exited", exit_code=int(code), seconds=1.0)
        judge_script(planned[0], ran)

    def _prepare(self, place: Path) -> None:
        """What `rollouts start` does before it asks anybody, and the requests that it would send."""
        from seatrial.cli.input_files import read_campaign
        from seatrial.rollouts import manifest as manifests
        from seatrial.rollouts.campaign_dir import CampaignDir
        from seatrial.rollouts.manifest import Units

        campaign = read_campaign(place / "campaign.toml", {}, [])
        made = CampaignDir(place / "made")
        with Units(made, manifests.create_campaign(campaign, place, made)) as units:
            for number in range(min(units.total, 20)):
                self._requested(campaign, units.unit(number))

    def _requested(self, campaign: Any, unit: Any) -> None:
        from seatrial.rollouts.backends.gym_backend import body_of
        from seatrial.rollouts.backends.openai_format import build_request, sort_sampling
        from seatrial.rollouts.campaign import PARAMS, prompt_messages
        from seatrial.rollouts.rollout_record import RolloutError

        sampling = sort_sampling(campaign.sampling)
        dataset = campaign.datasets[0]
        own = unit.row.data.get(PARAMS) or {"input": prompt_messages(unit.row.data, dataset)}
        for api in ("chat", "responses"):
            with suppress(ValueError):
                build_request(own, sampling, api=api, model="m", seed=unit.seed)
        with suppress(RolloutError):
            body_of(unit, campaign, sampling)

    def rows(self, rng: random.Random) -> None:
        """Rows of inputs."""
        from seatrial.cli.input_files import read_campaign
        from seatrial.rollouts import manifest as manifests
        from seatrial.rollouts.campaign_dir import CampaignDir
        from seatrial.rollouts.manifest import Units

        made = "".join(
            f'{{"prompt": {some_json(rng, 2)}, "answer": {some_json(rng, 1)}, "{text(rng)}": {some_json(rng)}}}\n' for _ in range(3)
        )
        params = f'{{"responses_create_params": {{"input": "a", "metadata": {some_json(rng, 2)}, "tools": [{some_json(rng, 1)}]}}}}\n'
        path = self._file("rows.jsonl", self._either(rng, rng.choice((made, params)), [self.corpus.rollouts]))
        if self.corpus.parquet and rng.random() < 0.25:
            data = mutated(rng, self.corpus.parquet)
            path.write_bytes(b"PAR1" + data[4:] if rng.random() < 0.7 else data)
        toml = f'name = "a"\nverifier = "exact"\n[policy]\nurl = "http://h/v1"\n[[datasets]]\nname = "d"\npath = "{path}"\n'
        campaign = read_campaign(self._file("campaign.toml", toml), {}, [])
        made_at = CampaignDir(self.place / "made")
        with Units(made_at, manifests.create_campaign(campaign, self.place, made_at)) as units:
            for number in range(units.total):
                self._requested(campaign, units.unit(number))

    def answer(self, rng: random.Random) -> None:
        """Answers of policies and of Gym, and the records that are made of them."""
        from seatrial.rollouts.backends.direct_backend import error_of_status
        from seatrial.rollouts.backends.gym_backend import outcome_of, result_of
        from seatrial.rollouts.backends.openai_format import read
        from seatrial.rollouts.fast_json import parse_json_fast
        from seatrial.rollouts.rollout_record import Head, RolloutError, encode

        call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 1}}
        message = {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [call]}
        chat = {"id": "1", "created": 1, "model": "m", "choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
        item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
        other = {
            "status": "completed",
            "output": [item, {"type": "function_call"}],
            "usage": {"input_tokens": 1},
            "incomplete_details": None,
        }
        run = {"reward": 1.0, "response": other, "extracted_answer": "4", "x": 1}
        api, data = rng.choice((("chat", chat), ("responses", other), ("gym", run)))
        body = written(changed(rng, json.loads(json.dumps(data)), rng.choice((1, 2, 3))))
        body = mutated(rng, body) if rng.random() < 0.2 else body
        self._file("body.json", body)
        error_of_status(rng.choice((400, 413, 429, 500, 302)), body, {"Retry-After": rng.choice(TEXTS), "Location": rng.choice(TEXTS)})
        with suppress(RolloutError, BadValue):
            if api == "gym":
                made = outcome_of(result_of({"_ng_task_index": 0, "_ng_rollout_index": 0, "agent_ref": {}}, parse_json_fast(body)))
                head = Head(0, "t", 0, 0, "ok", reward=made.reward, answer=made.answer, finish=made.finish, metrics=made.metrics)
                self._encoded(encode, head, made.row)
                return
            said = read(body, "chat" if api == "chat" else "responses", 0)
            head = Head(
                0, "t", 0, 0, "ok", reward=1.0, input_tokens=said.input_tokens, output_tokens=said.output_tokens, finish=said.finish
            )
            self._encoded(encode, head, {"response": said.response, "text": said.text})

    def _encoded(self, encode: Callable[..., bytes], head: Any, row: Any) -> None:
        """As `collect.book` does: what cannot be stored is a ValueError or a TypeError there."""
        from seatrial.rollouts.rollout_record import check, head_of, row_of

        with suppress(ValueError):
            line = encode(head, row)
            head_of(line, check(line))
            row_of(line)

    def parser(self, rng: random.Random) -> None:
        """What no command reads alone."""
        parse = rng.choice(PARSERS)
        self.said = [parse.__name__]
        parse(rng, self.place)

    def level(self, rng: random.Random) -> None:
        """What a run of a level left: facts, shadows, dumps and logs, as `run` judges them."""
        from seatrial.trial.conclude import _asserted

        directory = self.place / "level"
        directory.mkdir()
        loop, name, series = rng.choice((self._trl, self._verl, self._nemo_rl))(rng, directory)
        files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size)
        self.said = [f"{loop.name} {name}", *damage(rng, files)]
        level = next(one for one in loop.levels() if one.name == name)
        _, made, _ = _asserted(loop, level, directory, Metrics(series=dict(series)))
        for check in made:
            check.model_dump_json()
        loop.shortfalls(level, directory)

    def _trl(self, rng: random.Random, directory: Path) -> tuple[Loop, str, Mapping[str, Series]]:
        from tests.loops.test_trl_proofs import WORLDS, prove

        name = rng.choice(sorted(WORLDS))
        prove(directory, name, *WORLDS[name])
        return get_loop("trl"), name, WORLDS[name][1]

    def _verl(self, rng: random.Random, directory: Path) -> tuple[Loop, str, Mapping[str, Series]]:
        from tests.loops.test_verl_cpu_proofs import WORLDS, prove

        name = rng.choice(sorted(WORLDS))
        prove(directory, name)
        strategy, _, level = name.partition(" ")
        return get_loop("verl").configured({"device": "cpu", "strategy": strategy}), level, WORLDS[name][1]

    def _nemo_rl(self, _: random.Random, directory: Path) -> tuple[Loop, str, Mapping[str, Series]]:
        from tests.loops.test_nemo_proofs import GRPO, MEGATRON, Bench, config, ended, whole

        made = Bench(directory)
        made.add("run", GRPO, config(MEGATRON) + ended(3))
        whole(made)
        made.proofs()
        return get_loop("nemo-rl"), "smoke", made.series

    def traces(self, rng: random.Random) -> None:
        """Logs of traced children, and what workers of a selecting session saw."""
        from pytest_seatrial.select import evidence
        from pytest_seatrial.select.evidence import Children
        from pytest_seatrial.select.trace.trace_events import read_logs

        rows = ('["hello", 1, "python", "[\\"a\\", \\"b.py\\"]"]', '["hit", 1, "77", "a.py"]', '["spawn", 1, "[\\"python\\"]", "/"]')
        log = "\n".join(
            [*rows, '["call", 1, "0", "a.py\\u0000f\\u00003"]', f'["{text(rng)}", {number(rng)}, {some_json(rng, 1)}, "x"]', ""]
        )
        self._file("trace/7-ab.log", rows_changed(rng, log.encode("utf-8", "surrogatepass")))
        found = list(read_logs(self.place / "trace"))
        Children(found, {}) if found else None
        row = (
            b'{"did": [[-1, 5], [3, "a.py", "f", 2], ["read", 1, "b", ""]], "ran": {"test": "t", "path": "t.py", "epoch": 1, "uses": [1], '
        )
        row += b'"outcome": "passed"}, "needs": [[1, [2]]], "collected": ["a"]}\n'
        path = self._file("evidence.jsonl", rows_changed(rng, row * 2))
        with suppress(ValueError):  # "nothing was recorded" is what it becomes
            evidence.read_evidence(path)


def named(answer: Answer, damaged: list[str], place: Path) -> bool:
    """Whether a usage error says which file it is about: one of the damaged ones, or one of their directory."""
    text = "".join(f"{answer.out}{answer.err}".split())
    names = [said.partition(":")[0] for said in damaged]
    return answer.code != 2 or any("".join(name.split()) in text for name in (*names, str(place)))


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise HangError after so many seconds."""

    def ring(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def one(fuzzer: Fuzzer, seed: int, index: int) -> tuple[str, str | None]:
    """Run one input: its target, and what is wrong with its end."""
    rng = random.Random(f"{seed}:{index}")
    target = rng.choice(fuzzer.targets)
    try:
        with limited(LIMIT_S):
            answer = target(rng)
    except (UserError, BlockedError):
        return target.__name__, None
    except HangError:
        return target.__name__, f"more than {LIMIT_S} s"
    except Exception:  # noqa: BLE001 - this is what is looked for
        return target.__name__, traceback.format_exc()
    return target.__name__, None if answer is None or answer.code in ALLOWED else f"exit code {answer.code}: {answer.err[-3000:]}"


def _kept(place: Path, target: Path) -> Path:
    """A copy of an offending input, without pipes: what was done to the files is told beside it."""

    def pipes(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if (Path(folder) / name).is_fifo()]

    return Path(shutil.copytree(place, target, symlinks=True, ignore=pipes, dirs_exist_ok=True))


def fuzz(inputs: range, seed: int, place: Path, keep: Path | None = None) -> Iterator[Finding]:
    """Run inputs; yields what ended otherwise than it may."""
    fuzzer = Fuzzer(Corpus(), place)
    for index in inputs:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        fuzzer.said = []
        target, what = one(fuzzer, seed, index)
        if what is not None:
            what = "\n".join((*fuzzer.said, what))
            kept = None if keep is None else _kept(place, keep / f"{seed}-{index}-{target}")
            yield Finding(index, target, what, kept)


def main() -> int:
    """The command for longer runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this input alone")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "seatrial-fuzz", help="where offending inputs go")
    given = parser.parse_args()
    began, counts = time.monotonic(), Counter[str]()
    inputs = range(given.inputs) if given.only is None else range(given.only, given.only + 1)
    with tempfile.TemporaryDirectory(prefix="seatrial-fuzz-") as folder:
        for found in fuzz(inputs, given.seed, Path(folder) / "in", given.keep):
            counts[found.target] += 1
            sys.stdout.write(f"--- seed {given.seed} input {found.index} ({found.target}), kept in {found.files}\n{found.what}\n")
            sys.stdout.flush()
    sys.stdout.write(
        f"{len(inputs)} inputs of seed {given.seed} in {time.monotonic() - began:.0f} s: {sum(counts.values())} findings {dict(counts)}\n"
    )
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
