"""What Seatrial costs on top of the bare loop: the same level run by `seatrial run` and by its own command.sh.

CPU seconds of the whole process tree, best of several alternating runs, since timings on shared machines are noisy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 3


def cpu(command: list[str], **environment: str) -> float:
    """CPU seconds of a command and all its descendants."""
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment})
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print ours, the peer's and the overhead, per level."""
    seatrial = str(Path(sys.executable).with_name("seatrial"))
    for level in ("0", "6"):
        ours, bare = [], []
        with tempfile.TemporaryDirectory() as folder:
            for index in range(RUNS):
                out = Path(folder) / f"run{index}"
                ours.append(cpu([seatrial, "run", "--level", level, "--out", str(out)]))
                script = next(out.glob("levels/*/command.sh"))
                bare.append(cpu(["bash", str(script)], OUT=str(Path(folder) / f"bare{index}")))
        over = min(ours) - min(bare)
        bar = 0.03 * min(bare) + 2
        print(
            f"overhead, level {level}: seatrial {min(ours):.2f} CPU-s, bare loop {min(bare):.2f} CPU-s, ratio {min(ours) / min(bare):.3f}, "
            f"{over:+.2f} s (bar: 3 % plus 2 s = {bar:.2f} s)"
        )


if __name__ == "__main__":
    main()
