"""Whether processes that a test started are gone."""

from __future__ import annotations

from pathlib import Path


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits only for somebody to take note of its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
