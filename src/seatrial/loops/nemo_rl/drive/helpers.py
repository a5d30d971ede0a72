"""Megatron-Core's dataset helpers, built in a node-local copy of Megatron-LM: where the checkout is full or read-only.

Nothing is written into the checkout. The suffix of the built file comes from the Python of the workers, because the
makefile asks `python3-config`, which not every image has, and then builds a file that nobody can import.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from seatrial.loops.nemo_rl.drive.process import Child, Failed, say

NOT_BUILT = 92
"""Exit code: the helpers could not be built."""
DATASETS = Path("megatron", "core", "datasets")
SUFFIX = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX') or '')"
BUILD_SECONDS = 600
COLOUR = re.compile(r"\x1b\[[0-9;]*[mK]")
ERROR = re.compile(r"\berror: |No module named|No space left|No such file|not found|cannot ")


def build(core: Path, python: Path, log: Path, child: Child) -> Path:
    """The copy of the Megatron-LM at `core`, with helpers that `python` can import. It is the caller's to remove."""
    if not (core / DATASETS / "Makefile").is_file():
        raise Failed(NOT_BUILT, f"helpers failed: {core / DATASETS / 'Makefile'} is missing: git submodule update --init --recursive")
    copy = Path(tempfile.mkdtemp(prefix="seatrial-megatron-")) / core.name
    try:
        shutil.copytree(core, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        built = _make(copy / DATASETS, python, log, child)
    except (OSError, subprocess.TimeoutExpired) as error:
        remove(copy)
        raise Failed(NOT_BUILT, f"helpers failed: {error}") from error
    except Failed:
        remove(copy)
        raise
    # Without the name of the file: in a log it stands for helpers that are missing.
    say(f"helpers built for {python} in {built.parent}")
    return copy


def remove(copy: Path) -> None:
    """Remove a copy that `build` made."""
    shutil.rmtree(copy.parent, ignore_errors=True)


def variables(environment: Mapping[str, str], core: Path, copy: Path) -> dict[str, str]:
    """The copy stands in front of the original on the import path, and is where Megatron-Core is expected from."""
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path.insert(path.index(str(core)) if str(core) in path else 0, str(copy))
    expected = environment.get("SEATRIAL_UNDER_TEST", "").split(os.pathsep)
    moved = [f"megatron.core={copy}" if entry == f"megatron.core={core}" else entry for entry in expected]
    return {"PYTHONPATH": os.pathsep.join(path), "SEATRIAL_UNDER_TEST": os.pathsep.join(moved)}


def _make(folder: Path, python: Path, log: Path, child: Child) -> Path:
    suffix = subprocess.run([python, "-c", SUFFIX], capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    if not re.fullmatch(r"\.cpython-\d[\w.-]*\.so", suffix):
        raise Failed(NOT_BUILT, f"helpers failed: {python} names no suffix for extension modules, but {suffix!r}")
    environment = {**os.environ, "PATH": os.pathsep.join((str(python.parent), os.environ.get("PATH", os.defpath)))}
    with log.open("wb") as output:
        words = ["make", "--no-print-directory", "-C", str(folder), f"LIBEXT={suffix}"]
        code = child.run(words, environment, folder, output, BUILD_SECONDS)
    built = folder / f"helpers_cpp{suffix}"
    if code or not built.is_file():
        missing = "" if code else f", and there is no {built.name}"
        raise Failed(NOT_BUILT, f"helpers failed: make ended with {code}{missing}: {_cause(log)}")
    return built


def _cause(log: Path) -> str:
    """The first line that tells of an error, else what was said last; make itself only adds that it failed."""
    text = COLOUR.sub("", log.read_text(encoding="utf-8", errors="replace"))
    lines = [line.strip() for line in text.split("\n") if line.strip() and not line.startswith("make: ***")]
    return next((line for line in lines if ERROR.search(line)), lines[-1] if lines else "it said nothing")
