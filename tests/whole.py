"""`python -m tests.whole`: every test, the quick ones first; what failed on a crowded machine is run once more, alone.

- A handful of failed tests gets a second run, and its outcome is printed by name: a test that passed only when alone is a race, of
  ours or of upstream, and wants mending.
- Quick tests that still fail end it there, after minutes: nobody waits an hour to hear so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from seatrial.loops.trl.loop import LOOP
from seatrial.runtime.environments import Environments

KEPT = ("-q", "-o", "tmp_path_retention_policy=failed")
QUICK = ("-m", "not real and not slow", "-n", "3", "--dist", "loadfile", *KEPT)
OTHERS = ("-m", "real or slow", "-n", "4", "--dist", "loadfile", "--no-loadscope-reorder", "--durations=40", *KEPT)
AGAIN = ("--last-failed", "--last-failed-no-failures", "none")
MOST = 10
"""More than that at once is no race."""

FAILED = 1
"""pytest's exit code."""


def pytest(*words: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """pytest of this interpreter; `quiet` keeps what it prints."""
    return subprocess.run([sys.executable, "-m", "pytest", *words], check=False, text=True, stdout=subprocess.PIPE if quiet else None)


def failed(marks: tuple[str, ...]) -> list[str]:
    """The tests of these marks that the last run failed."""
    listed = pytest(*marks, *AGAIN, "--collect-only", "-q", quiet=True)
    return [line for line in listed.stdout.splitlines() if "::" in line]


def limit_instructions() -> None:
    """Some virtual machines offer AMX and then refuse it: bf16 products end with SIGILL there. oneDNN is then told to do without."""
    built = Environments().find("trl", LOOP.environments()["trl"])
    if built is None or "ONEDNN_MAX_CPU_ISA" in os.environ:
        return
    product = "import torch; a = torch.ones(64, 64).bfloat16(); a @ a"
    if subprocess.run([str(built.python), "-c", product], check=False, capture_output=True).returncode == -signal.SIGILL:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
        _say("this machine refuses AMX instructions that it offers: ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 for the tests")


def main() -> int:
    """The exit code of the suite."""
    limit_instructions()
    return part(QUICK) or part(OTHERS)


def part(words: tuple[str, ...]) -> int:
    """The exit code of one part of the suite: of the second run, where there was one."""
    code = pytest(*words).returncode
    if code != FAILED or not (crowded := failed(words[:2])) or len(crowded) > MOST:
        return code
    _say(f"\nrun once more, alone: {', '.join(crowded)}")
    code = pytest(*words[:2], *AGAIN, *KEPT).returncode
    if code == 0:
        _say(f"PASSED ONLY ALONE, a race to mend: {', '.join(crowded)}")
    return code


def _say(line: str) -> None:
    """At once: what pytest prints next comes after it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
