"""Staging the instruments: a small copy of `seatrial` that a loop's interpreter can import.

The copy holds the probes and the loop's own driver and nothing else, so that a loop never sees Seatrial's
dependencies; and it stays in the run directory, so that `command.sh` runs as it stands after Seatrial was upgraded.
"""

from __future__ import annotations

from pathlib import Path

import seatrial
from seatrial.files import write_bytes
from seatrial.model.loop import Loop

ROOT = Path(seatrial.__file__).parent


def stage(loop: Loop, run_dir: Path) -> Path:
    """Copy probes and driver below `run_dir`; returns the directory for PYTHONPATH."""
    target = run_dir / "instruments"
    for source in (ROOT / "probes", *loop.instruments()):
        for file in sorted(source.rglob("*.py")):
            write_bytes(target / "seatrial" / file.relative_to(ROOT), file.read_bytes())
        for parent in (source / "x").relative_to(ROOT).parents:
            place = target / "seatrial" / parent / "__init__.py"
            if not place.exists():
                write_bytes(place, b"")
    return target
