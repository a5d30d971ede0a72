"""The caller's environment, and a venv of one tree on top of a shared environment, so that a build command may install into it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from seatrial.bisect.lockfile import BuildFailed
from seatrial.core.guarded import parse_json, real_path
from seatrial.runtime.command import NoAnswerError, run_command
from seatrial.runtime.venvs import clean_env, interpreter, python_with_pip

ASK_S = 60.0
PIP_SETTINGS = {"PIP_USER": "0", "PIP_TARGET": "", "PIP_PREFIX": "", "PIP_ROOT": "", "PIP_PYTHON": ""}
"""Settings of the caller that would let pip install elsewhere than into the venv of the tree; an empty one is none for pip."""
_ASK = """
import importlib.util, json, os, sys, sysconfig
user = sysconfig.get_path("scripts", os.name + "_user")
print(json.dumps({
    "executable": sys.executable, "prefix": sys.prefix, "version": "%d.%d" % sys.version_info[:2],
    "venv": sys.prefix != sys.base_prefix and os.path.isfile(os.path.join(sys.prefix, "pyvenv.cfg")),
    "pip": importlib.util.find_spec("pip") is not None,
    "scripts": [sysconfig.get_path("scripts"), os.path.dirname(sys.executable), user],
}))
"""
_SHEBANG = re.compile(rb"#!\s*(?:/usr/bin/env\s+)?(\S*python[\d.]*)\s*(?:-\S+\s*)*\n")


@dataclass(frozen=True, slots=True)
class Caller:
    """What an interpreter says of itself."""

    executable: str
    prefix: Path
    version: str
    """Such as 3.11."""
    venv: bool
    pip: bool
    scripts: tuple[Path, ...]
    """Where its programs may lie; later ones come first on PATH."""

    def programs(self) -> Iterator[Path]:
        """The Python programs that start this interpreter."""
        own = real_path(Path(self.executable))
        for directory in self.scripts:
            for program in sorted(directory.iterdir()) if directory.is_dir() else ():
                if program.is_file() and os.access(program, os.R_OK | os.X_OK) and _starts(program) == own:
                    yield program


def find_caller(tree: Path) -> Caller | None:
    """The Python that PATH gives in this tree; None when it gives none, and a BuildFailed when that does not run."""
    found = shutil.which("python") or shutil.which("python3")
    if found is None:
        return None
    try:
        command = [found, "-I", "-c", _ASK]
        told = parse_json(run_command(command, ASK_S, cwd=tree, env=clean_env()).data)
    except (NoAnswerError, ValueError) as error:
        message = f"{found} does not run in this tree, so the build has nothing to install into but your own environment"
        raise BuildFailed(f"{message}; activate a Python, or name a lock: --env pip:LOCKFILE") from error
    scripts = tuple(dict.fromkeys(Path(place) for place in told["scripts"]))
    return Caller(told["executable"], Path(told["prefix"]), told["version"], told["venv"], told["pip"], scripts)


def _starts(program: Path) -> Path | None:
    """The interpreter that its first line names."""
    with program.open("rb") as file:
        first = _SHEBANG.match(file.read(4096))
    found = shutil.which(os.fsdecode(first[1])) if first else None
    return real_path(Path(found)) if found else None


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


def overlay_on_caller(tree: Path, caller: Caller) -> Path:
    """Make the venv of this tree anew on top of the caller's own environment."""
    if caller.venv:
        return make_overlay(tree, caller.prefix, python_with_pip(caller.executable))
    place = tree / NAME
    try:
        if place.exists():
            shutil.rmtree(place)
        _write_on_system(place, caller)
    except OSError as error:
        raise BuildFailed(f"{place}: cannot write: {error.strerror or error}", transient=True) from error
    return place


def refuse_pip(venv: Path) -> None:
    """Let `pip` say, in an environment that several commits use and that has none, that nothing is to be installed here."""
    said = "pip: this environment is shared by commits, and nothing is installed into it; use --build, or --with"
    if (packages_of(venv) / "pip").exists():
        return
    for name in _pips(packages_of(venv)):
        _program(venv / "bin" / name, f"echo {shlex.quote(said)} >&2; exit 1")


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
        _write_pip_module(own, pip)
        _write_pips(place, own)


def _write_on_system(place: Path, caller: Caller) -> None:
    own = place / "lib" / f"python{caller.version}" / "site-packages"
    own.mkdir(parents=True)
    (place / "bin").mkdir()
    (place / "lib64").symlink_to("lib")
    home = Path(caller.executable).parent
    (place / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = true\nversion = {caller.version}\n")
    for name in ("python", "python3", f"python{caller.version}"):
        (place / "bin" / name).symlink_to(caller.executable)
    for program in caller.programs():
        _start_here(program, place)
    if not caller.pip:
        _write_pip_module(own, python_with_pip(caller.executable))
    _write_pips(place, own)


def _write_pip_module(own: Path, pip: str) -> None:
    """What `python -m pip` runs: the pip of another interpreter, for this one."""
    (own / "pip").mkdir()
    (own / "pip" / "__init__.py").touch()
    (own / "pip" / "__main__.py").write_text(_PIP.format(python=pip))


def _write_pips(place: Path, packages: Path) -> None:
    for name in _pips(packages):
        _program(place / "bin" / name, f'exec {shlex.quote(str(interpreter(place)))} -m pip "$@"')


def _pips(packages: Path) -> tuple[str, ...]:
    return ("pip", "pip3", f"pip{packages.parent.name.removeprefix('python')}")


def _program(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # it may be a link to somebody else's
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def _start_here(program: Path, place: Path) -> None:
    """A copy of a Python program that starts the interpreter of this venv."""
    target = place / "bin" / program.name
    if target.is_symlink():
        return  # an interpreter
    target.write_bytes(_start(place) + b"\n" + program.read_bytes().partition(b"\n")[2])
    target.chmod(0o755)


def _start(place: Path) -> bytes:
    """As pip writes it where a path is too long for the kernel, or holds blanks: a shell program that is a string for Python."""
    return f"#!/bin/sh\n'''exec' {shlex.quote(str(interpreter(place)))} \"$0\" \"$@\"\n' '''".encode()


def _copy_program(program: Path, place: Path, shared: Path) -> None:
    target = place / "bin" / program.name
    if program.is_symlink():
        link = program.readlink()
        target.symlink_to(link if link.name == str(link) else program.parent / link)
        return
    if program.is_dir():
        return
    data = program.read_bytes()
    if b"\0" in data:
        target.symlink_to(program)
        return
    first, newline, rest = data.partition(b"\n")
    if first.startswith(b"#!" + bytes(shared / "bin")):
        data = _start(place) + newline + rest
    target.write_bytes(data.replace(bytes(shared / "bin"), bytes(place / "bin")))
    target.chmod(program.stat().st_mode)
