"""Finds what a script of the checkout would run by running it with stand-ins in a shadow of the checkout.

The scripts delete earlier results and write to the checkout; in the shadow nothing of it happens for real.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.core.files import read_text
from seatrial.core.guarded import BadValue, parse_json, real_path
from seatrial.core.loop import Context
from seatrial.core.specs import Level
from seatrial.loops.nemo_rl import nemo_checkout, nemo_runs
from seatrial.loops.nemo_rl.nemo_outputs import RESULTS
from seatrial.loops.nemo_rl.nemo_runs import ScriptCall, variants
from seatrial.runtime.command import NoAnswerError, run_command

WORKPLACES = "3rdparty"
DEPTH = 3
"""So deep the folders below are real, too: scripts go into 3rdparty/Gym-workspace/Gym and write files of their own there."""
RECORDED = ("uv", "python", "python3")
"""These start programs of NeMo-RL."""
IDLE = (
    *("git", "apt-get", "apt", "sudo", "pip", "pip3", "ray", "docker", "curl", "wget", "sleep"),
    *("pkill", "pgrep", "killall", "nsys", "sbatch", "srun", "hf", "huggingface-cli"),
)
"""These do nothing."""
STAND_IN = """\
import hashlib, json, os, sys
calls, name, *words = sys.argv[1:]
if "-" in words:
    sys.stdin.read()
if any(word.endswith("json_dump_tb_logs.py") for word in words) and "--output_path" in words[:-1]:
    with open(words[words.index("--output_path") + 1], "w") as stream:
        stream.write("{}")
if any(os.path.basename(word).startswith("run_") and word.endswith(".py") for word in words):
    open(calls + ".trained", "w").close()
with open(os.path.join(os.path.dirname(calls), "given.json")) as stream:
    salt, given = json.load(stream)
own = {k: v for k, v in os.environ.items() if given.get(k) != hashlib.blake2b(os.fsencode(v), key=bytes.fromhex(salt)).hexdigest()}
gone = [k for k in given if k not in os.environ]
with open(calls, "a") as stream:
    stream.write(json.dumps({"argv": [name, *words], "cwd": os.getcwd(), "environment": own, "unset": gone}) + "\\n")
