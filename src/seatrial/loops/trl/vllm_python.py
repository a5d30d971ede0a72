"""Which Python the vLLM server of level 3 runs in: the trainer's own environment need not have vLLM.

The option `vllm_python` decides if it is given; else the trainer's interpreter if it has vLLM (a user's own, with --python); else
the opt-in environment that Seatrial builds. Nothing is built by the way.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from seatrial.loops.engines import VLLM_CPU
from seatrial.model.loop import Context
from seatrial.model.record import Finding
from seatrial.model.verdict import Boundary

OPTION = "vllm_python"
MEANING = "interpreter with vLLM for level 3, where it is not the one of the trainer or of the environment vllm-cpu"
LEVEL = "vllm"
SECONDS = 60
_ASK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def interpreter(context: Context) -> Path | None:
    """The interpreter of the server; None when there is none."""
    given = context.options.get(OPTION)
    if given:
        return Path(str(given))
    return context.python if has_vllm(context.python) else context.environments.get(VLLM_CPU)


@cache
def has_vllm(python: Path) -> bool:
    """Whether an interpreter can import vLLM, without importing it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    try:
        done = subprocess.run([python, "-c", _ASK], env={**kept, "PYTHONSAFEPATH": "1"}, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def findings(context: Context) -> tuple[Finding, ...]:
    """Whether level 3 has its server, when it will run."""
    if LEVEL not in context.levels:
        return ()
    python = interpreter(context)
    if python is None:
        message = f"level 3 needs vLLM: {context.python} has none, and the environment {VLLM_CPU} is not built"
        return (_finding(False, message, f"seatrial env build {VLLM_CPU}"),)
    if not has_vllm(python):
        fix = f"name an interpreter that has vLLM with --set options.{OPTION}=PATH, or leave the option out"
        return (_finding(False, f"level 3 needs vLLM, and {python} cannot import it", fix),)
    return (_finding(True, f"level 3 runs vLLM in {python}"),)


def _finding(ok: bool, message: str, fix: str = "") -> Finding:
    return Finding(name="vllm", ok=ok, boundary=Boundary.ENVIRONMENT, message=message, fix=fix)
