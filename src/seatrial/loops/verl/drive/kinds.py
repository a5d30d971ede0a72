"""What a process of verl is, by the command line of its interpreter."""

from __future__ import annotations

from collections.abc import Sequence


def process_kind(command: Sequence[str]) -> str:
    """`driver`, `worker` or `child`.

    The wrapper's own question for the device (`python3 -`) and spawned children are no drivers: were they taken for
    one, the real driver could be missing without anybody noticing.
    """
    if any(word.endswith("default_worker.py") for word in command):
        return "worker"
    return "driver" if main_module(command).startswith(("verl.", "seatrial.")) else "child"


def main_module(command: Sequence[str]) -> str:
    """The module that `python -m` runs, or nothing."""
    words = list(command)
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""
