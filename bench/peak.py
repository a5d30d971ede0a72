"""Peak memory of this program, for benchmarks."""

from __future__ import annotations

import re
from pathlib import Path


def peak_kib() -> int:
    """From the kernel's own mark. Not ru_maxrss: that survives exec, so a child would report its parent's size as its own."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1])
