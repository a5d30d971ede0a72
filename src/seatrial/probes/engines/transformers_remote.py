"""A generation process that holds a plain transformers model, seen from the policy. Standard library only.

Every wait has a deadline and says what it waits for; leaving the context ends the process, whatever happened inside.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from seatrial.probes.refit.driver import say
from seatrial.probes.refit.errors import RefitRefused

ANSWER_SECONDS = 300.0
GENERATOR = "seatrial.probes.engines.transformers_generator"
SHARED = Path("/dev/shm")


class Remote:
    """One process that runs `module` with `arguments`. It starts at once, and the first question waits until it has loaded its model."""

    def __init__(self, arguments: Sequence[str], module: str = GENERATOR) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="seatrial-", dir=SHARED if SHARED.is_dir() else None)
        self.payload = Path(self._directory.name, "payload")
        key, socket = secrets.token_bytes(16), str(Path(self._directory.name, "socket"))
        self._listener = Listener(socket, family="AF_UNIX", authkey=key)
        command = [sys.executable, "-m", module, "--socket", socket, *arguments]
        self.process = subprocess.Popen(command, env={**os.environ, "SEATRIAL_SOCKET_KEY": key.hex()})
        self.connection: Connection | None = None

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and remove what was shared."""
        if self.connection is not None:
            self.connection.close()  # it ends when its socket does
        try:
            self.process.wait(timeout=10 if self.connection is not None else 0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.close()
        self._directory.cleanup()

    def _accept(self) -> Connection:
        say(f"waiting up to {ANSWER_SECONDS:.0f} s for the generation process to connect")
        self._listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]  # the only way to wait with a deadline
        stops = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < stops:
            try:
                return self._listener.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the generation process ended with code {self.process.returncode} before it connected") from None
        raise RuntimeError(f"the generation process did not connect within {ANSWER_SECONDS:.0f} s")

    def expect(self, export: dict[str, Any]) -> None:
        """It reads its weights by their own names."""

    def ask(self, do: str, *arguments: Any) -> Any:
        """One request and its answer; a refusal there is one here, and a death is the refusal "dead"."""
        if self.connection is None:
            self.connection = self._accept()
        try:
            self.connection.send({"do": do, "arguments": arguments})
            if not self.connection.poll(ANSWER_SECONDS):
                raise RuntimeError(f"the generation process did not answer {do!r} within {ANSWER_SECONDS:.0f} s")
            status, value = self.connection.recv()
        except (EOFError, OSError):
            raise RefitRefused("dead", detail=f"the generation process ended with code {self._code()} at {do!r}") from None
        if status == "refused":
            raise RefitRefused(*value)
        if status != "ok":
            raise RuntimeError(f"the generation process failed at {do!r}: {value}")
        return value

    def _code(self) -> int | None:
        """How the process ended; None when it closed the socket and lives."""
        try:
            return self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return None
