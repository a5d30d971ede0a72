"""What a script of the checkout would really run, and whether this verl accepts it: known before a GPU is touched.

- `record` runs the real script with stand-ins for `python3` and `uv` first on PATH. They answer its question for the
  device with `cuda`, write down how they were called, and do nothing.
- `compose` has Hydra make the configurations from what was recorded, in the loop's own interpreter.
- Every override that is rejected is a finding, and so is every value that differs from what a level claims.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.files import read_text
from seatrial.loops.child import NoAnswerError, ask, run_child
from seatrial.loops.claims import differences
from seatrial.loops.verl.gpu.checkout import CONFIG
from seatrial.model.guarded import BadValue, parse_json
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

SCRIPT_SECONDS = 60
COMPOSE_SECONDS = 300
MAIN = "verl.trainer.main_ppo"
DRIVE = Path(__file__).parents[1] / "drive" / "compose.py"
STAND_IN = """\
import json, os, sys
if sys.argv[-1] == "-":
    sys.stdin.read()
    print("cuda")
else:
    with open(sys.argv[1], "a") as stream:
        stream.write(json.dumps({"argv": sys.argv[2:], "environment": dict(os.environ)}) + "\\n")
"""


class ScriptError(Exception):
    """The script did not come to the point where it starts training."""


@dataclass(frozen=True, slots=True)
class Recording:
    """How the script starts training."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def launch(self) -> tuple[str, ...]:
        """The words before `-m verl.trainer.main_ppo`."""
        return self.argv[: self.argv.index(MAIN) - 1]

    def config_name(self) -> str:
        """The configuration that is composed."""
        named = [word.partition("=")[2] for word in self._words() if word.startswith("--config-name=")]
        return named[-1] if named else "ppo_trainer"

    def overrides(self) -> list[str]:
        """What is passed on to Hydra, without its flags and its own settings."""
        return [word for word in self._words() if not word.startswith(("--", "hydra."))]

    def _words(self) -> tuple[str, ...]:
        return self.argv[self.argv.index(MAIN) + 1 :]


def record(script: Path, checkout: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> Recording:
    """Run the script with stand-ins; ScriptError with its last lines when it does not start training."""
    with tempfile.TemporaryDirectory(prefix="seatrial-record-") as folder:
        place = Path(folder)
        calls = place / "calls.jsonl"
        (place / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
        for name in ("python3", "uv"):
            words = shlex.join([sys.executable, "-I", str(place / "stand_in.py"), str(calls), name])
            (place / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
            (place / name).chmod(0o755)
        path = os.pathsep.join((folder, environment.get("PATH") or os.defpath))
        try:
            done = run_child(["bash", str(script), *arguments], checkout, {**environment, "PATH": path}, SCRIPT_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ScriptError(f"{script}: {error}") from error
        try:  # a last line without its end is of a call that was killed before it began
            rows = [parse_json(line) for line in read_text(calls).split("\n")[:-1]] if calls.exists() else []
        except BadValue as error:
            raise ScriptError(f"{script}: its calls were not recorded whole: {error}") from error
    for row in rows:
        if MAIN in row["argv"]:
            return Recording(tuple(row["argv"]), row["environment"])
    said = [line for line in done.stderr.splitlines() if line and not line.startswith("+")] or done.stderr.splitlines()
    raise ScriptError(f"{script}: ended with code {done.returncode} before training: {(said or ['(nothing said)'])[-1]}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One run to compose: how it is recorded, and what is claimed of it."""

    title: str
    recording: Recording
    claims: Mapping[str, Any]


def compose(
    wanted: Sequence[Wanted], checkout: Path, start: Sequence[str], environment: Mapping[str, str], own: Sequence[str]
) -> list[Finding]:
    """Findings over all runs; `own` are the user's overrides, which are named as such."""
    runs = [{"config_name": w.recording.config_name(), "overrides": w.recording.overrides(), "keys": list(w.claims)} for w in wanted]
    try:
        answers = ask(start, DRIVE, checkout, environment, COMPOSE_SECONDS, {"config_dir": str(checkout / CONFIG), "runs": runs})
    except NoAnswerError as error:
        return [_environment(f"the configuration could not be composed in {error}")]
    made = [finding for run, answer in zip(wanted, answers, strict=True) for finding in _judge(run, answer, own)]
    return made or [_config(True, f"{len(wanted)} runs composed, {sum(len(run['keys']) for run in runs)} values as claimed")]


def _judge(run: Wanted, answer: Mapping[str, Any], own: Sequence[str]) -> list[Finding]:
    if answer["error"]:
        return [_config(False, f"{run.title}: verl's own configuration does not compose: {answer['error']}", "use a clean verl checkout")]
    made = []
    for entry in answer["rejected"]:
        override, near = entry["override"], entry["near"]
        known = f"; nearest known: {', '.join(near)}" if near else ""
        fix = (
            "correct it, or leave it out"
            if override in own
            else "wrapper and configuration are of different versions: use a clean checkout"
        )
        made.append(_config(False, f"{run.title}: this verl rejects {override}{known} ({entry['reason'][:200]})", fix))
    for key, value, claimed in differences(run.claims, answer["values"]):
        theirs = next((word for word in own if word.lstrip("+~").startswith(f"{key}=")), None)
        fix = f"leave {theirs} out: with it the level would not prove its claim" if theirs else "use verl's own wrapper unchanged"
        made.append(_config(False, f"{run.title} claims {key} = {claimed}, and the run would have {value}", fix))
    return made


def _config(ok: bool, message: str, fix: str = "") -> Finding:
    return Finding(name="configuration", ok=ok, boundary=Boundary.CONFIG, message=message, fix=fix)


def _environment(message: str) -> Finding:
    return Finding(name="configuration", ok=False, message=message, fix="install verl's dependencies (hydra-core) into the loop's Python")
