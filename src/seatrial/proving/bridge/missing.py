"""Errors that say what this machine lacks, not what a change broke. The part is named exactly.

A module or a name of Megatron itself that cannot be imported is never the machine's fault.
"""

from __future__ import annotations

import re

_TE = r"transformer[-_ ]engine|TransformerEngine|Transformer Engine"
_PACKAGES = r"mamba[-_]ssm|causal[-_]conv1d|flash[-_]attn|grouped_gemm|fla\b"
PARTS = {
    r"No module named '(?P<part>(?!megatron\b)[\w.]+)'": "the package {part}",
    r"(?P<part>Torch not compiled with CUDA enabled|Found no NVIDIA driver on your system)": "CUDA: {part}",
    r"(?P<part>_cuda_setDevice|_cuda_getDeviceCount|_cuda_getCurrentRawStream)": "CUDA: torch has no {part} here",
    r"(?P<part>Transformer Engine is not installed on this machine)": "Transformer Engine: {part}",
    r"(?P<part>Please use TE\w+ instead)": "Transformer Engine: {part}",
    r"(?P<part>[\w ]*[Cc]ontext parallelism is only supported by TE\w+)": "Transformer Engine: {part}",
    r"(?P<part>\w+ is a Triton kernel; Triton is not installed on this machine)": "Triton: {part}",
    rf"(?P<part>[^\n]*(?:{_TE})[^\n]*(?:not (?:installed|available|found)|required|need))": "Transformer Engine: {part}",
    rf"(?P<part>[^\n]*(?:{_PACKAGES})[^\n]*(?:not (?:installed|available)|[Pp]lease install))": "{part}",
}
_OWN = re.compile(r"cannot import name|No module named 'megatron[.']")


def lacking(error: str) -> str | None:
    """The missing part that ended something with this traceback, or None when it is no such error."""
    text = error.strip()
    tail = "\n".join(text.splitlines()[-12:])
    final = re.split(r"\n(?=\S)", tail)[-1] if tail else ""
    if _OWN.search(final):
        return None
    for pattern, form in PARTS.items():
        found = re.search(pattern, final)
        if found:
            return form.format(part=" ".join(found["part"].split())[:300])
    return None