"""
"""Variables are stored where they differ from those given to the script, which hold the user's tokens: of these it knows
salted digests."""
SMI = '#!/bin/sh\nfor n in 0 1 2 3 4 5 6 7; do case "$*" in *--query*) echo 0;; *) echo "GPU $n: stand-in";; esac; done\n'
REMOVE = '#!/bin/sh\nfor word; do case "$word" in *..*) exit 0;; -*|{own}/*|{home}/*) ;; *) exit 0;; esac; done\nexec {rm} "$@"\n'
"""Only what the script made itself: a link of the shadow tree leads into the checkout."""
QUERY = "#!/bin/sh\n[ -e {trained} ] && echo 1000000\nexit 0\n"
"""jq: scripts of recipes ask it for the steps that are done."""
AFTERWARDS = """\
trap '[[ -e {trained} ]] && set +e' DEBUG
set -o functrace
exit() {{ if [[ -e {trained} ]]; then return 0; else builtin exit "$@"; fi; }}
"""
"""Bash reads it before a script: from the first training on, a failure does not end the script."""


@dataclass(frozen=True, slots=True)
class ShadowCheckout:
    """The shadow tree and the stand-ins, below one temporary folder."""

    folder: Path
    checkout: Path
    name: Path
    """Of the script, relative to the checkout."""
    given: Mapping[str, str]

    @property
    def root(self) -> Path:
        return self.folder / "checkout"

    @property
    def script(self) -> Path:
        return self.root / self.name

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def calls(self) -> Path:
        return self.folder / "calls.jsonl"

    def build(self) -> None:
        self._shadow(Path())
        (self.home / "tmp").mkdir(parents=True)
        programs = self.folder / "bin"
        programs.mkdir()
        (self.folder / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
        (self.folder / "given.json").write_text(json.dumps(self._digests()), encoding="utf-8")
        made = dict.fromkeys(IDLE, "#!/bin/sh\nexit 0\n")
        for name in RECORDED:
            words = shlex.join([sys.executable, "-I", "-S", str(self.folder / "stand_in.py"), str(self.calls), name])
            made[name] = f'#!/bin/sh\nexec {words} "$@"\n'
        made["nvidia-smi"] = SMI
        made["rm"] = REMOVE.format(own=self.script.parent, home=self.home, rm=shutil.which("rm") or "/bin/rm")
        made["jq"] = QUERY.format(trained=f"{self.calls}.trained")
        for name, text in made.items():
            (programs / name).write_text(text, encoding="utf-8")
            (programs / name).chmod(0o755)
        (self.folder / "afterwards.sh").write_text(AFTERWARDS.format(trained=f"{self.calls}.trained"), encoding="utf-8")

    def _shadow(self, part: Path) -> None:
        """Real folders where a script works, copies of the files beside it, links to all else but hidden files."""
        real, shadow, way = self.checkout / part, self.root / part, self.name.parent
        shadow.mkdir(parents=True)
        for entry in real.iterdir():
            place = part / entry.name
            if entry.is_dir() and part == way:
                continue  # what earlier runs left
            if entry.is_file() and way.is_relative_to(part) and part.parts:
                shutil.copy(entry, shadow / entry.name)  # a script that resolves a link would come to the checkout
            elif entry.is_dir() and (way.is_relative_to(place) or (place.parts[0] == WORKPLACES and len(place.parts) <= DEPTH)):
                self._shadow(place)
            elif not entry.name.startswith("."):
                (shadow / entry.name).symlink_to(entry)

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(self.folder / "bin"), self.given.get("PATH") or os.defpath))
        ours = {"HOME": self.home, "GIT_CONFIG_GLOBAL": self.home / ".gitconfig", "TMPDIR": self.home / "tmp"}
        return {**self.given, "PATH": path, "BASH_ENV": str(self.folder / "afterwards.sh"), **{k: str(v) for k, v in ours.items()}}

    def _digests(self) -> tuple[str, dict[str, str]]:
        """A salt, and what the script runs with as digests: no value can be read back from the file."""
        salt = secrets.token_bytes(32)
        made = {key: hashlib.blake2b(os.fsencode(value), key=salt).hexdigest() for key, value in self.environment().items()}
        return salt.hex(), made

    def written(self) -> set[str]:
        found = [path for path in self.script.parent.rglob("*") if not path.is_symlink()]
        names = ((path, path.relative_to(self.root).as_posix()) for path in found)
        return {name if path.is_file() else f"{name}/" for path, name in names if path.is_file() or not any(path.iterdir())}

    def rows(self) -> list[dict[str, Any]]:
        """Every recorded call, in the checkout's terms. A last line without its end is of a call that was killed before it began."""
        lines = read_text(self.calls).split("\n")[:-1] if self.calls.exists() else []
        return [self._told(parse_json(line)) for line in lines]

    def _told(self, row: Mapping[str, Any]) -> dict[str, Any]:
        changed = self.environment()
        full = {**{key: value for key, value in changed.items() if key not in row["unset"]}, **row["environment"]}
        environment = {key: self.given.get(key) if changed.get(key) == value else self.real(value) for key, value in full.items()}
        kept = {key: value for key, value in environment.items() if value is not None and key != "_"}
        return {"argv": [self.real(word) for word in row["argv"]], "cwd": self.real(row["cwd"]), "environment": kept}

    def real(self, text: str) -> str:
        home = self.given.get("HOME", "~")
        return text.replace(str(self.root), str(self.checkout)).replace(str(self.home), home)

    def own_text(self, path: Path) -> str | None:
        """The text of a file that the script wrote itself: the checkout does not have it."""
        if path.is_file() or not path.is_relative_to(self.checkout):
            return None
        shadow = self.root / path.relative_to(self.checkout)
        return self.real(read_text(shadow)) if shadow.is_file() else None


SCRIPT_SECONDS = 60
CHECKER = "check_metrics.py"
PROGRAM = re.compile(r"(?:.*/)?run_\w+\.py")


