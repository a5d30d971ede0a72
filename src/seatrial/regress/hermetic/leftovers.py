"""What commands of a Seatrial that was killed (kill -9) left running.

- The kernel ends the command with its Seatrial, but not the children of the command: a file beside the log says which they are.
- Only files of this user are believed, and what another Seatrial is at work on is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from seatrial.launch.process import end_leftovers
from seatrial.model.errors import BlockedError, UserError


def end_earlier(pid_files: Iterable[Path], tell: Callable[[str], None]) -> None:
    """End what the runs of these files left, and say so."""
    for file in sorted(pid_files):
        try:
            if file.is_symlink() or file.stat().st_uid != os.getuid():
                continue
            count = end_leftovers(file)
        except (OSError, UserError):
            continue  # gone meanwhile, no such file of ours, or its Seatrial is at work
        except BlockedError as error:
            tell(error.message)
            continue
        if count:
            tell(f"{file.parent}: ended {count} process{'' if count == 1 else 'es'} that a killed Seatrial had left running")
