"""The environment of the caller: the Python that PATH gives in a tree, and the programs that belong to it.

- It is asked in the tree, since the stand-ins of version managers choose by the directory.
- Only read: nothing is ever installed there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from seatrial.launch.venvs import clean_env
from seatrial.model.guarded import parse_json, real_path
from seatrial.regress.bisect.environments.locks import BuildFailed

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
        done = subprocess.run(command, cwd=tree, env=clean_env(), stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S, check=False)
        told = parse_json(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
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
