"""A plain bisect loads little of Seatrial, and no loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from seatrial import loops
from tests.bisect.repos import build, linear

MOST = 120
"""Modules of Seatrial that a bisect of a command may import."""
COUNT = """
import atexit, json, sys
from seatrial.cli.main import run
atexit.register(lambda: print(json.dumps([name for name in sys.modules if name.partition(".")[0] == "seatrial"])))
run()
"""


def test_a_plain_bisect_imports_few_modules_and_no_loop(tmp_path: Path) -> None:
    commits = build(tmp_path / "main", linear(4))
    command = ("bisect", "--good", commits[0], "--out", str(tmp_path / "out"), "--", "sh", "-c", "test $(cat number.txt) -lt 2")
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *command],
        cwd=tmp_path / "main",
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"Commit: `{commits[2]}`" in done.stdout
    modules = json.loads(done.stdout.splitlines()[-1])
    assert len(modules) <= MOST, sorted(modules)
    of_loops = tuple(f"seatrial.{room}.{name.replace('-', '_')}" for room in ("loops", "instruments") for name in loops.built_in())
    assert [name for name in modules if name.startswith(of_loops)] == []
