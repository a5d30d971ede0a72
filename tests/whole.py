"""`python -m tests.whole`: every test; what real loops, servers and clusters failed on a crowded machine is run once more, alone.

Only tests marked `real` or `slow` get the second run, at most a handful of them, and its outcome is printed by name: a test that
passed only when alone is a race, of ours or of upstream, and wants mending. A quick test that fails has failed.
"""

from __future__ import annotations

import subprocess
import sys

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


def main() -> int:
    """The exit code of the suite."""
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
