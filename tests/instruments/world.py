"""Checkouts and other copies of packages, processes that import them, and what the witness wrote about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "src"


class World:
    """Packages below `root`, and a directory for what the witness writes."""

    def __init__(self, root: Path) -> None:
        self.root, self.out = root, root / "out"
        self.out.mkdir(parents=True)

    def package(self, place: str, name: str, text: str = "") -> Path:
        """Make a package; returns the directory for the import path."""
        folder = self.root.joinpath(place, *name.split("."))
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
        return self.root / place

    def run(
        self, words: list[str], path: list[Path], tested: dict[str, Path], python: str = sys.executable, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """A process with what the witness reads."""
        environment = {
            "PYTHONPATH": os.pathsep.join(map(str, [*path, SOURCE])),
            "SEATRIAL_IMPORTS": str(self.out),
            "SEATRIAL_UNDER_TEST": os.pathsep.join(f"{name}={root}" for name, root in tested.items()),
            "SEATRIAL_WATCH": "json,nowhere",
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        }
        return subprocess.run([python, *words], env=environment, capture_output=True, text=True, timeout=30, check=False)

    def rows(self) -> list[dict[str, Any]]:
        """What was written about imports."""
        file = self.out / "imports.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def methods(self, package: str) -> list[str]:
        """How a package was reported, in order."""
        return [row["method"] for row in self.rows() if row["package"] == package]
