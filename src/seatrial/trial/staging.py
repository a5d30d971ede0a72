"""What the processes of a level get: an interpreter and its environment, staged instruments, a script of their commands, secret arguments.

- Instruments are a small copy of `seatrial` in the run directory: what the loop's interpreter needs, without Seatrial's dependencies.
  So `command.sh` runs as it stands after an upgrade.
- `command.sh` replaces the level directory by `$OUT`, a fresh directory by default: running it again never touches the evidence.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import seatrial
from seatrial import loops
from seatrial.core.errors import BlockedError, UserError
from seatrial.core.files import write_bytes
from seatrial.core.guarded import parse_json
from seatrial.core.jobs import grouped
from seatrial.core.loop import Context, Loop, Phase
from seatrial.core.records import EnvironmentRecord, Finding
from seatrial.core.specs import Level
from seatrial.core.verdict import Boundary
from seatrial.evidence.redact import Redactor
from seatrial.runtime.command import NoAnswerError, run_command
from seatrial.runtime.environments import Environments
from seatrial.trial.preflight import IGNORED, LAUNCHER, child_environment, require_room_for_instruments

HEADER = """#!/usr/bin/env bash
# {title}
# Runs as it stands, from anywhere. Output goes to $OUT (a new temporary directory unless you set it), never into the evidence.
set -euo pipefail
OUT="${{OUT:-$(mktemp -d)}}"
mkdir -p -- "$OUT"
cd -- "$OUT"
OUT="$PWD"
echo "writing to $OUT" >&2
unset {unset}
"""


def quoted(word: str, directory: Path) -> str:
    """One shell word, with the level directory as $OUT."""
    parts = re.split(re.escape(str(directory)) + r"(?![\w.-])", word)
    if len(parts) == 1:
        return shlex.quote(word)
    return '"$OUT"'.join(shlex.quote(part) if part else "" for part in parts)


def command_script(title: str, phases: Sequence[Phase], directory: Path, environment: Mapping[str, str], unset: Sequence[str]) -> str:
    lines = [HEADER.format(title=title, unset=" ".join(unset))]
    lines += [f"export {key}={quoted(value, directory)}" for key, value in sorted(environment.items())]
    for phase in phases:
        lines.append(f"\n# {phase.name}" + (f": {phase.steps} steps" if phase.steps else ""))
        lines += phase_lines(phase, directory, environment.get("PYTHONPATH", "").split(os.pathsep)[-1])
    return "\n".join(lines) + "\n"


def level_script(title: str, loop: Loop, level: Level, context: Context, directory: Path) -> str:
    """The script of one level of a trial, as its processes run."""
    environment = child_environment({}, loop_path(loop, context), {})
    return command_script(title, loop.phases(level, context, directory), directory, environment, (*IGNORED, *LAUNCHER))


def loop_path(loop: Loop, context: Context) -> tuple[str, ...]:
    """What stands on PYTHONPATH: checkouts under test first, then what the loop needs, then the instruments."""
    return (*context.import_path(), *loop.import_path(context), str(context.run_dir / "instruments"))


def phase_lines(phase: Phase, directory: Path, beside: str = "") -> list[str]:
    """One process; its variables and its working directory end with it. `beside` is the import path without the change."""
    command = " \\\n  ".join(grouped([quoted(word, directory) for word in phase.argv]))
    inside = [f"cd -- {quoted(str(phase.cwd), directory)}"] if phase.cwd else []
    inside += [f"export PYTHONPATH={quoted(beside, directory)}"] if phase.beside else []
    inside += [f"export {key}={quoted(value, directory)}" for key, value in sorted(phase.env.items())]
    return ["(", f'mkdir -p -- "$OUT"/{shlex.quote(phase.name)}', *inside, command, ")"] if inside else [command]


def redactor(arguments: Sequence[str]) -> Redactor:
    """Hides secrets of the environment and those among the loop arguments."""
    return Redactor({**_as_variables(arguments), **os.environ})


def refuse(arguments: Sequence[str]) -> None:
    """A loop argument that is a secret is not stored, so only the process that was given it can run the trial."""
    secret = next((word for word in redactor(arguments).value(tuple(arguments)) if "[redacted:" in word), None)
    if secret:
        message = f"a loop argument is a secret, which is not stored: {secret}"
        raise UserError(message, "pass it as a variable of the environment, or run the trial where you are, without --on")


def _as_variables(arguments: Sequence[str]) -> dict[str, str]:
    """Loop arguments by name, `--name value`, `--name=value` and `some.name=value`: a secret among them is one wherever it
    is printed."""
    found = {}
    for word, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, separator, value = word.partition("=")
        if separator:
            found[name.lstrip("-+~").rpartition(".")[2]] = value
        elif name.startswith("--"):
            found[name.lstrip("-")] = following
    return found


ROOT = Path(seatrial.__file__).parent
STAGED = (".py", ".c", ".cu")
"""The instruments' kernels are compiled where they run."""
OPEN = b'__path__ = __import__("pkgutil").extend_path(__path__, __name__)\n'
"""Where Seatrial is installed, too, the rest of it stays reachable: pytest loads its plugins in every session."""


