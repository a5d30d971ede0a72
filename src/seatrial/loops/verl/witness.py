"""The variables that make every verl process prove its imports, and its refits where asked (read by `drive/imports.py`)."""

from __future__ import annotations

import os
from pathlib import Path

from seatrial.loops.verl.gpu.checkout import bundled_core
from seatrial.model.loop import Context

MODULE = "seatrial.loops.verl.drive.imports"
REFIT = "SEATRIAL_REFIT_FACTS"
"""Where the refit probe writes; the user turns it on, and workers on other nodes must be told."""
WATCH = ("verl", "megatron.core", "megatron.bridge", "torch", "transformers", "ray", "vllm", "sglang")


def witness_variables(context: Context, directory: Path, plugins: tuple[str, ...] = ()) -> dict[str, str]:
    """For the processes of one level directory; `plugins` are loaded after the witness."""
    tested = [f"{package}={repo.import_root}" for repo in context.changes for package in repo.packages if repo.import_root]
    tested += [f"megatron.core={place}" for place in bundled_core(context)]
    return {
        "VERL_USE_EXTERNAL_MODULES": ",".join((MODULE, *plugins)),
        "SEATRIAL_IMPORTS": str(directory),
        "SEATRIAL_UNDER_TEST": os.pathsep.join(tested),
        "SEATRIAL_WATCH": ",".join(WATCH),
        **({REFIT: facts} if (facts := os.environ.get(REFIT)) else {}),
    }
