"""A venv of one tree on top of a shared one, so that a build command may install what it builds.

- It lies in the tree and goes with it. What is installed goes here; the shared environment, which it sees through a `.pth` file, stays as
  it is: the code of one commit must never be imported by the run of another.
- It is written directly, which takes milliseconds: the interpreter is a link, the programs of the shared environment are copies
  that start this interpreter.
- `pip` and `python -m pip` work here even when the shared environment has no pip, and install here.
"""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from seatrial.launch.venvs import interpreter
from seatrial.regress.bisect.environments.locks import BuildFailed

NAME = ".seatrial-venv"
"""In the tree; test runners and packaging tools pass over names that begin with a dot."""

_PIP = """import os, sys
os.execv({python!r}, [{python!r}, "-I", "-m", "pip", "--python", sys.executable, *sys.argv[1:]])
"""


def make_overlay(tree: Path, shared: Path, pip: str) -> Path:
    """Make the venv of this tree anew; `pip` is an interpreter that has pip."""
    place = tree / NAME
    try:
        if place.exists():
            shutil.rmtree(place)
        _write(place, shared, pip)
    except OSError as error:
        raise BuildFailed(f"{place}: cannot write: {error.strerror or error}", transient=True) from error
    return place


def packages_of(venv: Path) -> Path:
    """Where a venv has its packages; a FileNotFoundError when it has no such place."""
    found = next((venv / "lib").glob("python*/site-packages"), None)
    if found is None:
        raise FileNotFoundError(f"{venv}: no site-packages")
    return found


def _write(place: Path, shared: Path, pip: str) -> None:
    packages = packages_of(shared)
    own = place / packages.relative_to(shared)
    own.mkdir(parents=True)
    (place / "bin").mkdir()
    if (shared / "lib64").is_symlink():
        (place / "lib64").symlink_to("lib")
    shutil.copy(shared / "pyvenv.cfg", place)
    # `addsitedir` follows the .pth files of the shared environment too; a plain path would not.
    (own / "seatrial-shared.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    for program in (shared / "bin").iterdir():
        _copy_program(program, place, shared)
    if not (packages / "pip").exists():
        (own / "pip").mkdir()
        (own / "pip" / "__init__.py").touch()
        (own / "pip" / "__main__.py").write_text(_PIP.format(python=pip))
        for name in ("pip", "pip3"):
            (place / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(str(interpreter(place)))} -m pip "$@"\n')
            (place / "bin" / name).chmod(0o755)


def _copy_program(program: Path, place: Path, shared: Path) -> None:
    target = place / "bin" / program.name
    if program.is_symlink():
        target.symlink_to(program.readlink())
        return
    data = program.read_bytes()
    if b"\0" in data:
        target.symlink_to(program)
        return
    first, newline, rest = data.partition(b"\n")
    if first.startswith(b"#!" + bytes(shared / "bin")):
        # As pip writes it where a path is too long for the kernel, or holds blanks: a shell program that is a string for Python.
        start = f"#!/bin/sh\n'''exec' {shlex.quote(str(interpreter(place)))} \"$0\" \"$@\"\n' '''".encode()
        data = start + newline + rest
    target.write_bytes(data.replace(bytes(shared / "bin"), bytes(place / "bin")))
    target.chmod(program.stat().st_mode)
