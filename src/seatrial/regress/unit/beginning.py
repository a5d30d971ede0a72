"""What happens to the results of an earlier session when this one does not come to its tests.

- An option that pytest does not know, a conftest.py that breaks, a group whose needs are not met: there is no session that ends, and nobody
  who writes. What lies there would be taken for this session's, so it is replaced when pytest cleans up.
- A session that ends has the collector for that (`collector.py`).
- Loaded only where there is such a file, and not by workers of pytest-xdist: the controller speaks for all.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from seatrial.regress.unit import results

UNKNOWN = "not begun"
"""The exit status where pytest has none of its own: an error of a plugin that it does not catch."""


class Beginning:
    """From the first conftest until a session ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.start = time.time()
        self._caught: int | None = None
        self._ended = False

    def pytest_internalerror(self) -> None:
        """pytest shows it and goes on to the end; the same for an interrupt."""
        self._caught = int(pytest.ExitCode.INTERNAL_ERROR)

    def pytest_keyboard_interrupt(self) -> None:
        self._caught = int(pytest.ExitCode.INTERRUPTED)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._ended = True

    def close(self) -> None:
        """pytest cleans up. Without an error it was to run nothing, or it ran and the collector has written."""
        status = self._status()
        if self._ended or status is None or not results.is_ours(self.directory / results.LATEST):
            return
        head = {"start_time": results.told(self.start)}
        try:
            results.write_latest(self.directory, results.document(head, (), status, {"coverage": "[n/a] no test ran"}))
        except OSError as error:
            file = self.directory / results.LATEST
            sys.stderr.write(f"seatrial: {file} is that of an earlier session, and cannot be replaced: {error}: remove it\n")

    def _status(self) -> int | str | None:
        """What pytest will end with; None where nothing went wrong."""
        from _pytest.config import ConftestImportFailure

        error = sys.exc_info()[1]
        if error is None:
            return self._caught
        return int(pytest.ExitCode.USAGE_ERROR) if isinstance(error, pytest.UsageError | ConftestImportFailure) else UNKNOWN
