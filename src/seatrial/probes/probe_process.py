"""Runs an instrument's driver, a process of another interpreter, to its end; checks first that a model's weights can be read.

The log holds what the driver prints, redacted; facts.jsonl holds what it found, row by row, so an interrupted probe still shows
how far it came. `runtime` ends all processes whatever happens. `require_weights` reads the headers of safetensors files alone, so a torn
copy is named before an engine stumbles over it.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from seatrial.checks.probe_facts import Facts, read_facts
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import read_text, write_text
from seatrial.core.guarded import open_file, parse_json
from seatrial.core.verdict import Boundary
from seatrial.evidence.redact import Redactor
from seatrial.loops import VLLM_CPU
from seatrial.loops.console_lines import read_lines
from seatrial.runtime.process import Outcome, ProcessSpec, Tick, run
from seatrial.trial.preflight import child_environment
from seatrial.trial.staging import engine_interpreters

FACTS, LOG = "facts.jsonl", "run.log"
STALL_S = 600.0
"""A server may load for minutes without a word."""

Tell = Callable[[str], None]


def vllm_python(option: str) -> Path:
    """The interpreter of the environment with vLLM; `option` names another one."""
    python = engine_interpreters().get(VLLM_CPU)
    if python is None:
        fix = f"seatrial env build {VLLM_CPU}, or name your own interpreter with {option}"
        raise BlockedError(Boundary.ENVIRONMENT, f"the environment {VLLM_CPU} is not built", fix)
    return python


class ProbeInterrupted(KeyboardInterrupt):
    """A probe was stopped: all its processes are ended, and there is no verdict."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"interrupted; what was found so far: {directory}")
        self.directory = directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """Where and with what a driver runs."""

    out: Path
    instruments: Path
    redactor: Redactor
    import_path: tuple[str, ...] = ()
    """Checkouts under test, before everything else."""

    def run(self, argv: Sequence[str], log: str, deadline_s: float, tick: Callable[[Tick], None] | None = None) -> Outcome:
        extra = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        spec = ProcessSpec(
            argv=tuple(argv),
            env=child_environment(os.environ, (*self.import_path, str(self.instruments)), extra),
            cwd=self.instruments,
            log=self.out / log,
            run_id=f"{self.out.name}-probe-{time.time_ns()}",
            deadline_s=deadline_s,
            stall_s=STALL_S,
            watch=(self.out / FACTS,),
            line_filter=self.redactor.lines().line,
        )
        return run(spec, tick)

    def facts(self, texts: Sequence[str]) -> Facts:
        """What it left. Facts that hold free text (errors) are cleared of secrets; hashes beside names like `embed_tokens` are not text."""
        path = self.out / FACTS
        if not path.is_file():
            return Facts(())
        text = read_text(path)
        marks = tuple(f'{{"fact": "{name}"' for name in texts)
        cleared = "\n".join(
            _cleared(line, self.redactor) if line.startswith(marks) else self.redactor.tokens(line) for line in text.split("\n")
        )
        if cleared != text:
            write_text(path, cleared)
        return read_facts(path)


def trouble(outcome: Outcome, log: Path, deadline_s: float) -> str:
    """How a process ended, when not well; "" else."""
    if outcome.ended == "exited" and outcome.exit_code == 0:
        return ""
    if outcome.ended == "deadline":
        return f"no end within {deadline_s / 60:g} minutes"
    if outcome.ended == "stalled":
        return f"nothing happened for {STALL_S / 60:g} minutes"
    said = [text for _, _, text in read_lines(log) if text.strip()] if log.is_file() else []
    return f"exit code {outcome.exit_code}: {said[-1].strip()[:300] if said else 'it said nothing'} ({log})"


def _cleared(line: str, redactor: Redactor) -> str:
    try:
        return json.dumps(redactor.value(parse_json(line)), ensure_ascii=False)
    except ValueError:  # torn: it stays damage
        return redactor.text(line)


class Follower:
    def __init__(self, path: Path, fact: str, say: Callable[[bytes], str], tell: Tell) -> None:
        self.path, self.mark, self.say, self.tell, self.read = path, f'{{"fact": "{fact}"'.encode(), say, tell, 0

    def tick(self, beat: Tick) -> None:
        del beat
        self.look()

    def look(self) -> None:
        """Read what was added. A row that cannot be read is the judge's to report."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as stream:
            stream.seek(self.read)
            added = stream.read()
        whole = added[: added.rfind(b"\n") + 1]
        self.read += len(whole)
        for line in whole.splitlines():
            if line.startswith(self.mark):
                self.tell(self.say(line))


_LONGEST_HEADER = 100_000_000


def require_weights(directory: Path, said: str) -> None:
    """A UserError unless there are safetensors in `directory` and all of them are whole; `said` is how the user named it."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{said}: no weights (*.safetensors) in it", f"name the directory of a checkpoint, or copy its weights into {directory}"
        )
    for file in files:
        if trouble := _trouble(file):
            raise UserError(f"{file}: {trouble}", "copy the file again: its header and its size do not fit")


def _trouble(file: Path) -> str:
    """What is wrong with a file; "" when nothing is."""
    try:
        size = file.stat().st_size
        with open_file(file) as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if not 0 < length <= min(_LONGEST_HEADER, size - 8):
                return f"torn: a header of {length} bytes in a file of {size}"
            header = parse_json(stream.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (OSError, struct.error, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        return f"not a safetensors file: {type(error).__name__}: {error}"
    return "" if end == size - 8 - length else f"torn: {size - 8 - length} bytes of weights, its header tells of {end}"