class ScriptError(Exception):
    """The script did not come to the point where it starts training."""


@dataclass(frozen=True, slots=True)
class Training:
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
class RecordedScript:
    """Everything that a script would do, as far as it matters."""

    trainings: tuple[Training, ...]
    assertions: tuple[str, ...]
    """Expressions for check_metrics.py, as the shell expanded them."""
    files: tuple[str, ...]
    """What it writes beside its trainings, relative to the checkout; folders end with `/`."""
    ended: int
    """Exit code; not 0 where the script looks for lines that only a real run prints."""


def record_script(script: Path, checkout: Path, words: Sequence[str], environment: Mapping[str, str]) -> RecordedScript:
    """Run a script of the checkout with stand-ins; ScriptError with its last words when it never starts training."""
    with tempfile.TemporaryDirectory(prefix="seatrial-record-") as folder:
        stage = ShadowCheckout(real_path(Path(folder)), checkout, script.relative_to(checkout), environment)
        try:
            stage.build()
            before = stage.written()
            ended, said = _run(stage, words)
        except (OSError, NoAnswerError) as error:
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
    return RecordedScript(trainings, tuple(word for row in rows for word in _assertions(row["argv"])), files, ended)


def _run(stage: ShadowCheckout, words: Sequence[str]) -> tuple[int, str]:
    """The exit code, and what was said on the error stream; what was recorded before a deadline counts."""
    try:
        done = run_command(["bash", stage.script, *words], SCRIPT_SECONDS, cwd=stage.root, env=stage.environment(), own_session=True)
    except NoAnswerError as error:
        if not error.late:
            raise
        return 124, f"no end within {SCRIPT_SECONDS} s"
    return done.code, stage.real(done.error)


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


def _trainings(row: Mapping[str, Any], stage: ShadowCheckout) -> Iterator[Training]:
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
    config, overrides, left = None, [], iter(words)
    for word in left:
        if word == "--config":
            config = next(left, None)
        elif word.startswith("--config="):
            config = word.partition("=")[2]
        else:
            overrides.append(word)
    return config, overrides


def describe_scripts(level: Level, context: Context, directory: Path) -> tuple[str, ...]:
    """For each call: how it trains, with which variables, what the script asserts, and where its files will be."""
    place = nemo_checkout.checkout_of(context)
    if place is None:
        return ("no NeMo-RL checkout was named: what its scripts start is not known",)
    layout = nemo_checkout.layout(place)
    if not layout.ok:
        return (f"what its scripts start is not known: {layout.message}",)
    return tuple(line for call in variants(level.name, context) for line in _call(call, context, place, directory))


def _call(call: ScriptCall, context: Context, place: Path, directory: Path) -> Iterator[str]:
    path = nemo_checkout.python_path(context)
    environment = {**os.environ, **call.variables, "PYTHONPATH": path}
    yield f"{call.script} ({call.name}) starts:"
    try:
        found = record_script(place / call.script, place, nemo_runs.words(call, context, directory), environment)
    except (ScriptError, ValueError) as error:
        yield f"  not known: {error}"
        return
    for training in found.trainings:
        yield f"  {shlex.join(training.argv)}"
        yield f"  with {_variables(training, environment)}"
    for expression in found.assertions if call.assertions else ():
        yield f"  asserts {expression}"
    for file in found.files:
        yield f"  writes {file}, kept as $OUT/{call.name}/{RESULTS}"
    yield f"  metrics: $OUT/{call.name}/{RESULTS}/**/*tfevents*, claims: {len(call.claims)} values of the configuration"


def _variables(training: Training, before: dict[str, str]) -> str:
    own = {key: value for key, value in training.environment.items() if before.get(key) != value and key.isupper()}
    ours = ("HOME", "PATH", "GIT_CONFIG_GLOBAL", "SHLVL", "PWD", "OLDPWD", "TMPDIR")
    return " ".join(f"{key}={shlex.quote(value)}" for key, value in sorted(own.items()) if key not in ours) or "no variable of its own"
