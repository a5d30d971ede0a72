"""The generation process of the transformers driver, seen from the policy. Runs inside an engine's interpreter: standard library only.

Every wait has a deadline and says what it waits for; leaving the context ends the process, whatever happened inside.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from seatrial.probes.refit.errors import RefitRefused

ANSWER_SECONDS = 300.0


def say(text: str) -> None:
    """A line for the log."""
    print(f"seatrial: {text}", flush=True)


class Remote:
    """The generation process, seen from the policy: every wait has a deadline, and leaving ends it."""

    def __init__(self, model: Path, fault: str | None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="seatrial-")
        key, socket = secrets.token_bytes(16), str(Path(self._directory.name, "socket"))
        self._listener = Listener(socket, family="AF_UNIX", authkey=key)
        words = ["-m", "seatrial.probes.engines.transformers_generator", "--socket", socket, "--model", str(model)]
        words += ["--fault", fault] if fault else []
        self.process = subprocess.Popen([sys.executable, *words], env={**os.environ, "SEATRIAL_SOCKET_KEY": key.hex()})
        self.connection: Connection | None = None

    def __enter__(self) -> Remote:
        return self

    def connect(self) -> None:
        """Wait until it has loaded its model; there is time for other things before."""
        self.connection = self._accept()

    def __exit__(self, *error: object) -> None:
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
        say(f"waiting up to {ANSWER_SECONDS:.0f} s for the generator to connect")
        self._listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]  # the only way to wait with a deadline
        stops = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < stops:
            try:
                return self._listener.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the generator ended with code {self.process.returncode} before it connected") from None
        raise RuntimeError(f"the generator did not connect within {ANSWER_SECONDS:.0f} s")

    def ask(self, do: str, *arguments: Any) -> Any:
        """One request and its answer; a refusal there is one here, and a death is the refusal "dead"."""
        assert self.connection is not None
        try:
            self.connection.send({"do": do, "arguments": arguments})
            if not self.connection.poll(ANSWER_SECONDS):
                raise RuntimeError(f"the generator did not answer {do!r} within {ANSWER_SECONDS:.0f} s")
            status, value = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise RefitRefused("dead", detail=f"the generator was gone when it was asked to {do}") from error
        if status == "refused":
            raise RefitRefused(*value)
        if status != "ok":
            raise RuntimeError(f"the generator failed at {do!r}: {value}")
        return value
