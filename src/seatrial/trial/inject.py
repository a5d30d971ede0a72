"""Staging the instruments: a small copy of `seatrial` that a loop's interpreter can import.

The copy holds the probes and the loop's own driver and nothing else, so that a loop never sees Seatrial's
dependencies; and it stays in the run directory, so that `command.sh` runs as it stands after Seatrial was upgraded.
"""

from __future__ import annotations

from pathlib import Path

import seatrial
from seatrial.files import write_bytes
from seatrial.model.loop import Loop
from seatrial.trial.disk import require_room_for_instruments

ROOT = Path(seatrial.__file__).parent
STAGED = (".py", ".c", ".cu")
"""The probes' kernels are compiled where they run."""
OPEN = b'__path__ = __import__("pkgutil").extend_path(__path__, __name__)\n'
"""Where Seatrial is installed, too, the rest of it stays reachable: pytest loads its plugins in every session."""


def stage(loop: Loop, run_dir: Path) -> Path:
    """Copy probes and driver below `run_dir`; returns the directory for PYTHONPATH."""
    return stage_packages(loop.instruments(), run_dir)


def stage_packages(packages: tuple[Path, ...], run_dir: Path) -> Path:
    """The same for probes and any packages of ours; none are needed where a probe runs on its own. BlockedError on a full disk."""
    require_room_for_instruments(run_dir)
    target = run_dir / "instruments"
    for source in (ROOT / "probes", ROOT / "instruments", ROOT / "shadow", *packages):
        for file in sorted(file for file in source.rglob("*") if file.suffix in STAGED):
            write_bytes(target / "seatrial" / file.relative_to(ROOT), file.read_bytes())
        for parent in (source / "x").relative_to(ROOT).parents:
            place = target / "seatrial" / parent / "__init__.py"
            if not place.exists():
                write_bytes(place, OPEN if place.parent == target / "seatrial" else b"")
    return target
