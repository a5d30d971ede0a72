"""`python -m tests.whole`: every test; what real loops, servers and clusters failed on a crowded machine is run once more, alone.

Only tests marked `real` or `slow` get the second run, at most a handful of them, and its outcome is printed by name: a test that
passed only when alone is a race, of ours or of upstream, and wants mending. A quick test that fails has failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from seatrial.launch.environments import Environments
from seatrial.loops.trl.loop import LOOP

FIRST = ("-n", "4", "--dist", "loadfile", "--no-loadscope-reorder", "-q", "--durations=40", "-o", "tmp_path_retention_policy=failed")
AGAIN = ("--last-failed", "--last-failed-no-failures", "none", "-q")
MOST = 6
"""More than that at once is no race."""

FAILED = 1
"""pytest's exit code."""


def pytest(*words: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """pytest of this interpreter; `quiet` keeps what it prints."""
    return subprocess.run([sys.executable, "-m", "pytest", *words], check=False, text=True, stdout=subprocess.PIPE if quiet else None)


def failed(marked: str) -> list[str]:
    """The tests that the last run failed and that carry these markers."""
    listed = pytest(*AGAIN, "--collect-only", "-m", marked, quiet=True)
    return [line for line in listed.stdout.splitlines() if "::" in line]


def limit_instructions() -> None:
    """Some virtual machines offer AMX and then refuse it: bf16 products end with SIGILL there. oneDNN is then told to do without."""
    built = Environments().find("trl", LOOP.environments()["trl"])
    if built is None or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return
    product = "import torch; a = torch.ones(64, 64).bfloat16(); a @ a"
    if subprocess.run([str(built.python), "-c", product], check=False, capture_output=True).returncode == -signal.SIGILL:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
        sys.stdout.write("this machine refuses AMX instructions that it offers: ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 for the tests\n")


def main() -> int:
    """The exit code of the suite."""
    limit_instructions()
    code = pytest(*FIRST).returncode
    if code != FAILED:
        return code
    quick, crowded = failed("not real and not slow"), failed("real or slow")
    if quick or not crowded or len(crowded) > MOST:
        return code
    sys.stdout.write(f"\nrun once more, alone, since they drive real loops beside other tests: {', '.join(crowded)}\n")
    code = pytest(*AGAIN, "-o", "tmp_path_retention_policy=failed").returncode
    if code == 0:
        sys.stdout.write(f"PASSED ONLY ALONE, a race to mend: {', '.join(crowded)}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
