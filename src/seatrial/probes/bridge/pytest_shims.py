"""A pytest plugin (`-p seatrial.probes.bridge.pytest_shims`): the Bridge's own tests with our CPU shims, and what they imported.

- All shims are installed before the first conftest is read. Measured on 778 tests of the Bridge at 067f987df: the whole table lets
  682 pass, the import shims alone 650, and none that passes with those fails with the whole table.
- At the end, `$SEATRIAL_IMPORTED` gets the files that Megatron came from and the shims that took part.
- Without torch nothing is installed: the tests then say themselves what they lack.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

from seatrial.probes.megatron import shims

IMPORTED = "SEATRIAL_IMPORTED"
PACKAGES = ("megatron.bridge", "megatron.core")


def pytest_load_initial_conftests() -> None:
    """Called by pytest before it reads any conftest.py."""
    if importlib.util.find_spec("torch") is not None:
        shims.install()


def pytest_sessionfinish() -> None:
    """Called by pytest after the last test."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in PACKAGES}
    used = [row["id"] for row in shims.report() if row["state"] == "used"]
    Path(os.environ[IMPORTED]).write_text(json.dumps({"files": files, "shims": used}), encoding="utf-8")
