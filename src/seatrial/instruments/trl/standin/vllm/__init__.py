"""Stands in for vLLM in the trainer's process, where TRL only talks to a server: the names that TRL imports, and nothing behind them.

The server is the real vLLM, in its own process and environment. What TRL sends tensors with is put in place by `vllm_rollouts`.
"""

__version__ = "0.31.0"  # the newest that TRL 1.16 says it supports


class _Absent:
    def __init__(self, *_: object, **__: object) -> None:
        raise RuntimeError("the trainer's process has no vLLM of its own: generation runs in the server")


class LLM(_Absent):
    """An engine in this process."""


class RequestOutput(_Absent):
    """What such an engine returns."""


class SamplingParams(_Absent):
    """What such an engine is asked with."""
