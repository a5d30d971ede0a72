"""Staging the instruments: a small copy of `seatrial` that a loop's interpreter can import.

The copy holds the probes and the loop's own driver and nothing else, so that a loop never sees Seatrial's
dependencies; and it stays in the run directory, so that `command.sh` runs as it stands after Seatrial was upgraded.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import seatrial
from seatrial.model.loop import Loop

ROOT = Path(seatrial.__file__).parent


def stage(loop: Loop, run_dir: Path) -> Path:
    """Copy probes and driver below `run_dir`; returns the directory for PYTHONPATH."""
    target = run_dir / "instruments"
    for source in (ROOT / "probes", *loop.instruments()):
        package = target / "seatrial" / source.relative_to(ROOT)
        shutil.copytree(source, package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        for parent in package.relative_to(target).parents:
            if parent != Path():
                (target / parent / "__init__.py").touch()
    return target