def stage(run_dir: Path, loop: str = "") -> Path:
    """Copy the instruments below `run_dir`, with those of a loop; the directory for PYTHONPATH. BlockedError on a full disk."""
    require_room_for_instruments(run_dir)
    target, source = run_dir / "instruments", ROOT / "instruments"
    others = {source / name.replace("-", "_") for name in loops.built_in() if name != loop}  # each loop names its own folder
    for file in sorted(file for file in source.rglob("*") if file.suffix in STAGED and others.isdisjoint(file.parents)):
        write_bytes(target / "seatrial" / file.relative_to(ROOT), file.read_bytes())
    write_bytes(target / "seatrial" / "__init__.py", OPEN)
    return target


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter, the lock it was built from, and what was found about it."""

    python: Path
    lock: str | None
    findings: tuple[Finding, ...]


def engine_interpreters() -> dict[str, Path]:
    """The interpreters of generation engines whose opt-in environment is built, by the environment's name."""
    cache = Environments()
    return {name: found.python for name, lock in loops.engine_environments().items() if (found := cache.find(name, lock))}


def find_interpreter(loop: Loop, own: Path | None, progress: Callable[[str], None], build: bool = True) -> Interpreter:
    """The interpreter for a trial; an environment of ours is built first if it is absent and `build` is set."""
    if own is not None:
        if not own.is_file():
            raise BlockedError(
                Boundary.ENVIRONMENT, f"{own}: no such interpreter", "name the Python of the loop's environment with --python"
            )
        return Interpreter(
            own.absolute(), None, (Finding(name="environment", ok=True, message=f"{own}: the user's own, not built by Seatrial"),)
        )
    if loop.environment is None:
        ambient = loop.interpreter()
        message = f"{ambient}: of this machine or container, not built by Seatrial"
        return Interpreter(ambient, None, (Finding(name="environment", ok=True, message=message),))
    cache, name, lock = Environments(), loop.environment, loop.environments()[loop.environment]
    digest = cache.lock_hash(lock)
    found = cache.find(name, lock)
    if found is None and not build:
        raise BlockedError(Boundary.ENVIRONMENT, f"the environment {name} is not built", f"seatrial env build {name}")
    if found is None:
        progress(f"building the environment {name}, once: this takes minutes")
        found = cache.build(name, lock, progress, line_filter=Redactor(os.environ).lines().line)
    note = Finding(name="environment", ok=True, message=f"{found.path}: built from lock {digest[:12]}")
    return Interpreter(found.python, digest, (note,))


TIMEOUT_SECONDS = 60.0

