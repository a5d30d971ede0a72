"""See the package."""

from vllm import _Absent  # type: ignore[attr-defined,unused-ignore]


class StructuredOutputsParams(_Absent):  # type: ignore[misc,unused-ignore]
    """Of an engine in this process."""
