"""Whether the program of a command belongs to the environment that it is to run in.

- A name that the environment does not have is looked up on PATH, as the system does. Found there may be a Python program of another
  environment: it would run with the caller's packages, and say nothing of the commit's.
- Such are interpreters, scripts whose first line names an interpreter outside of the environment, and stand-ins of a version manager.
- Programs that are no Python (bash, make, git) are fine. Through those that only start another one (env, timeout) it is looked.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

STARTERS = ("env", "ionice", "nice", "nohup", "setsid", "stdbuf", "taskset", "time", "timeout")
_INTERPRETER = re.compile(r"(python|pypy)[\d.]*t?")
_SHIMS = "shims"
_READ = 4096


def foreign(words: Sequence[str], programs: Path, path: str) -> tuple[str, Path] | None:
    """The program of the command and where it lies, when it is Python's and of another environment than the one with `programs`."""
    for place, word in enumerate(words):
        found = None if "/" in word else shutil.which(word, path=path)
        if found is None and place:
            continue  # an option of a starter, or its value
        if found is None or (programs / word).exists():
            return None
        if word not in STARTERS:
            return (word, Path(found)) if _is_python(Path(found), programs) else None
    return None


def _is_python(program: Path, programs: Path) -> bool:
    if _INTERPRETER.fullmatch(program.name):
        return True
    try:
        with program.open("rb") as file:
            start = file.read(_READ)
    except OSError:
        return False  # it cannot be run, either
    if program.parent.name == _SHIMS:
        return not start.startswith(b"#!") or b"python" in start or b"pyenv" in start
    first, second = [*start.decode("utf-8", "replace").splitlines(), "", ""][:2]
    # The second line counts where pip had to write a shell program, since the path is too long for the kernel.
    words = first.removeprefix("#!").split() if first.startswith("#!") else []
    words += second.split() if second.startswith("'''exec'") else []
    interpreter = next((Path(word.strip("\"'")) for word in words if _INTERPRETER.fullmatch(Path(word.strip("\"'")).name)), None)
    # `env python` finds the interpreter of the environment, if that has one of this name.
    return interpreter is not None and not (str(interpreter) == interpreter.name and (programs / interpreter.name).exists())
