"""The variables that make every NeMo-RL process prove its imports.

They do nothing by themselves: the check before training reads them (`drive/imports.py`), and `drive/functional.py` puts
the module that starts the witness in front of the script's import path.
"""

from __future__ import annotations

import os
from pathlib import Path

from seatrial.loops.nemo_rl.runs.checkout import bundled_core
from seatrial.model.loop import Context

WATCH = ("nemo_rl", "megatron.core", "megatron.bridge", "torch", "transformers", "ray", "vllm", "sglang")


def witness_variables(context: Context, directory: Path) -> dict[str, str]:
    """For the processes of one level directory."""
    roots = ((package, repo.synced or repo.import_root) for repo in context.changes for package in repo.packages)
    tested = [f"{package}={root}" for package, root in roots if root]
    tested += [f"megatron.core={place}" for place in bundled_core(context)]
    return {
        "SEATRIAL_IMPORTS": str(directory),
        "SEATRIAL_UNDER_TEST": os.pathsep.join(tested),
        "SEATRIAL_WATCH": ",".join(WATCH),
    }
