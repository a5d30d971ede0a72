"""The interpreter and the packages that a loop runs in.

- The interpreter is asked once, with the standard library only; packages come from its own search path, without the
  caller's PYTHONPATH and working directory. Of two copies of a package the first on the path counts, as for an import.
- The fingerprint covers the Python version and the packages, not the place: a moved environment is the same one.
- An interpreter that cannot be asked blocks the trial at the environment; the error names it and the fix.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from seatrial.model.errors import BlockedError
from seatrial.model.guarded import parse_json
from seatrial.model.record import EnvironmentRecord
from seatrial.model.verdict import Boundary

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
    answer = _ask(python)
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


def compare(old: EnvironmentRecord, new: EnvironmentRecord) -> tuple[str, ...]:
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
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(row.strip() for row in done.stdout.splitlines() if row.strip()) if done.returncode == 0 else ()


def _ask(python: Path) -> dict[str, Any]:
    """The answer of the interpreter, checked for its shape."""
    try:
        # -E without -s: packages of the user's site directory are importable in the loop, so they belong to the record.
        command = [str(python), "-E", "-B", "-c", _SNIPPET]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _blocked(python, f"does not answer within {TIMEOUT_SECONDS:.0f} s") from error
    except OSError as error:
        raise _blocked(python, f"cannot be run: {error.strerror or error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise _blocked(python, f"cannot list its packages (exit code {done.returncode}): {last}")
    try:
        answer = parse_json(done.stdout.splitlines()[-1])
        strings = [answer["version"], answer["platform"], *answer["packages"], *answer["packages"].values()]
    except (IndexError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _blocked(python, f"is not a Python interpreter: it printed {done.stdout[:80]!r}") from error
    if not all(isinstance(entry, str) for entry in strings):
        raise _blocked(python, "listed packages without a name or version")
    result: dict[str, Any] = answer
    return result


def _blocked(python: Path, what: str) -> BlockedError:
    fix = "build the environment again: seatrial env build, or give the interpreter of a working one"
    return BlockedError(Boundary.ENVIRONMENT, f"{python}: {what}", fix)
