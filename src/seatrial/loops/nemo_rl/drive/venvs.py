"""The environments of NeMo-RL's Ray workers: one per actor class, which uv makes when it is first used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

POLICY = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
IMAGE = Path("/opt/ray_venvs")
"""Where NeMo-RL's container images have them."""


def policy_python(checkout: Path, environment: Mapping[str, str]) -> Path | None:
    """The Python of the worker that holds the Megatron policy; None when its environment is not made yet."""
    if environment.get("NEMO_RL_PY_EXECUTABLES_SYSTEM") == "1":
        return Path(sys.executable)
    named = environment.get("NEMO_RL_VENV_DIR")
    places = [Path(named)] if named else [checkout / "venvs", IMAGE]
    found = [place / POLICY / "bin" / "python" for place in places]
    return next((python for python in found if python.is_file()), None)
