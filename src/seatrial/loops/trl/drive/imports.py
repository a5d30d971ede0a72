"""Every process of the loop proves where its packages come from before it does anything else."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from seatrial.probes import provenance

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
WRONG_IMPORT = 90
"""Exit code of a process that found a package under test in another place than its checkout."""


def prove_imports(path: Path, process: str, under_test: Sequence[str]) -> None:
    """Record the import of every package; end the process when one under test comes from elsewhere."""
    expected = dict(item.split("=", 1) for item in under_test)
    packages = [*PACKAGES, *(name for name in expected if name not in PACKAGES)]
    for name in expected:
        # A package under test that breaks on import must show its traceback: that is the change, not its surroundings.
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    rows = provenance.report(str(path), process, packages, expected)
    problems = provenance.verify(rows)
    for problem in problems:
        print(f"seatrial: wrong import in {process}: {problem}", flush=True)
    if problems:
        sys.exit(WRONG_IMPORT)
    print(f"seatrial: imports proven in {process}", flush=True)
