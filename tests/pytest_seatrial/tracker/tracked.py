"""Real pytest sessions on small projects, for the tests of the tracker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.pytest_seatrial.pytest_server import run_pytest

DEADLINE_S = 120
OFF = ("-p", "no:seatrial_guards", "-p", "no:seatrial_select", "-p", "no:cacheprovider")


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", *OFF, *options]


def variables(**more: str) -> dict[str, str]:
    """Without what an outer session tells its own workers."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "SEATRIAL_", "COV_"))}
    return {**inherited, "SEATRIAL_HISTORY": "off", "PYTHONDONTWRITEBYTECODE": "1", **more}


def session(directory: Path, code: str | None = None, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on `code`, as test_it.py."""
    (directory / "pytest.ini").write_text("[pytest]\n")
    if code is not None:
        (directory / "test_it.py").write_text(textwrap.dedent(code))
    return run_pytest(["-q", *OFF, *options], cwd=directory, env=variables(**more), timeout=DEADLINE_S)


def strict(path: Path) -> dict[str, Any]:
    """A file of results; a NaN in it is an error."""

    def refuse(word: str) -> None:
        raise ValueError(f"{path}: {word}")

    read: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return read


def latest(directory: Path) -> dict[str, Any]:
    return strict(directory / "unit_results.json")


def dated(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "unit_results").glob("*") if not path.name.startswith("."))


def without_time(read: dict[str, Any]) -> dict[str, Any]:
    """What two sessions of the same tests have in common."""
    rest = {key: value for key, value in read.items() if key != "start_time"}
    metrics = {key: {name: values[name] for name in values if name != "_elapsed"} for key, values in sorted(read["metrics"].items())}
    return {**rest, "metrics": metrics, "outcomes": sorted(read["outcomes"].items())}