# `-c` puts the working directory first on the path; a file there must not pose as a package. The names of dist-info
# directories are normalised already and hold the version, which saves parsing a hundred METADATA files.
_SNIPPET = """
import sys
if sys.path and sys.path[0] == "": del sys.path[0]
import importlib.metadata, json, os, platform, re
packages = {}
for found in importlib.metadata.distributions():
    directory = os.path.basename(str(getattr(found, "_path", "")))
    stem, extension = os.path.splitext(directory)
    name, dash, version = stem.partition("-")
    if extension != ".dist-info" or not version or "-" in version:
        name, version = found.metadata["Name"], found.version
    if name:
        packages.setdefault(re.sub("[-_.]+", "-", name).lower(), version or "unknown")
print(json.dumps({"version": platform.python_version(), "platform": platform.platform(), "packages": packages}))
"""


def environment_record(python: Path, lock: str | None = None) -> EnvironmentRecord:
    """Ask the interpreter `python` what it is and holds; `lock` is the hash of the lock it was built from."""
    answer = _ask_interpreter(python)
    version, packages = answer["version"], dict(sorted(answer["packages"].items()))
    return EnvironmentRecord(
        python=str(python),
        python_version=version,
        packages=packages,
        lock=lock,
        fingerprint=fingerprint(version, packages),
        platform=answer["platform"],
        cpu_count=len(os.sched_getaffinity(0)),
        gpus=gpu_names(),
    )


def fingerprint(python_version: str, packages: dict[str, str]) -> str:
    """Hash over the Python version and the packages, in whatever order they are given."""
    return hashlib.sha256(json.dumps([python_version, sorted(packages.items())]).encode()).hexdigest()


def environment_differences(old: EnvironmentRecord, new: EnvironmentRecord) -> tuple[str, ...]:
    """What differs between two environments, one line each; nothing when a result of one is a result of the other."""
    pairs = (("python", old.python_version, new.python_version), ("platform", old.platform, new.platform))
    lines = [f"{what}: {before} -> {after}" for what, before, after in pairs if before != after]
    for name in sorted(old.packages.keys() | new.packages.keys()):
        before, after = old.packages.get(name), new.packages.get(name)
        if before != after:
            lines.append(f"{name}: {before or 'absent'} -> {after or 'absent'}")
    if old.gpus != new.gpus:
        lines.append(f"GPUs: {', '.join(old.gpus) or 'none'} -> {', '.join(new.gpus) or 'none'}")
    return tuple(lines)


def gpu_names() -> tuple[str, ...]:
    """The GPUs of this machine by name; none where the driver is absent or does not answer."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = run_command(command, TIMEOUT_SECONDS)
    except NoAnswerError:
        return ()
    return tuple(row.strip() for row in done.out.splitlines() if row.strip()) if done.code == 0 else ()


def _ask_interpreter(python: Path) -> dict[str, Any]:
    """The answer of the interpreter, checked for its shape."""
    try:
        # -E without -s: packages of the user's site directory are importable in the loop, so they belong to the record.
        command = [str(python), "-E", "-B", "-c", _SNIPPET]
        done = run_command(command, TIMEOUT_SECONDS)
    except NoAnswerError as error:
        raise _blocked(
            python, f"does not answer within {TIMEOUT_SECONDS:.0f} s" if error.late else f"cannot be run: {error.why}"
        ) from error
    if done.code != 0:
        raise _blocked(python, f"cannot list its packages (exit code {done.code}): {done.last_words}")
    try:
        answer = parse_json(done.out.splitlines()[-1])
        strings = [answer["version"], answer["platform"], *answer["packages"], *answer["packages"].values()]
    except (IndexError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _blocked(python, f"is not a Python interpreter: it printed {done.out[:80]!r}") from error
    if not all(isinstance(entry, str) for entry in strings):
        raise _blocked(python, "listed packages without a name or version")
    result: dict[str, Any] = answer
    return result


def _blocked(python: Path, what: str) -> BlockedError:
    fix = "build the environment again: seatrial env build, or give the interpreter of a working one"
    return BlockedError(Boundary.ENVIRONMENT, f"{python}: {what}", fix)
