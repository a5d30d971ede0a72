"""The processes of NeMo-RL: what each is by its command line, the environments of Ray workers, the one child that the driver runs, and

    python -m seatrial.instruments.nemo_rl.nemo_process --checkout DIR [arguments of ray_imports]

in which driver and policy worker say where they would import from (`seatrial.instruments.ray_imports`). The driver's environment need not
hold Megatron, so what the worker says counts. Where the worker's environment is not made yet, the worker runs in the driver's: then what is
on PYTHONPATH is proven now, and the rest by training.

A signal never cuts through the driver's own work, which keeps evidence and restores trees: it is remembered and passed on to the child.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from types import FrameType
from typing import IO

GRACE_S = 5.0
"""The trial allows ten seconds, and results must be moved after that."""
USAGE = 2


class Failed(Exception):
    """Why the phase ends here, and the exit code that says so."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def say(text: str) -> None:
    """One line in the log of the phase, at once. Whether somebody reads it must not matter to what follows."""
    with contextlib.suppress(BrokenPipeError):
        print(f"seatrial: {text}", flush=True)


class DriverChild:
    """The child that runs now, and the signal that asked for its end."""

    def __init__(self) -> None:
        self._signal = 0
        self._process: subprocess.Popen[bytes] | None = None

    def asked(self) -> int:
        return self._signal

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGALRM, self._late)

    def run(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: IO[bytes] | None = None, seconds: float = 0) -> int:
        """Run to the end, or for so many seconds; 128 + n when a signal ended it. Nothing starts once a signal came."""
        if self.asked():
            return 128 + self.asked()
        errors = subprocess.STDOUT if output else None
        self._process = subprocess.Popen(argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        if self.asked():  # it came while the child was being started
            self._pass_on(self.asked())
        code = self._process.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._process = None
        return 128 - code if code < 0 else code

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signal = self._signal or number
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    def _late(self, _: int, __: FrameType | None) -> None:
        if self._process is not None:
            self._process.kill()


def command_line() -> list[str]:
    return list(getattr(sys, "orig_argv", [])) or [sys.executable, *sys.argv]  # Python 3.9 has no orig_argv


def program(command: Sequence[str]) -> str | None:
    """The script that runs, also one that coverage runs."""
    return next((word for word in command[1:] if word.endswith(".py") and not word.startswith("-")), None)


def process_kind(command: Sequence[str]) -> str:
    """`driver`: a program in examples/ or in a folder of it; `worker`: a Ray worker; else `child`. What prepares a Ray worker, dumps
    metrics or was spawned is neither: were it taken for one, the real one could be missing without anybody noticing."""
    place = PurePath(program(command) or "")
    if place.name == "default_worker.py":
        return "worker"
    return "driver" if "examples" in place.parts[-3:-1] else "child"


POLICY = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
IMAGE = Path("/opt/ray_venvs")
"""Where NeMo-RL's container images have them."""


def policy_python(checkout: Path, environment: Mapping[str, str]) -> Path | None:
    """The Python of the worker that holds the Megatron policy; None when its environment is not made yet."""
    if environment.get("NEMO_RL_PY_EXECUTABLES_SYSTEM") == "1":
        return Path(sys.executable)
    named = environment.get("NEMO_RL_VENV_DIR")
    places = [Path(named)] if named else [checkout / "venvs", IMAGE]
    found = [place / POLICY / "bin" / "python" for place in places]
    return next((python for python in found if python.is_file()), None)


def main(argv: Sequence[str] | None = None) -> int:
    from seatrial.instruments import ray_imports

    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--checkout", required=True, type=Path)
    arguments, rest = parser.parse_known_args(argv)
    python = policy_python(arguments.checkout, os.environ)
    if python is None:
        say("the policy worker's environment is not made yet: a worker with the driver's Python is asked instead")
        return ray_imports.main([*rest, "--may-lack", f"{ray_imports.DRIVER},{ray_imports.WORKER}"])
    say(f"Ray workers are started with {python}")
    return ray_imports.main([*rest, "--may-lack", ray_imports.DRIVER, "--py-executable", shlex.quote(str(python))])


if __name__ == "__main__":
    sys.exit(main())
