"""What Ray workers imported: a driver that imports an engine has trained nothing with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seatrial.files import read_text
from seatrial.loops.proof import proof
from seatrial.model.guarded import BadValue, parse_json
from seatrial.model.record import CheckResult
from seatrial.model.verdict import Boundary

ENGINE = ("megatron.core", "megatron.bridge")


def trained_with(path: Path) -> CheckResult:
    """Ray workers really imported Megatron-Core and Megatron-Bridge, by the import proofs in `path`."""
    used = {row["package"] for row in _imports(path) if row["process"] == "worker" and row["method"] == "imported" and row["file"]}
    absent = [package for package in ENGINE if package not in used]
    message = f"no Ray worker imported {' and '.join(absent)}" if absent else ""
    value = f"{len(ENGINE) - len(absent)} of {len(ENGINE)} packages"
    return proof("Ray workers used Megatron-Core and Megatron-Bridge", not absent, value, Boundary.PROVIDER, "all", message)


def _imports(path: Path) -> Iterator[dict[str, Any]]:
    """The import proofs; a torn row proves nothing, and the judge names it."""
    for row in read_text(path).split("\n") if path.is_file() else ():
        try:
            entry = parse_json(row)
        except BadValue:
            continue
        if isinstance(entry, dict) and {"process", "package", "method", "file"} <= set(entry):
            yield entry
