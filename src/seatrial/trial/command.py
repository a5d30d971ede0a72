"""command.sh: the exact processes of a level as a script that a person can read and run.

The level directory is replaced by `$OUT`, a fresh directory by default, so that running the script again never
touches the evidence. The script works in `$OUT` too: Python would import from wherever it was called.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from seatrial.launch.words import grouped
from seatrial.model.loop import Phase

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
    """The script of a level."""
    lines = [HEADER.format(title=title, unset=" ".join(unset))]
    lines += [f"export {key}={quoted(value, directory)}" for key, value in sorted(environment.items())]
    for phase in phases:
        lines.append(f"\n# {phase.name}" + (f": {phase.steps} steps" if phase.steps else ""))
        lines += phase_lines(phase, directory, environment.get("PYTHONPATH", "").split(os.pathsep)[-1])
    return "\n".join(lines) + "\n"


def phase_lines(phase: Phase, directory: Path, beside: str = "") -> list[str]:
    """One process; its variables and its working directory end with it. `beside` is the import path without the change."""
    command = " \\\n  ".join(grouped([quoted(word, directory) for word in phase.argv]))
    inside = [f"cd -- {quoted(str(phase.cwd), directory)}"] if phase.cwd else []
    inside += [f"export PYTHONPATH={quoted(beside, directory)}"] if phase.beside else []
    inside += [f"export {key}={quoted(value, directory)}" for key, value in sorted(phase.env.items())]
    return ["(", f'mkdir -p -- "$OUT"/{shlex.quote(phase.name)}', *inside, command, ")"] if inside else [command]
