"""Parts that probes drive on their own, and the opt-in environments they run in: a generation engine, Megatron.

None of them is a loop: nothing trains towards anything in them. `seatrial env build` makes their environments like any other. A trial
that needs one and does not find it says so; it never builds it by the way.
"""

from __future__ import annotations

from pathlib import Path

VLLM_CPU = "vllm-cpu"
"""vLLM on a CPU: a real server for the refit probe where there is no GPU."""
MEGATRON_CPU = "megatron-cpu"
"""Megatron-Core and Megatron-Bridge on a CPU: what the conformance ladder runs in where there is no GPU."""


def environments() -> dict[str, Path]:
    """The locks of these environments, by the environment's name."""
    return {name: Path(__file__).parent / f"{name}.lock" for name in (VLLM_CPU, MEGATRON_CPU)}
