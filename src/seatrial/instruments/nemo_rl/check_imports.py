"""The import check of NeMo-RL: driver and policy worker say where they would import from. See `seatrial.instruments.ray_imports`.

    python -m seatrial.instruments.nemo_rl.check_imports --checkout DIR [arguments of ray_imports]

The driver's environment need not hold Megatron, so what the worker says counts. Where the worker's environment is not
made yet, the worker runs in the driver's: then what is on PYTHONPATH is proven now, and the rest by training.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from seatrial.instruments import ray_imports
from seatrial.instruments.nemo_rl.nemo_process import policy_python, say
from seatrial.instruments.ray_imports import DRIVER, WORKER


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check with the worker's own Python."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--checkout", required=True, type=Path)
    arguments, rest = parser.parse_known_args(argv)
    python = policy_python(arguments.checkout, os.environ)
    if python is None:
        say("the policy worker's environment is not made yet: a worker with the driver's Python is asked instead")
        return ray_imports.main([*rest, "--may-lack", f"{DRIVER},{WORKER}"])
    say(f"Ray workers are started with {python}")
    return ray_imports.main([*rest, "--may-lack", DRIVER, "--py-executable", shlex.quote(str(python))])


if __name__ == "__main__":
    sys.exit(main())
