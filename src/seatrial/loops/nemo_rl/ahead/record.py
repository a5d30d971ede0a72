"""What a script of the checkout would run, found by running it with stand-ins; nothing of it happens for real.

- The scripts delete earlier results, write to the user's git configuration, install packages and end other processes. So
  a copy runs in a shadow of the checkout, with stand-ins for the programs that act (see `stage`). A program that is
  called by its whole path is not stood in for; the scripts of the levels call none.
- A script may train several times, and may look afterwards for lines that only a real run prints.
- Paths of the shadow tree are told as those of the checkout.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.loops.child import run_child
from seatrial.loops.nemo_rl.ahead.stage import Stage
from seatrial.model.guarded import BadValue, real_path

SCRIPT_SECONDS = 60
CHECKER = "check_metrics.py"
PROGRAM = re.compile(r"(?:.*/)?run_\w+\.py")


class ScriptError(Exception):
    """The script did not come to the point where it starts training."""


@dataclass(frozen=True, slots=True)
class Training:
    """One start of a program of NeMo-RL."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    program: str
    """Relative to the checkout: `examples/run_grpo.py`."""
    config: str | None
    """The configuration that was named; None is the program's own."""
    overrides: tuple[str, ...]
    text: str | None = None
    """What the configuration holds, when the script wrote it."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything that a script would do, as far as it matters."""

    trainings: tuple[Training, ...]
    assertions: tuple[str, ...]
    """Expressions for check_metrics.py, as the shell expanded them."""
    files: tuple[str, ...]
    """What it writes beside its trainings, relative to the checkout; folders end with `/`."""
    ended: int
    """Exit code; not 0 where the script looks for lines that only a real run prints."""


def record(script: Path, checkout: Path, words: Sequence[str], environment: Mapping[str, str]) -> Recording:
    """Run a script of the checkout with stand-ins; ScriptError with its last words when it never starts training."""
    with tempfile.TemporaryDirectory(prefix="seatrial-record-") as folder:
        stage = Stage(real_path(Path(folder)), checkout, script.relative_to(checkout), environment)
        try:
            stage.build()
            before = stage.written()
            ended, said = _run(stage, words)
        except OSError as error:
            raise ScriptError(f"{script}: {error}") from error
        try:
            rows = stage.rows()
        except BadValue as error:
            raise ScriptError(f"{script}: its calls were not recorded whole: {error}") from error
        files = tuple(sorted(stage.written() - before))
        trainings = tuple(training for row in rows for training in _trainings(row, stage))
    if not trainings:
        lines = [line for line in said.splitlines() if line and not line.startswith("+")] or ["(nothing said)"]
        raise ScriptError(f"{script}: ended with code {ended} before training: {lines[-1]}")
    return Recording(trainings, tuple(word for row in rows for word in _assertions(row["argv"])), files, ended)


def _run(stage: Stage, words: Sequence[str]) -> tuple[int, str]:
    """The exit code, and what was said on the error stream; what was recorded before a deadline counts."""
    try:
        done = run_child(["bash", str(stage.script), *words], stage.root, stage.environment(), SCRIPT_SECONDS)
    except subprocess.TimeoutExpired:
        return 124, f"no end within {SCRIPT_SECONDS} s"
    return done.returncode, stage.real(done.stderr)


def _assertions(argv: Sequence[str]) -> Iterator[str]:
    """The expressions of a call of the checker: what follows its file, without options."""
    place = next((index for index, word in enumerate(argv) if Path(word).name == CHECKER), None)
    if place is None:
        return
    words = iter(argv[place + 2 :])
    for word in words:
        if word == "--table-width":
            next(words, None)
        elif not word.startswith("--"):
            yield word


def _trainings(row: Mapping[str, Any], stage: Stage) -> Iterator[Training]:
    """The training that a call starts, if it does."""
    argv = row["argv"]
    for place, word in enumerate(argv):
        path = Path(row["cwd"], word)
        if PROGRAM.fullmatch(word) and path.is_relative_to(stage.checkout) and path.is_file():
            config, overrides = _split(argv[place + 1 :])
            text = stage.own_text(Path(row["cwd"], config)) if config else None
            program = real_path(path).relative_to(real_path(stage.checkout)).as_posix()
            yield Training(tuple(argv), row["environment"], program, config, tuple(overrides), text)
            return


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The last `--config`, and everything else."""
    config, overrides, left = None, [], iter(words)
    for word in left:
        if word == "--config":
            config = next(left, None)
        elif word.startswith("--config="):
            config = word.partition("=")[2]
        else:
            overrides.append(word)
    return config, overrides
